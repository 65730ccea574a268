"""What one run and many have in common: the problems of a scale, and what progress shows."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from repro.procedures.loaded_runs import LoadedRuns, ProblemSets
from repro.spec.config import (
    DataConfig,
    EvaluationConfig,
    LearningRates,
    OptimizerConfig,
    ProblemSet,
    TrainScale,
)

DATA = DataConfig(source="generated", train_problems=8, test_problems=4, development_problems=3)
SCALE = TrainScale(
    checkpoint="tiny",
    data=DATA,
    steps=2,
    prompts_per_rollout=4,
    group_size=4,
    optimizer=OptimizerConfig(
        learning_rates=LearningRates(lora_16bit=1e-3, lora_4bit=1e-3, full=3e-4)
    ),
    evaluation=EvaluationConfig(every=1),
    prompt_template="tiny",
    test_sets=(
        ProblemSet(name="small", data=dataclasses.replace(DATA, levels=(1,), test_problems=2)),
    ),
)


def test_only_what_is_trained_has_problems_to_train_on() -> None:
    trained, asked = (ProblemSets.of(SCALE, trains=trains) for trains in (True, False))
    assert (len(trained.train), len(trained.development)) == (8, 3)
    assert (asked.train, asked.development) == ([], [])
    assert asked.test == trained.test
    never = dataclasses.replace(SCALE, evaluation=EvaluationConfig(every=0))
    assert ProblemSets.of(never, trains=True).development == []


def test_accuracy_over_sets_asks_the_problems_of_them_all() -> None:
    over_sets = dataclasses.replace(SCALE, accuracy_over="sets")
    problems = ProblemSets.of(over_sets, trains=False)
    assert problems.test == problems.further["small"]


def test_progress_shows_the_mean_over_the_runs_that_have_a_value() -> None:
    evaluation: Any = SimpleNamespace(scale=SCALE)
    problems = ProblemSets(train=[], development=[], test=[], further={})
    unused: Any = None
    loaded_runs = LoadedRuns(
        runs=[], loaded=unused, sampler=unused, problems=problems, evaluation=evaluation,
        tallies=[], effects=[],
    )  # fmt: skip
    told: list[dict[str, float]] = []
    hooks = loaded_runs.hooks(lambda text, values: told.append(values), None)
    assert hooks.evaluate is None
    assert hooks.on_step is not None
    hooks.on_step(1, [{"reward": 0.0, "entropy": None}, None, {"reward": 1.0, "entropy": None}])
    assert told == [{"step": 1.0, "steps": 2.0, "reward": 0.5}]
