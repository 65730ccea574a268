"""One run: how its policy is made ready to train, what it reads, and what its record shows."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro.evidence.environment import capture_environment
from repro.evidence.procedure import Stopped
from repro.evidence.receipts import violations
from repro.evidence.record import read_record
from repro.models.memory_plan import training_memory
from repro.procedures.loaded_run import ProblemSets
from repro.procedures.train import evaluate_untrained, fitting_update, train_and_evaluate
from repro.run.carry_out import keep
from repro.spec.arm import NoiseConfig, PlantedRounding
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.procedures.conftest import SCALE, make_run, silent

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


@pytest.mark.parametrize(
    "arm",
    [
        {"training": "none", "weight_format": "nf4"},
        {
            "weight_format": "nvfp4",
            "noise": NoiseConfig(sigma_start=0.1, sigma_end=0.05, num_stages=3),
            "reward": "random",
        },
        {"training": "full"},
        {"rounding": PlantedRounding(format="nvfp4")},
    ],
    ids=["untrained", "noise", "full", "planted"],
)
def test_the_record_of_a_run_shows_that_nothing_was_skipped(
    tmp_path: Path, arm: dict[str, Any]
) -> None:
    trains = arm.get("training") != "none"
    run = make_run(1, "train" if trains else "evaluate", **arm)
    procedure = train_and_evaluate if trains else evaluate_untrained
    measured = procedure(
        run, folder=tmp_path / "work", progress=silent, should_stop=lambda: False, threads=1
    )
    path = keep(run, measured, datetime.now(UTC), tmp_path, capture_environment())
    record = read_record(path)
    assert violations(record) == []
    assert len(record.series.get("reward", [])) == (3 if trains else 0)
    assert record.value("accuracy_small") is not None


def test_an_evaluation_tells_how_far_it_is_and_stops_between_its_parts(tmp_path: Path) -> None:
    told: list[float | None] = []
    answers = iter([False, False, True])

    def progress(text: str, values: dict[str, float]) -> None:
        told.append(values.get("percent"))

    run = make_run(1, "evaluate", training="none", weight_format="nf4")
    with pytest.raises(Stopped):
        evaluate_untrained(
            run, folder=tmp_path, progress=progress, should_stop=lambda: next(answers), threads=1
        )
    assert told == [None, 0.0, 100.0]


def test_only_what_is_trained_has_problems_to_train_on() -> None:
    trained, asked = (ProblemSets.of(SCALE, trains=trains) for trains in (True, False))
    assert (len(trained.train), len(trained.development)) == (40, 4)
    assert (asked.train, asked.development) == ([], [])
    assert asked.test == trained.test
    over_sets = ProblemSets.of(dataclasses.replace(SCALE, accuracy_over="sets"), trains=False)
    assert over_sets.test == over_sets.further["small"]
