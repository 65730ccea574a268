"""Runs carried out together have the results of each alone, and their records are evidence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from repro.evidence.environment import capture_environment
from repro.evidence.procedure import Measured, Stopped
from repro.evidence.receipts import violations
from repro.evidence.record import Record, find_record, read_record
from repro.procedures import together as module
from repro.procedures.loaded_runs import ProblemSets
from repro.procedures.together import train_together
from repro.procedures.train import evaluate_untrained, train_and_evaluate
from repro.rl.runs import FailedRun
from repro.rl.stacked.stack import stack_policies
from repro.run import carry_out as recording
from repro.spec.arm import NoiseConfig, PlantedRounding
from repro.spec.config import (
    DataConfig,
    EvaluationConfig,
    LearningRates,
    OptimizerConfig,
    ProblemSet,
    RunConfig,
    SamplingConfig,
    TrainScale,
)
from tests.repro.small_runs import small_run

Alone = Callable[[RunConfig], Measured]
DATA = DataConfig(source="generated", train_problems=40, test_problems=8, development_problems=4)
SCALE = TrainScale(
    checkpoint="tiny",
    data=DATA,
    steps=3,
    prompts_per_rollout=4,
    group_size=4,
    max_prompt_tokens=1280,
    rollout=SamplingConfig(max_new_tokens=20),
    optimizer=OptimizerConfig(
        learning_rates=LearningRates(lora_16bit=1e-3, lora_4bit=1e-3, full=3e-4)
    ),
    evaluation=EvaluationConfig(
        every=2,
        samples=2,
        sampling=SamplingConfig(temperature=0.6, top_p=0.95, max_new_tokens=20),
        token_budget=600,
        # Every measurement that a scale may ask for beside.
        at=(1, 2),
        threshold=20.0,
    ),
    prompt_template="tiny",
    checkpoint_every=2,
    test_sets=(
        ProblemSet(name="small", data=dataclasses.replace(DATA, levels=(1,), test_problems=4)),
    ),
)
NOISE = NoiseConfig(sigma_start=0.1, sigma_end=0.05, num_stages=3)


def make_run(seed: int, procedure: str = "train", **arm: Any) -> RunConfig:
    return small_run(SCALE, seed=seed, procedure=procedure, **arm)


RUNS = [
    make_run(0),
    make_run(1, "evaluate", training="none", weight_format="nf4"),
    make_run(1, weight_format="nvfp4", noise=NOISE, reward="random"),
    make_run(0, training="full"),
    make_run(2, rounding=PlantedRounding(format="nvfp4")),
]
# For tests of which runs have results, whatever these are: one step, and one more run beside the
# first.
BRIEF = dataclasses.replace(
    SCALE,
    steps=1,
    evaluation=dataclasses.replace(SCALE.evaluation, every=1, samples=1, at=()),
    test_sets=(),
)
ANOTHER = make_run(2)


def silent(text: str, values: dict[str, float]) -> None:
    """Tell nobody."""


def carry_out(runs: list[RunConfig], folder: Path, **changes: Any) -> list[Measured | FailedRun]:
    settings: dict[str, Any] = {
        "device": "cpu", "folder": folder, "progress": silent, "should_stop": lambda: False,
        "threads": 1,
    }  # fmt: skip
    return train_together(runs, **(settings | changes))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunConfig], Measured]:
    """Return what carries out one run by its own procedure, each run once."""
    folder = tmp_path_factory.mktemp("alone")
    return functools.cache(lambda run: _alone(run, folder))


def _alone(run: RunConfig, folder: Path) -> Measured:
    procedures = {
        "train": train_and_evaluate,
        "evaluate": evaluate_untrained,
    }
    return procedures[run.procedure](
        run, folder=folder / run.digest(), progress=silent, should_stop=lambda: False, threads=1
    )


@pytest.fixture
def stop_after() -> Callable[[int], Callable[[], bool]]:
    """Return a maker of `should_stop` that says yes after so many questions."""

    def make(count: int) -> Callable[[], bool]:
        answers = iter([False] * count + [True] * 100)
        return lambda: next(answers)

    return make


def test_each_run_has_the_result_that_it_has_alone(tmp_path: Path, alone: Alone) -> None:
    order: list[str] = []
    together = carry_out(RUNS, tmp_path, done=lambda run, outcome: order.append(run.digest()))
    assert sorted(order) == sorted(run.digest() for run in RUNS)
    for run, many in zip(RUNS, together, strict=True):
        assert isinstance(many, Measured)
        require_same(alone(run), many)
        assert violations(recorded(run, many, tmp_path)) == []
    sizes = [many.facts["together"]["runs"] for many in together if isinstance(many, Measured)]
    assert sizes == [3, 1, 3, 1, 3]
    assert not list(tmp_path.glob("ensemble-*"))


def recorded(run: RunConfig, measured: Measured, folder: Path) -> Record:
    """Return the record that is written of a run's results."""
    now, environment = datetime.now(UTC), capture_environment()
    return read_record(recording.keep(run, measured, now, folder / run.digest(), environment))


