"""The loop from a checkpoint to the last step: when to stop, evaluate and save.

The caller defines the iteration (`repro.rl.trainer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repro.rl.clock import WallClock
from repro.rl.collect import GrowingRollout, Rollout
from repro.rl.policies import Policies
from repro.rl.rollout_receipts import Tally, Values, note_accuracy, note_test
from repro.rl.runs import FailedRun, RunStates, TrainResult, fresh_states
from repro.spec.config import TrainScale

# Of one step: the values of each run, None for frozen ones.
StepValues = list[Values | None]
OnRollout = Callable[[int, Sequence[Rollout | None]], Mapping[int, Exception] | None]
# Makes some steps and advances the states in place; returns the values of each step.
Iterate = Callable[[RunStates], list[StepValues]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hooks:
    """Callbacks of the training loop.

    Attributes
    ----------
    evaluate
        Takes the number of steps done and which runs are alive; returns the held-out accuracy of
        each run, in percent. Called without added noise every `scale.evaluation.every` steps, and
        before the first step if the scale has a `token_budget`. None: no evaluation.
    test
        Takes the same; returns each run's metrics on the test split, in percent. Called without
        added noise after the steps that `scale.evaluation.test_at` names.
    on_step
        Takes the number of steps done and the values of each run, None for frozen ones: those of
        its series, and the wall seconds of the step's phases for all runs (`repro.rl.clock`).
    on_rollout
        Takes the number of steps done and the scored rollout of each run, before the updates on
        it; may return runs that have to fail, each with its error.
    on_fault
        Takes the number of steps done and each run's rollout, as far as it came, where no step can
        be made on it; returns what the error is to say of it.
    should_stop
        Called before each iteration; True writes a checkpoint and returns.
    tallies
        One per run, or none: counts of the process besides the steps, saved in each checkpoint and
        continued from there.
    """

    evaluate: Callable[[int, Sequence[bool]], Sequence[float | None]] | None = None
    test: Callable[[int, Sequence[bool]], Sequence[Mapping[str, float] | None]] | None = None
    on_step: Callable[[int, StepValues], None] | None = None
    on_rollout: OnRollout | None = None
    on_fault: Callable[[int, Sequence[GrowingRollout]], str] | None = None
    should_stop: Callable[[], bool] | None = None
    tallies: Sequence[Tally] = ()


def run_steps(
    policies: Policies, iterate: Iterate, hooks: Hooks, *, folder: Path, clock: WallClock
) -> list[TrainResult | FailedRun]:
    """Iterate from the last checkpoint in `folder` until the last step, or until asked to stop.

    Raises `ValueError` when a checkpoint belongs to other runs.

    Parameters
    ----------
    clock
        Marked by `iterate` at the end of each phase of its own.
    """
    scale: TrainScale = policies.runs[0].scale
    state = _load_or_begin(policies, hooks, folder)
    policies.refresh()
    if scale.evaluation.token_budget and not any(run.series for run in state.runs):
        _evaluate(policies, state, hooks)  # the area under the curve starts where training starts
    saved = state.step
    clock.leave_out()
    while state.step < scale.steps and any(state.alive):
        if hooks.should_stop is not None and hooks.should_stop():
            break
        began = state.step
        clock.mark("idle")
        steps = iterate(state)
        _tell(hooks, began, steps, clock.take(len(steps)))
        every = scale.evaluation.every
        if every >= 1 and state.step // every != began // every:
            clock.mark("idle")
            _evaluate(policies, state, hooks)
            clock.leave_out()
        if any(began < step <= state.step for step in scale.evaluation.test_at):
            clock.mark("idle")
            _test(policies, state, hooks)
            clock.leave_out()
        if state.step - saved >= scale.checkpoint_every:
            _save(policies, state, hooks, folder)
            saved = state.step
    if state.step != saved or state.step == 0:
        _save(policies, state, hooks, folder)
    return _results(state, finished=state.step >= scale.steps)


def _load_or_begin(policies: Policies, hooks: Hooks, folder: Path) -> RunStates:
    state = policies.load(folder)
    if state is None:
        return fresh_states(policies.runs, freeze=policies.freeze)
    for run, tally in zip(state.runs, hooks.tallies, strict=bool(hooks.tallies)):
        tally.go_on_from(run.counts)
    return state


def _save(policies: Policies, state: RunStates, hooks: Hooks, folder: Path) -> None:
    """Write a checkpoint, with what was counted for each run."""
    for run, tally in zip(state.runs, hooks.tallies, strict=bool(hooks.tallies)):
        run.counts = tally.counts()
    policies.save(folder, state)


def _tell(
    hooks: Hooks, began: int, steps: Sequence[StepValues], seconds: Mapping[str, float]
) -> None:
    for number, values in enumerate(steps, start=began + 1):
        if hooks.on_step is not None:
            hooks.on_step(number, [None if own is None else {**own, **seconds} for own in values])


def _evaluate(policies: Policies, state: RunStates, hooks: Hooks) -> None:
    """Evaluate every live run, without noise, and note the value."""
    if hooks.evaluate is None:
        return
    started = time.perf_counter()
    policies.refresh()
    accuracies = hooks.evaluate(state.step, state.alive)
    for run, accuracy in zip(state.runs, accuracies, strict=True):
        if accuracy is not None:
            note_accuracy(run, state.step, accuracy)
    state.count_seconds("evaluation_seconds", started)


def _test(policies: Policies, state: RunStates, hooks: Hooks) -> None:
    """Answer the test split with every live run, without noise, and note what it gave."""
    if hooks.test is None:
        return
    started = time.perf_counter()
    policies.refresh()
    for run, values in zip(state.runs, hooks.test(state.step, state.alive), strict=True):
        if values is not None:
            note_test(run, state.step, values)
    state.count_seconds("evaluation_seconds", started)


def _results(state: RunStates, *, finished: bool) -> list[TrainResult | FailedRun]:
    results: list[TrainResult | FailedRun] = []
    for own, failure in zip(state.runs, state.failures, strict=True):
        if failure is not None:
            results.append(FailedRun(step=own.step, reason=failure))
        else:
            results.append(
                TrainResult(finished=finished, step=own.step, series=own.series, facts=own.facts)
            )
    return results
