"""Quality: what a policy does, what it can do when forced, and how the packaged one fares."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from repro.data.generator import generate_problems
from repro.evaluate.asking import Alone, Evaluator
from repro.evaluate.quality import Manner, measure_habits, measure_quality
from repro.models.checkpoint import TINY_FOLDER
from repro.models.policy import load_policy
from repro.reward.grader import GraderPool
from repro.rl.single_run.torch_sampler import TorchSampler
from tests.repro.evaluate.small import Writer, problem

MANNER = Manner(template="tiny", max_prompt_tokens=99, max_new_tokens=48, samples=2)
WORKED = "<think>\n2 + 2 = 4.\n</think>\n<answer>4</answer>"
CARELESS = "<think></think>\n<answer>7</answer>"
PROBLEMS = [problem("2+2?", "4", level=1), problem("3+3?", "6", level=2)]
TEXTS = {"2+2?": WORKED, "3+3?": CARELESS}


def test_quality_tells_working_from_carelessness_and_level_from_level(
    tokenizer: Any, pool: GraderPool
) -> None:
    evaluator = Evaluator(Writer(tokenizer, TEXTS), tokenizer, pool, [0])
    quality = measure_quality(evaluator, MANNER, PROBLEMS)
    assert (quality.problems, quality.samples) == (2, 2)
    assert quality.greedy == quality.sampled_mean == quality.sampled_pass == 50.0
    assert quality.greedy_by_level == {"1": 100.0, "2": 0.0}
    assert quality.working_greedy_by_level == {"1": 100.0, "2": 0.0}
    assert (quality.given_working, quality.given_careless) == (100.0, 0.0)


def test_habits_are_the_greedy_part_of_quality(tokenizer: Any, pool: GraderPool) -> None:
    evaluator = Evaluator(Writer(tokenizer, TEXTS), tokenizer, pool, [0])
    habits = measure_habits(evaluator, MANNER, PROBLEMS)
    quality = dataclasses.asdict(measure_quality(evaluator, MANNER, PROBLEMS))
    shared = ("greedy", "greedy_by_level", "forced_working", "forced_working_by_level")
    assert {name: habits[name] for name in shared} == {name: quality[name] for name in shared}
    assert habits["working"] == 50.0


def test_a_template_without_a_way_of_working_cannot_be_forced(
    tokenizer: Any, pool: GraderPool
) -> None:
    evaluator = Evaluator(Writer(tokenizer, TEXTS), tokenizer, pool, [0])
    with pytest.raises(ValueError, match="'paper' names no working that could be forced"):
        measure_habits(evaluator, dataclasses.replace(MANNER, template="paper"), PROBLEMS)


@pytest.mark.nightly
def test_the_packaged_policy_shows_half_of_what_it_knows(pool: GraderPool) -> None:
    assert sum(path.stat().st_size for path in TINY_FOLDER.iterdir()) < 3_000_000
    policy = load_policy("tiny", weight_format="bf16")
    manner = Manner(template="tiny", max_prompt_tokens=1280, max_new_tokens=64, samples=2)
    asker = Alone(TorchSampler(policy))
    evaluator = Evaluator(asker, policy.tokenizer, pool, [0], "quality")  # type: ignore[arg-type]
    quality = measure_quality(evaluator, manner, generate_problems("test", 200, seed=0))
    assert 30 <= quality.greedy <= 60
    assert quality.forced_working >= 85
    assert quality.given_working is not None
    assert quality.given_careless is not None
    assert quality.given_working >= 4 * quality.given_careless
    assert 10 <= quality.sampled_mean <= 35