def require_same(one: Measured, many: Measured) -> None:
    assert many.inputs == one.inputs
    assert list(many.series) == list(one.series)
    assert set(many.metrics) == set(one.metrics)
    for name, estimate in one.metrics.items():
        if name in ("peak_bytes", "train_seconds"):
            continue
        of_many = many.metrics[name]
        assert (of_many.unit, of_many.n) == (estimate.unit, estimate.n), name
        assert of_many.value == pytest.approx(estimate.value, abs=1e-4), name
    for name, values in one.series.items():
        assert many.series[name] == pytest.approx(values, abs=1e-3), name
    facts = set(one.facts) | {"together"}
    assert set(many.facts) == facts
    for name in ("linears", "noise", "rows", "grades", "adapter_modules", "rounding"):
        assert many.facts.get(name) == one.facts.get(name), name


def test_a_failed_run_leaves_the_others_their_results(
    tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(policies: Any, **how: Any) -> Any:
        stack = stack_policies(policies, **how)
        if stack.masters is not None and len(policies) > 1:
            next(iter(stack.masters.leaves.values())).data[1] = float("nan")
        return stack

    monkeypatch.setattr(module, "stack_policies", poisoned)
    first, second = carry_out([RUNS[0], RUNS[2]], tmp_path)
    assert isinstance(first, Measured)
    assert isinstance(second, FailedRun)
    assert "not finite" in second.reason
    require_same(alone(RUNS[0]), first)


def test_an_evaluation_tells_how_far_it_is_and_stops_between_its_parts(
    tmp_path: Path, stop_after: Callable[[int], Callable[[], bool]]
) -> None:
    told: list[float | None] = []

    def progress(text: str, values: dict[str, float]) -> None:
        told.append(values.get("percent"))

    with pytest.raises(Stopped):
        evaluate_untrained(
            RUNS[1], folder=tmp_path, progress=progress, should_stop=stop_after(2), threads=1
        )
    assert told == [None, 0.0, 100.0]


def test_a_stopped_ensemble_goes_on_to_the_same_numbers(
    tmp_path: Path, stop_after: Callable[[int], Callable[[], bool]]
) -> None:
    pair = [RUNS[0], RUNS[2]]
    with pytest.raises(Stopped):
        carry_out(pair, tmp_path, should_stop=stop_after(2))
    assert list(tmp_path.glob("ensemble-*/step-*"))
    rest = carry_out(pair, tmp_path)
    whole = carry_out(pair, tmp_path / "other")
    for one, many in zip(whole, rest, strict=True):
        assert isinstance(one, Measured)
        assert isinstance(many, Measured)
        assert many.series == one.series
        for facts in (one.facts, many.facts):
            for timed in ("together", "seconds"):
                facts.pop(timed)
        assert many.facts == one.facts


def test_runs_that_go_together_are_recorded_together_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = module.load_arm

    def refuse(run: RunConfig, device: str) -> Any:
        if run.seed == 2:
            raise ValueError("this run cannot be loaded")
        return load(run, device)

    monkeypatch.setattr(module, "load_arm", refuse)
    three = (RUNS[0], RUNS[1], ANOTHER)
    scale = dataclasses.replace(BRIEF, together=True)
    runs = [dataclasses.replace(run, scale=scale) for run in three]
    records, how = tmp_path / "runs", (silent, lambda: False, 1)
    recording.carry_out(runs, tmp_path / "work", records, *how)
    paths = [find_record(run, records) for run in runs]
    assert [path is None for path in paths] == [False, False, True]
    assert paths[0] is not None
    record = read_record(paths[0])
    assert record.ok
    assert record.facts["together"]["runs"] == 1
    assert len(list(records.rglob("*.failed-*.json"))) == 1
    monkeypatch.setattr(module, "load_arm", load)
    (path,) = recording.carry_out(runs, tmp_path / "work", records, *how)
    assert path == find_record(runs[2], records)


def test_only_what_is_trained_has_problems_to_train_on() -> None:
    trained, asked = (ProblemSets.of(SCALE, trains=trains) for trains in (True, False))
    assert (len(trained.train), len(trained.development)) == (40, 4)
    assert (asked.train, asked.development) == ([], [])
    assert asked.test == trained.test
    over_sets = ProblemSets.of(dataclasses.replace(SCALE, accuracy_over="sets"), trains=False)
    assert over_sets.test == over_sets.further["small"]
