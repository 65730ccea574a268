"""Supervised fine-tuning on worked solutions: the control to reinforcement learning under noise.

The paper sets its finding, that quantisation noise helps reinforcement learning, against results on
supervised fine-tuning, where it harms (section 1). Here is the other side of that contrast, matched
to a reinforcement-learning run of the same scale in policy, adapters, optimiser, learning rate,
number of steps, order of problems and tokens: step s goes on with worked solutions until
(s + 1) / steps of the scale's `evaluation.token_budget` have been trained on.

* There is no rollout, so the noise lies on the forward and backward pass of each step; it is drawn
  as there, from (seed, step, norm), and every evaluation is without. A noise that reaches the
  rollout alone has nothing to act on and is refused.
* The loss of a step is the mean over its completions' tokens of -log p, at temperature 1.
* A checkpoint holds how many solutions were taken; a resumed run continues to the bit on one
  thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from repro.rl.clock import WallClock
from repro.rl.collect import order_of_epoch
from repro.rl.lessons import SFTExample, rows_of
from repro.rl.loop import Hooks, StepValues, run_steps
from repro.rl.noise import NoiseReceipt
from repro.rl.policies import Policies, SFTStats
from repro.rl.receipts import Values, note_noise, note_step
from repro.rl.rows import Rows
from repro.rl.runs import FailedRun, RunStates, TrainResult
from repro.rl.training_checkpoint import TrainState
from repro.spec.arm import GRPO
from repro.spec.config import RunConfig, TrainScale


def fine_tune(
    policies: Policies, lessons: Sequence[SFTExample], hooks: Hooks, *, folder: Path
) -> list[TrainResult | FailedRun]:
    """Train freshly loaded policies on worked solutions, or go on from `folder`'s last checkpoint.

    They are trained in place, each on its own lessons of the training split, in its own order.
    Returns the result of each run; of policies that do not freeze runs, never a `FailedRun`.

    Raises
    ------
    ValueError
        When a configuration asks for something that has no meaning here, there are no lessons, or a
        checkpoint belongs to other runs.
    """
    for run in policies.runs:
        require_supervised(run)
    if not lessons:
        raise ValueError("there are no worked solutions; fine-tuning needs at least one")
    clock = WallClock()

    def iterate(state: RunStates) -> list[StepValues]:
        values = _iterate(policies, lessons, state)
        clock.mark("update")
        return [values]

    return run_steps(policies, iterate, hooks, folder=folder, clock=clock)


def require_supervised(run: RunConfig) -> None:
    """Raise `ValueError` for a run whose configuration says what cannot act here."""
    arm, scale = run.arm, run.scale
    if not isinstance(scale, TrainScale):
        raise TypeError(f"run.scale is a {type(scale).__name__}; training needs a TrainScale")
    if arm.loss != GRPO or arm.reward != "task":
        raise ValueError(
            f"arm {arm.name} names the loss {arm.loss.name} and the reward {arm.reward}; "
            "supervised fine-tuning has neither, so both must be left at their defaults"
        )
    if arm.noise is not None and arm.noise.reach != "shared":
        raise ValueError(
            f"arm {arm.name}: noise.reach is {arm.noise.reach}, and supervised fine-tuning has no "
            "rollout; it must be shared"
        )
    if arm.exploration is not None:
        raise ValueError(
            f"arm {arm.name} explores, and supervised fine-tuning samples no rollouts; exploration "
            "must be None"
        )
    budget, least = scale.evaluation.token_budget, scale.steps * scale.rollout.max_new_tokens
    if budget < least:
        raise ValueError(
            f"evaluation.token_budget is {budget}; supervised fine-tuning takes its tokens from it "
            f"and needs room for a completion in each step, {least} or more"
        )


def _iterate(policies: Policies, lessons: Sequence[SFTExample], state: RunStates) -> StepValues:
    """One optimiser step of every live run; `state` moves on by one."""
    started = time.perf_counter()
    taken = state.each(lambda s: rows_of(lessons_of_step(policies.runs[s], lessons, state.runs[s])))
    with policies.perturbed(state.step, "update") as receipts:
        imitations = policies.imitate(taken, state)
    moved = policies.step(state, state.step)
    values: StepValues = [
        None
        if rows is None or imitation is None or own is None
        else note_lessons(run, rows, receipt, imitation, own)
        for run, rows, receipt, imitation, own in zip(
            state.runs, taken, receipts, imitations, moved, strict=True
        )
    ]
    state.step += 1
    state.count_seconds("update_seconds", started)
    return values


def note_lessons(
    state: TrainState,
    rows: Rows,
    receipt: NoiseReceipt,
    imitation: SFTStats,
    moved: Values,
) -> Values:
    """Count a step's lessons, write down the step and return its values.

    Parameters
    ----------
    moved
        `grad_norm` and `learning_rate`; see `Policies.step`.
    """
    counts, tokens = state.effects["rows"], int(rows.mask.sum())
    counts["trained_on"] += len(rows)
    counts["tokens_trained"] += tokens
    note_noise(state, receipt)
    values: Values = {
        "loss": imitation.loss,
        "entropy": imitation.entropy,
        "tokens": tokens,
        "sigma": receipt.sigma,
        "sigma_realised": receipt.sigma_realised,
        "noise_stage": receipt.stage,
        **moved,
    }
    note_step(state, values)
    return values


def lessons_of_step(
    run: RunConfig, lessons: Sequence[SFTExample], state: TrainState
) -> list[SFTExample]:
    """Return the lessons of a run's next step, at least one, and move its `draws` past them.

    Each epoch is shuffled again, in the order in which a run of the same seed would draw the
    problems for rollouts.
    """
    scale: TrainScale = run.scale
    counts = state.effects.setdefault("rows", {"trained_on": 0, "tokens_trained": 0})
    tokens = counts["tokens_trained"]
    due = scale.evaluation.token_budget * (state.step + 1) / scale.steps
    taken: list[SFTExample] = []
    drawn, order = -1, list[int]()
    while not taken or tokens < due:
        epoch, place = divmod(state.draws, len(lessons))
        if epoch != drawn:
            drawn, order = epoch, order_of_epoch(run.seed, epoch, len(lessons))
        taken.append(lessons[order[place]])
        tokens += len(taken[-1].completion)
        state.draws += 1
    return taken
