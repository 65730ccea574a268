"""Runs side by side: a failure freezes its run, or ends the training of a run by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from repro.rl.runs import RunStates, fresh_states


@pytest.fixture
def states(make_run: Callable[..., Any]) -> Callable[..., RunStates]:
    """Return a function that makes the states of three runs."""

    def make(*, freeze: bool) -> RunStates:
        return fresh_states([make_run(seed=seed) for seed in range(3)], freeze=freeze)

    return make


def fails_in_run_1(s: int) -> int:
    if s == 1:
        raise ValueError("its rollout cannot be scored")
    return 10 * s


def test_a_run_that_fails_is_frozen_with_its_reason_and_left_out_afterwards(
    states: Callable[..., RunStates],
) -> None:
    state = states(freeze=True)
    assert state.each(fails_in_run_1) == [0, None, 20]
    assert state.failures == [None, "ValueError: its rollout cannot be scored", None]
    assert state.alive == [True, False, True]
    assert state.each(lambda s: s) == [0, None, 2]


def test_a_run_that_is_not_frozen_raises(states: Callable[..., RunStates]) -> None:
    state = states(freeze=False)
    with pytest.raises(ValueError, match="cannot be scored"):
        state.each(fails_in_run_1)
    assert state.alive == [True, True, True]
