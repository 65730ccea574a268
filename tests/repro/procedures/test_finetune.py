"""Fine-tuning as a procedure: its record is evidence, and `check` refuses one where nothing was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from repro.evidence.environment import capture_environment
from repro.evidence.procedure import Stopped
from repro.evidence.receipts import violations
from repro.evidence.record import Record, read_record
from repro.run.carry_out import keep, procedure_named
from repro.spec.arm import NoiseConfig, PlantedRounding
from repro.spec.config import (
    DataConfig,
    EvaluationConfig,
    LearningRates,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TrainScale,
)
from tests.repro.small_runs import small_run

SCALE = TrainScale(
    checkpoint="tiny",
    data=DataConfig(source="generated", train_problems=40, test_problems=8, development_problems=4),
    steps=4,
    prompts_per_rollout=2,
    group_size=2,
    max_prompt_tokens=1280,
    rollout=SamplingConfig(max_new_tokens=64),
    optimizer=OptimizerConfig(
        learning_rates=LearningRates(lora_16bit=1e-3, lora_4bit=1e-3, full=3e-4)
    ),
    evaluation=EvaluationConfig(
        every=2, sampling=SamplingConfig(temperature=0.6, max_new_tokens=64), token_budget=600
    ),
    prompt_template="tiny",
    checkpoint_every=2,
)
NOISE = NoiseConfig(sigma_start=0.2, sigma_end=0.1, num_stages=3, reach="shared")


def make_run(**arm: Any) -> RunConfig:
    return small_run(SCALE, procedure="finetune", **arm)


def carry_out(run: RunConfig, folder: Path, stop: Callable[[], bool] = lambda: False) -> Record:
    started = datetime.now(UTC)
    measured = procedure_named("finetune")(
        run, folder=folder, progress=lambda text, values: None, should_stop=stop, threads=1
    )
    return read_record(keep(run, measured, started, folder / "records", capture_environment()))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    run = make_run(weight_format="nvfp4", noise=NOISE)
    return carry_out(run, tmp_path_factory.mktemp("finetune"))


def test_a_record_is_evidence_and_has_the_metrics_of_its_target(record: Record) -> None:
    assert violations(record) == []
    assert set(record.metrics) >= {
        "accuracy", "accuracy_greedy", "accuracy_greedy_start", "gain_greedy", "heldout_area",
        "heldout_last", "solution_loss_start", "solution_loss", "train_loss_first",
        "train_loss_last", "train_seconds", "peak_bytes",
    }  # fmt: skip
    assert record.value("solution_loss") != record.value("solution_loss_start")
    assert record.series["evaluation_step"] == [0, 2, 4]
    assert set(record.effects["linears"]) == {"nvfp4"}
    assert len(record.inputs) == 5


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        ({"noise": {"modules": 0, "channels_changed": 0}}, "noise touched nothing"),
        ({"rows": {"trained_on": 3, "tokens_trained": 90}}, "90 tokens of worked solutions"),
        ({"trained_change_l2": 0.0}, "training changed no parameter"),
        ({"optimizer_steps": 3}, "3 optimiser steps were made"),
        ({"linears": {"bf16": 21}}, "no projection was nvfp4"),
        ({"adapter_modules": 0}, "no adapter was attached"),
    ],
)
def test_a_record_of_nothing_is_refused(
    record: Record, spoiled: dict[str, Any], words: str
) -> None:
    reasons = violations(dataclasses.replace(record, effects=record.effects | spoiled))
    assert any(words in reason for reason in reasons), reasons


def test_a_record_without_losses_is_refused(record: Record) -> None:
    series = {name: values for name, values in record.series.items() if name != "loss"}
    reasons = violations(dataclasses.replace(record, series=series))
    assert "series loss does not show a loss at every step" in reasons


def test_a_stopped_run_goes_on_to_the_same_numbers(record: Record, tmp_path: Path) -> None:
    run = make_run(weight_format="nvfp4", noise=NOISE)
    answers = iter([False, True])
    with pytest.raises(Stopped):
        carry_out(run, tmp_path, lambda: next(answers))
    again = carry_out(run, tmp_path)
    assert again.series == record.series
    for name in ("solution_loss", "accuracy_greedy", "accuracy"):
        assert again.value(name) == record.value(name)
    assert again.effects["grades"] == record.effects["grades"]


def test_a_seed_is_a_rounding_draw_of_one_function(tmp_path: Path) -> None:
    once = dataclasses.replace(SCALE, steps=1, permuted=True)
    permuted = dataclasses.replace(make_run(), scale=once)
    coarse = dataclasses.replace(
        permuted, arm=dataclasses.replace(permuted.arm, rounding=PlantedRounding(format="int2"))
    )
    starts: dict[tuple[str, int], float] = {}
    for name, run in (("bf16", permuted), ("int2", coarse)):
        for seed in (0, 1):
            record = carry_out(dataclasses.replace(run, seed=seed), tmp_path / f"{name}-{seed}")
            assert violations(record) == []
            starts[name, seed] = record.value("solution_loss_start")
    # The order of channels is no change of the function, and another rounding in each order.
    assert starts["bf16", 1] == pytest.approx(starts["bf16", 0], abs=1e-4)
    assert starts["int2", 0] > starts["bf16", 0] + 0.1
    assert abs(starts["int2", 1] - starts["int2", 0]) > 1e-3
