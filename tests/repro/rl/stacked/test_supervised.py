"""Fine-tuning side by side trains what each run would have trained alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.data.problem import Problem
from repro.rl.lessons import lessons_of, mean_loss
from repro.rl.loop import Hooks
from repro.rl.runs import FailedRun, TrainResult
from repro.rl.stacked import policies as stacked_policies
from repro.rl.stacked.policies import StackedPolicies
from repro.rl.stacked.sampler import StackSampler
from repro.rl.stacked.stack import Stack
from repro.rl.supervised import fine_tune
from repro.spec.arm import NoiseConfig
from repro.spec.config import EvaluationConfig, RunConfig, SamplingConfig
from tests.repro.rl.stacked import conftest as small
from tests.repro.rl.stacked.test_against_single_runs import (
    in_float64,  # noqa: F401 (a fixture)
    largest_difference,
    require_same_series,
)
from tests.repro.small_runs import tune_alone

NOISE = NoiseConfig(sigma_start=0.1, sigma_end=0.05, num_stages=3, reach="shared")
SCALE = small.with_steps(
    small.SCALE,
    rollout=SamplingConfig(max_new_tokens=48),
    evaluation=EvaluationConfig(every=2, token_budget=600),
)
# Padded tokens of a pass: four lessons or so.
TOKENS = 320


def make_runs() -> list[RunConfig]:
    arms: list[dict[str, Any]] = [
        {"seed": 0},
        {"seed": 1, "weight_format": "nvfp4", "noise": NOISE, "learning_rate_factor": 2.0},
        {"seed": 2, "weight_format": "nf4", "lora_rank": 2},
    ]
    runs = [small.make_run(scale=SCALE, **arm) for arm in arms]
    return [dataclasses.replace(run, procedure="finetune") for run in runs]


def tune(
    runs: Sequence[RunConfig], problems: list[Problem], folder: Path, **hooks: Any
) -> tuple[Stack, list[TrainResult | FailedRun], list[float]]:
    """Return the stack, the result of each run, and the loss of each on the lessons."""
    stack = small.stack_of(runs)
    sampler = StackSampler(stack, small.positions(runs[0]))
    lessons = lessons_of(problems, stack, runs[0])
    called = {"evaluate": lambda step, alive: [float(step) if a else None for a in alive]}
    policies = StackedPolicies(runs, stack, sampler, TOKENS)
    results = fine_tune(policies, lessons, Hooks(**(called | hooks)), folder=folder)
    policies.tokens_at_once = 10**6
    return stack, results, policies.mean_losses(lessons)


@pytest.mark.usefixtures("in_float64")
def test_runs_side_by_side_are_the_runs_alone(problems: list[Problem], tmp_path: Path) -> None:
    runs = make_runs()
    stack, results, losses = tune(runs, problems, tmp_path / "all")
    assert stack.masters is not None
    for number, (run, many) in enumerate(zip(runs, results, strict=True)):
        policy = small.load(run)
        lessons = lessons_of(problems, policy, run)
        one = tune_alone(
            run, policy, lessons, folder=tmp_path / run.digest(), evaluate=lambda step: float(step)
        )
        assert isinstance(many, TrainResult)
        assert (one.finished, many.finished, many.step) == (True, True, one.step)
        parameters = small.trainable_parameters(policy)
        alone = {small.plain_name(n): p.detach() for n, p in parameters.items()}
        trained = small.Trained(one, alone)
        stacked = small.Trained(many, small.parameters_of_run(stack.masters, number))
        assert largest_difference(trained, stacked) < 1e-10
        require_same_series(one.series, many.series)
        assert many.effects["noise"] == one.effects["noise"]
        assert many.effects["rows"] == one.effects["rows"]
        assert many.effects["seconds"].keys() == one.effects["seconds"].keys()
        assert losses[number] == pytest.approx(mean_loss(policy, lessons, 7), abs=1e-6)


def test_a_stopped_ensemble_goes_on_to_the_same_numbers(
    problems: list[Problem], tmp_path: Path
) -> None:
    runs = make_runs()
    whole, expected, _ = tune(runs, problems, tmp_path / "whole")
    answers = iter([False, True])
    _, half, _ = tune(runs, problems, tmp_path / "cut", should_stop=lambda: next(answers))
    assert [outcomes.step for outcomes in half] == [1, 1, 1]
    rest, outcomes, _ = tune(runs, problems, tmp_path / "cut")
    assert rest.masters is not None
    assert whole.masters is not None
    assert torch.equal(rest.masters.values, whole.masters.values)
    for one, many in zip(expected, outcomes, strict=True):
        assert isinstance(one, TrainResult)
        assert isinstance(many, TrainResult)
        assert many.series == one.series


def test_a_run_whose_gradient_is_not_finite_is_frozen_alone(
    problems: list[Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack_of = small.stack_of

    def poisoned(runs: Sequence[RunConfig]) -> Stack:
        stack = stack_of(runs)
        assert stack.masters is not None
        next(iter(stack.masters.leaves.values())).data[1] = float("nan")
        return stack

    monkeypatch.setattr(small, "stack_of", poisoned)
    _, results, losses = tune(make_runs(), problems, tmp_path)
    assert isinstance(results[1], FailedRun)
    assert "gradient norm is nan" in results[1].reason
    assert [isinstance(outcome, TrainResult) for outcome in results] == [True, False, True]
    assert losses[0] > 0


def test_when_memory_runs_out_the_step_is_made_again_on_fewer_lessons(
    problems: list[Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulate = stacked_policies.accumulate_losses
    sizes: list[int] = []

    def short(passes: Any, taken: Any) -> Any:
        imitations = accumulate(passes, taken)
        sizes.append(passes.tokens_at_once)
        if passes.tokens_at_once > TOKENS // 2:
            raise torch.OutOfMemoryError("no memory is left after the gradients were added up")
        return imitations

    _, whole, _ = tune(make_runs(), problems, tmp_path / "whole")
    monkeypatch.setattr(stacked_policies, "accumulate_losses", short)
    _, fewer, _ = tune(make_runs(), problems, tmp_path / "fewer")
    assert sizes == [TOKENS, TOKENS // 2, TOKENS // 2, TOKENS // 2]
    for one, many in zip(whole, fewer, strict=True):
        assert isinstance(one, TrainResult)
        assert isinstance(many, TrainResult)
        assert many.effects["tokens_at_once_fallbacks"] == [[0, TOKENS, TOKENS // 2]]
        assert many.series["grad_norm"] == pytest.approx(one.series["grad_norm"], rel=1e-3)
