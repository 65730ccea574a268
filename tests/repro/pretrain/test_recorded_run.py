"""Pre-training as a run: a whole checkpoint that loads, its measures, its record."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repro.data.generator import generate_problems
from repro.data.prompts import template_named
from repro.data.tiny_tokenizer import build_tokenizer
from repro.evaluate.asking import Evaluator, SingleAsker
from repro.evidence.environment import capture_environment
from repro.evidence.procedure import Measured, Stopped
from repro.evidence.record import read_record
from repro.models.checkpoint import TINY_FOLDER
from repro.models.policy import load_policy, load_tokenizer
from repro.pretrain import recorded_run
from repro.pretrain.recorded_run import accuracies, write_policy
from repro.pretrain.training import new_model
from repro.reward.grader import GraderPool
from repro.rl.single_run.torch_sampler import TorchSampler
from repro.run.carry_out import keep, procedure_named
from repro.spec.config import RunConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.evaluate.small import Writer, problem
from tests.repro.pretrain.small import TINY


def small_run() -> RunConfig:
    (run,) = plan(find("pretrain_tiny"), Tier.SMOKE)
    return dataclasses.replace(
        run, scale=dataclasses.replace(run.scale, quality_problems=5, threads=1)
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Measured, Path]]:
    """Carry out the run by a small recipe, stopped once; yield result and folder."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_run, "RECIPE", TINY)
        patch.setattr(recorded_run, "NEW_TOKENS", 12)
        run, asked = small_run(), itertools.count()

        def start(should_stop: Callable[[], bool]) -> Measured:
            return procedure_named(run.procedure)(
                run, folder=folder, progress=lambda *at: None, should_stop=should_stop, threads=3
            )

        with pytest.raises(Stopped):
            start(lambda: next(asked) >= 8)
        assert not (folder / "policy").exists()
        yield start(lambda: False), folder / "policy"


def test_a_run_leaves_a_checkpoint_that_loads_and_says_what_it_is(
    tiny: tuple[Measured, Path],
) -> None:
    measured, folder = tiny
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in stored
    policy = load_policy(
        folder, weight_format="nvfp4", training="lora", lora_rank=4, lora_alpha=4.0, seed=0
    )
    assert policy.effects["linears"] == {"nvfp4": 14}
    summary = json.loads((folder / "pretraining.json").read_text())
    assert summary["recipe"]["corpus"]["careless_share"] == [0.1, 0.3, 0.5, 0.6, 0.65]
    assert summary["weights_sha256"] == measured.effects["checkpoint_sha256"]
    assert summary["accuracies"]["accuracy_greedy"] == measured.metrics["accuracy_greedy"].value
    assert summary["halfway"]["step"] == 6


def test_a_run_measures_what_its_target_reports(tiny: tuple[Measured, Path]) -> None:
    measured, _ = tiny
    assert set(measured.metrics) == {metric.name for metric in find("pretrain_tiny").metrics}
    assert set(measured.inputs) == {"recipe", "tokenizer"}
    assert len(measured.series["loss"]) == 1


def test_a_runs_record_reads_back(tiny: tuple[Measured, Path], tmp_path: Path) -> None:
    measured, _ = tiny
    path = keep(small_run(), measured, datetime.now(UTC), tmp_path, capture_environment())
    record = read_record(path)
    assert record.effects["weights_sha256"] == measured.effects["checkpoint_sha256"]
    assert record.inputs["recipe"] == measured.inputs["recipe"]


def test_a_folder_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_tokenizer(TINY.corpus.generator)
    model = new_model(TINY, tokenizer, 0)
    monkeypatch.setattr(type(tokenizer), "save_pretrained", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_policy(tmp_path / "policy", model, tokenizer)
    assert list(tmp_path.iterdir()) == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_what_a_policy_shows_is_told_from_what_it_knows() -> None:
    worked = "<think>\n2 + 2 = 4.\n</think>\n<answer>4</answer>"
    tokenizer = load_tokenizer(TINY_FOLDER)
    writer = Writer(tokenizer, {"2+2?": worked, "3+3?": "<think></think>\n<answer>7</answer>"})
    problems = [problem("2+2?", "4", level=1), problem("3+3?", "6", level=2)]
    with GraderPool(workers=1) as pool:
        evaluator = Evaluator(writer, tokenizer, pool, [0])
        greedy, sampled = (
            accuracies(evaluator, problems),
            accuracies(evaluator, problems, samples=2),
        )
    assert {name: one.value for name, one in greedy.items()} == {
        "accuracy_greedy": 50.0, "accuracy_forced_working": 50.0, "working_rate": 50.0,
    }  # fmt: skip
    assert sampled.keys() - greedy.keys() == {"accuracy_sampled", "pass_at_2"}
    assert {one.value for one in sampled.values()} == {50.0}
    prompts = [prompt for prompts, _, _ in writer.requests for prompt in prompts]
    begun = {tokenizer.decode(prompt).partition("\n")[2] for prompt in prompts}
    assert begun == {"", template_named("tiny").working_prefix}


@pytest.mark.nightly
def test_the_packaged_policy_shows_half_of_what_it_knows() -> None:
    assert sum(path.stat().st_size for path in TINY_FOLDER.iterdir()) < 3_000_000
    policy = load_policy("tiny", weight_format="bf16")
    with GraderPool(workers=1) as pool:
        asker = SingleAsker(TorchSampler(policy))
        evaluator = Evaluator(asker, policy.tokenizer, pool, [0], "quality")
        shown = accuracies(evaluator, generate_problems("test", 200, seed=0), samples=2)
    least_and_most = {"accuracy_greedy": (30, 60), "accuracy_forced_working": (85, 100)}
    least_and_most["accuracy_sampled"] = (10, 35)
    for name, (least, most) in least_and_most.items():
        assert least <= (shown[name].value or 0) <= most, name
