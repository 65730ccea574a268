"""What one run and many have in common: the problems of a scale, and what progress shows."""

from __future__ import annotations

import dataclasses

from repro.procedures.loaded_runs import ProblemSets
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
