"""The loop of many runs: failures stay their own, a resumed ensemble equals a whole one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from repro.reward.score import Rewards
from repro.rl.runs import FailedRun
from repro.rl.stacked import stacked_policies
from repro.rl.stacked.stack import Stack
from repro.spec.arm import LossConfig, NoiseConfig
from tests.repro.rl.stacked import conftest as small
from tests.repro.small_runs import equal

NOISE = NoiseConfig(sigma_start=0.1, sigma_end=0.05, num_stages=3)
make_run = small.make_run
RUNS = [
    make_run(seed=0),
    make_run(seed=1, weight_format="nvfp4", noise=NOISE),
    make_run(seed=2, weight_format="nf4", loss=LossConfig(beta=0.01)),
]


def poison(stack: Stack) -> None:
    """Make run 1's first trained tensor not a number."""
    assert stack.masters is not None
    next(iter(stack.masters.leaves.values())).data[1] = torch.nan


def test_a_run_whose_weights_are_not_finite_is_frozen_and_the_others_go_on(
    together: Callable[..., Any],
) -> None:
    whole = together(RUNS)
    broken = together(RUNS, folder="broken", prepare=poison)
    failure = broken[1].result
    assert isinstance(failure, FailedRun)
    assert failure.step == 0
    assert "not finite" in failure.reason
    for number in (0, 2):
        assert broken[number].result.finished
        assert broken[number].result.series == whole[number].result.series
        assert equal(broken[number].parameters, whole[number].parameters)


def test_a_gradient_that_is_not_finite_freezes_its_run_at_its_step(
    together: Callable[..., Any],
) -> None:
    calls = 0

    def score(asked: Sequence[Any]) -> list[Rewards | None]:
        nonlocal calls
        calls += 1
        scored = small.score_together(asked)
        rewards = scored[1]
        if calls == 2 and rewards is not None:
            # Their sum is infinite, so the advantages are not numbers.
            total: list[float | None] = [1.7e308, 1.7e308, 1.7e308, 0.0] * 3
            scored[1] = dataclasses.replace(rewards, total=total)
        return scored

    ended = together(RUNS, score=score)
    failure = ended[1].result
    assert isinstance(failure, FailedRun)
    assert failure.step == 1
    assert "finite" in failure.reason
    outcomes = together(RUNS, folder="whole")
    assert ended[0].result.series == outcomes[0].result.series
    assert equal(ended[2].parameters, outcomes[2].parameters)
    # Frozen where it was: after its first step.
    single = together([dataclasses.replace(RUNS[1])], folder="single", should_stop=_after(1))
    for name, value in ended[1].parameters.items():
        assert torch.allclose(value, single[0].parameters[name], atol=1e-5)


def _after(steps: int) -> Callable[[], bool]:
    """Return a `should_stop` that says yes after so many rollouts."""
    answers = iter([False] * steps + [True])
    return lambda: next(answers)


def test_a_failure_survives_a_stop(together: Callable[..., Any]) -> None:
    together(RUNS, prepare=poison, should_stop=_after(1))
    rest = together(RUNS)
    assert isinstance(rest[1].result, FailedRun)
    assert rest[0].result.finished


def test_the_size_of_a_micro_batch_changes_nothing_but_rounding(
    together: Callable[..., Any],
) -> None:
    one, all_ = (
        together(RUNS, tokens_at_once=small.ONE_GROUP),
        together(RUNS, folder="b", tokens_at_once=10**6),
    )
    for a, b in zip(one, all_, strict=True):
        assert a.result.series["grad_norm"] == pytest.approx(b.result.series["grad_norm"], rel=1e-4)
        assert a.result.series["entropy"] == pytest.approx(b.result.series["entropy"], rel=1e-4)


def test_when_memory_runs_out_the_step_is_made_again_with_fewer_tokens(
    together: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a reference policy, whose pass would still be rounded as larger batches round it.
    runs = RUNS[:2]
    whole = together(runs, tokens_at_once=small.ONE_GROUP)
    accumulate = stacked_policies.accumulate_gradients
    sizes: list[int] = []

    def short(passes: Any, steps: Any) -> None:
        accumulate(passes, steps)
        sizes.append(passes.tokens_at_once)
        if passes.tokens_at_once > small.ONE_GROUP:
            raise torch.OutOfMemoryError("no memory is left after the gradients were added up")

    monkeypatch.setattr(stacked_policies, "accumulate_gradients", short)
    fewer = together(runs, folder="fewer", tokens_at_once=10**6)
    # From what all groups of the first step take, halved until it is what one takes.
    first, last = sizes[0], sizes[-1]
    tries = sizes.index(last)
    assert tries > 0
    assert sizes == [first >> half for half in range(tries)] + [last] * small.SCALE.steps
    assert last == first >> tries
    for one, many in zip(whole, fewer, strict=True):
        assert many.result.facts["micro_batch_fallbacks"] == [[0, first, last]]
        assert many.result.series == one.result.series
        assert equal(one.parameters, many.parameters)
    together(runs, folder="parts", tokens_at_once=10**6, should_stop=_after(1))
    sizes.clear()
    resumed = together(runs, folder="parts", tokens_at_once=10**6)
    assert sizes == [last] * (small.SCALE.steps - 1)
    for one, many in zip(fewer, resumed, strict=True):
        assert many.result.facts["micro_batch_fallbacks"] == [[0, first, last]]
        assert equal(one.parameters, many.parameters)

    def never(passes: Any, steps: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(stacked_policies, "accumulate_gradients", never)
    with pytest.raises(torch.OutOfMemoryError):
        together(RUNS, folder="none")


def test_configurations_that_cannot_be_trained_raise(together: Callable[..., Any]) -> None:
    eight = dataclasses.replace(small.SCALE.optimizer, name="adamw_8bit")
    with pytest.raises(ValueError, match="an ensemble has adamw"):
        together([make_run(scale=small.with_steps(small.SCALE, optimizer=eight))])
    with pytest.raises(ValueError, match="trains full"):
        together([make_run(), make_run(training="full")])
    with pytest.raises(ValueError, match="train different tensors"):
        together([make_run(), make_run(norms_trained=True)])
