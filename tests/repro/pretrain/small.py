"""Small recipes of both kinds, and human-written problems in a folder."""

from __future__ import annotations

from pathlib import Path

from repro.data.problem import Problem
from repro.data.proxy_corpus import ProxyCorpusConfig
from repro.pretrain.recipes import ProxyRecipe, TinyRecipe
from tests.repro.problem_files import write_problems

TINY = TinyRecipe(
    hidden_size=64,
    layers=2,
    heads=2,
    key_value_heads=1,
    intermediate_size=64,
    steps=12,
    tokens_per_batch=600,
    warmup_steps=2,
    checkpoint_every=100,
    quality_problems=5,
    threads=1,
)
PROXY = ProxyRecipe(
    hidden_size=64,
    layers=2,
    heads=2,
    key_value_heads=1,
    intermediate_size=64,
    steps=12,
    tokens_per_batch=1500,
    parts=2,
    learning_rate=5e-3,
    warmup_steps=2,
    checkpoint_every=100,
    quality_problems=5,
    quality_samples=2,
    threads=1,
    corpus=ProxyCorpusConfig(shard_documents=64),
)


def human_problems(count: int) -> list[Problem]:
    return [
        Problem(
            id=str(n),
            question=f"Bo has {n} kites, then 2 more?",
            answer=str(n + 2),
            solution=f"x={n}+2",
        )
        for n in range(3, 3 + count)
    ]


def write_humans(folder: Path) -> Path:
    for name in ("mawps", "svamp"):
        (folder / name).mkdir(parents=True)
        write_problems(folder / name / "test.jsonl", human_problems(3))
    write_problems(folder / "mawps" / "train.jsonl", human_problems(8))
    return folder
