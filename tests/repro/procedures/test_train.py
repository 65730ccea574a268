"""How a run's policy is made ready to train: its micro-batches by the device's memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from repro.models.memory_plan import training_memory
from repro.procedures.train import fitting_update, train_and_evaluate
from repro.runlog.stream import read_lines
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find

H100_BYTES = 85_000_000_000


@pytest.mark.parametrize(
    ("tier", "device"), [(Tier.PAPER, "cuda"), (Tier.PAPER, "cpu"), (Tier.SMOKE, "cuda")]
)
def test_a_published_model_trains_on_a_device_in_the_micro_batches_that_its_plan_chose(
    tier: Tier, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=H100_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    (run,) = plan(find("table1"), tier, 1, ["nvfp4_lora"])
    fitting = fitting_update(run, torch.device(device))
    if (tier, device) != (Tier.PAPER, "cuda"):
        assert fitting is None
        return
    memory = training_memory(run.arm, run.scale)
    assert memory is not None
    step = memory.fitting(H100_BYTES)
    assert fitting == (step.micro_tokens, step.kept_blocks)
    assert step.micro_tokens > run.scale.micro_batch_rows


def test_the_test_split_is_answered_along_a_run_as_at_its_end(tmp_path: Path) -> None:
    (run,) = plan(find("table1"), Tier.SMOKE, 1, ["nvfp4_lora_aqn"])
    scale = run.scale
    small = dataclasses.replace(
        scale,
        steps=3,
        data=dataclasses.replace(scale.data, train_problems=64, test_problems=12),
        prompts_per_rollout=4,
        updates_per_rollout=1,
        optimizer=dataclasses.replace(scale.optimizer, warmup_steps=2),
        evaluation=dataclasses.replace(scale.evaluation, test_at=(1, 2), every=0, token_budget=0),
    )
    untested = dataclasses.replace(small.evaluation, test_at=())
    last = dataclasses.replace(small, steps=2, evaluation=untested)
    measured = {
        steps: train_and_evaluate(
            dataclasses.replace(run, scale=one),
            folder=tmp_path / str(steps),
            progress=lambda *_: None,
            should_stop=lambda: False,
            threads=1,
        )
        for steps, one in ((3, small), (2, last))
    }
    series = measured[3].series
    assert series["test_steps"] == [1, 2]
    assert len(series["reward"]) == 3
    # What is tested after two steps is what a run that ends there is tested by.
    end = measured[2].facts["answers"]
    for name in ("accuracy", "accuracy_greedy"):
        right = end[name]["right"]
        samples = len(right) - 1
        percent = 100 * sum(hits * count for hits, count in enumerate(right)) / samples / sum(right)
        assert series[f"test_{name}"][1] == pytest.approx(percent)
    lines = read_lines(tmp_path / "3" / "evaluations.jsonl")
    assert [line["test_accuracy"] for line in lines] == series["test_accuracy"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [((2, 2), "must rise"), ((0,), "must be 1 or more"), ((3,), "the run has 3")],
)
def test_tests_along_a_run_lie_within_it_and_rise(steps: tuple[int, ...], message: str) -> None:
    scale = plan(find("table1"), Tier.SMOKE, 1, ["nvfp4_lora_aqn"])[0].scale
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(
            scale, steps=3, evaluation=dataclasses.replace(scale.evaluation, test_at=steps)
        )
