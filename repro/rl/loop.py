"""The loop from a checkpoint to the last step: when to stop, evaluate and save.

The caller defines the iteration (`repro.rl.trainer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from repro.evidence.procedure import Stopped
from repro.rl.clock import WallClock
from repro.rl.collect import GrowingRollout, Rollout
from repro.rl.learner import Learner
from repro.rl.rollout_receipts import Tally, Values, note_accuracy, note_test
from repro.rl.training_state import TrainState, fresh_state
from repro.spec.config import TrainScale

# Makes some steps and advances the state in place; returns the values of each step.
Iterate = Callable[[TrainState], list[Values]]
Answered = TypeVar("Answered")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hooks:
    """Callbacks of the training loop.

    Attributes
    ----------
    evaluate
        Takes the number of steps done; returns the held-out accuracy in percent. Called without
        added noise every `scale.evaluation.every` steps, and before the first step if the scale has
        a `token_budget`. None: no evaluation.
    test
        Takes the same; returns metrics on the test split, in percent. Called without added noise
        after the steps that `scale.evaluation.test_at` names.
    on_step
        Takes the number of steps done and the step's values: those of its series, and the wall
        seconds of its phases (`repro.rl.clock`).
    on_rollout
        Takes the number of steps done and the scored rollout, before the updates on it; may raise
        to end the run.
    on_fault
        Takes the number of steps done and the rollout, as far as it came, where no step can be made
        on it; returns what the error is to say of it.
    should_stop
        Called before each iteration; True writes a checkpoint and raises `Stopped`.
    tally
        Counts of the process besides the steps, saved in each checkpoint and continued from there.
    """

    evaluate: Callable[[int], float] | None = None
    test: Callable[[int], Mapping[str, float]] | None = None
    on_step: Callable[[int, Values], None] | None = None
    on_rollout: Callable[[int, Rollout], None] | None = None
    on_fault: Callable[[int, GrowingRollout], str] | None = None
    should_stop: Callable[[], bool] | None = None
    tally: Tally | None = None


def run_steps(
    learner: Learner, iterate: Iterate, hooks: Hooks, *, folder: Path, clock: WallClock
) -> TrainState:
    """Iterate from the last checkpoint in `folder` until the last step, or until asked to stop.

    Raises `ValueError` when a checkpoint belongs to another run; `Stopped` when it was asked to
    stop: the same call goes on from its checkpoint.

    Parameters
    ----------
    clock
        Marked by `iterate` at the end of each phase of its own.
    """
    scale: TrainScale = learner.run.scale
    state = _load_or_begin(learner, hooks, folder)
    learner.sampler.refresh()
    clock.leave_out()
    if scale.evaluation.token_budget and not state.series:
        # The area under the curve starts where training starts.
        _ask(learner, state, clock, hooks.evaluate, note_accuracy)
    saved = state.step
    clock.leave_out()
    while not _ended(state, scale):
        if hooks.should_stop is not None and hooks.should_stop():
            break
        began = state.step
        clock.mark("idle")
        steps = iterate(state)
        seconds = clock.take(len(steps))
        for number, values in enumerate(steps, start=began + 1):
            if hooks.on_step is not None:
                hooks.on_step(number, {**values, **seconds})
        every = scale.evaluation.every
        if every >= 1 and state.step // every != began // every:
            _ask(learner, state, clock, hooks.evaluate, note_accuracy)
        if any(began < step <= state.step for step in scale.evaluation.test_at):
            _ask(learner, state, clock, hooks.test, note_test)
        if state.step - saved >= scale.checkpoint_every:
            _save(learner, state, hooks, folder)
            saved = state.step
    if state.step != saved or state.step == 0:
        _save(learner, state, hooks, folder)
    if not _ended(state, scale):
        raise Stopped
    return state


def _ended(state: TrainState, scale: TrainScale) -> bool:
    """Return whether all steps are done, or the last test has the accuracy that ends training."""
    until = scale.evaluation.until
    last = state.series.get("test_accuracy_greedy", [])[-1:]
    reached = until > 0 and any((accuracy or 0.0) >= until for accuracy in last)
    return reached or state.step >= scale.steps


def _load_or_begin(learner: Learner, hooks: Hooks, folder: Path) -> TrainState:
    state = learner.load(folder)
    if state is None:
        return fresh_state(learner.run)
    if hooks.tally is not None:
        hooks.tally.go_on_from(state.counts)
    return state


def _save(learner: Learner, state: TrainState, hooks: Hooks, folder: Path) -> None:
    """Write a checkpoint, with what was counted for the run."""
    if hooks.tally is not None:
        state.counts = hooks.tally.counts()
    learner.save(folder, state)


def _ask(
    learner: Learner,
    state: TrainState,
    clock: WallClock,
    hook: Callable[[int], Answered] | None,
    note: Callable[[TrainState, int, Answered], None],
) -> None:
    """Evaluate without noise, outside of all phases, and note what it gave."""
    if hook is None:
        return
    clock.mark("idle")
    started = time.perf_counter()
    learner.sampler.refresh()
    note(state, state.step, hook(state.step))
    state.count_seconds("evaluation_seconds", started)
    clock.leave_out()
