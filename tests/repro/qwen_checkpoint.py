"""Checkpoint folders as the hub has them, without the hub: layout, shards, tokenizer, template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from repro.data.generator import generate_problems
from repro.data.problem import Problem
from repro.data.prompts import PAPER_SUFFIX, render
from repro.data.public import PUBLIC_SETS, file_of
from repro.models.checkpoint import write_json
from repro.spec.needs import DATA_DOWNLOADS
from tests.repro.architectures import CLASSES

# Qwen2's rules: how text is cut before byte-level merges, and its control tokens.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\n" + _SYSTEM + "<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (loop.first and message.role == 'system') %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Large enough for every format's blocks; the vocabulary is padded, as Qwen2.5's is.
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def write_tokenizer(folder: Path) -> None:
    """Write a small tokenizer by Qwen2's rules, with its chat template and end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CUT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    problems = generate_problems("train", 40, (), 0)
    texts = [f"{problem.question}\n{PAPER_SUFFIX}" for problem in problems]
    tokenizer.train_from_iterator([*texts, _SYSTEM], trainer)
    tokenizer.add_special_tokens(list(_CONTROL))
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in _CONTROL}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "chat_template": _TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "do_sample": True})


def write_small(
    folder: Path, architecture: str = "qwen2", *, lessons: int = 0, **sizes: int
) -> Path:
    """Write a small sharded checkpoint of an architecture, by transformers itself.

    `sizes` of its config replace those of `SMALL`. In `lessons` steps it is taught to answer 7 or
    8, in the paper's format and at random, which is right half of the time on `write_hub`'s
    problems; 0 leaves it random.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    configs, classes = CLASSES[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = classes(configs(**SMALL | sizes))
        if lessons:
            _teach(model, AutoTokenizer.from_pretrained(folder, local_files_only=True), lessons)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    write_tokenizer(folder)  # with its end tokens, which saving a model resets
    return folder


def _teach(model: Any, tokenizer: Any, lessons: int) -> None:
    """Train a model on prompts that are followed by one of two answers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    endings = [
        tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        for text in (f"<think> add </think> <answer> {number} </answer>" for number in (7, 8))
    ]
    for lesson in range(lessons):
        problem = Problem(id=str(lesson), question=_question("any", "train", lesson), answer="7")
        prompt = render(problem, "paper", tokenizer)
        ids = torch.tensor([prompt + ending for ending in endings])  # (2, S)
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def write_hub(
    folder: Path, rows: Mapping[str, int] | None = None, names: Sequence[str] = tuple(PUBLIC_SETS)
) -> None:
    """Write a hub cache that holds public data sets under their pinned revisions.

    A split that `rows` does not name has 512.
    """
    for name in names:
        public, repository = PUBLIC_SETS[name], DATA_DOWNLOADS[name].name
        levels: Sequence[tuple[int, ...]] = [()]
        if name == "bigmath":
            levels = [(3, 4, 5), (4, 5)]
        for split in public.files:
            count = (rows or {}).get(split, 512)
            for chosen in levels:
                home = folder / f"datasets--{repository.replace('/', '--')}" / "snapshots"
                path = home / public.revision / file_of(name, split, chosen)[0]
                path.parent.mkdir(parents=True, exist_ok=True)
                _write_rows(path, [_row(name, split, number) for number in range(count)])


def _row(name: str, split: str, number: int) -> dict[str, Any]:
    """Return a row with every field that any set reads."""
    gold = 7 + number % 2
    by_role = {
        "solution": f"It is {gold}.",
        "id": f"{split}-{number}",
        "level": 1 + number % 5,
        "question": _question(name, split, number),
        "answer": f"It is so. #### {gold}" if name == "gsm8k" else str(gold),
    }
    columns = PUBLIC_SETS[name].columns
    return {columns[role]: value for role, value in by_role.items() if role in columns}


def _question(name: str, split: str, number: int) -> str:
    return f"{name}, {split}, number {number}: is it 7 or 8?"


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
