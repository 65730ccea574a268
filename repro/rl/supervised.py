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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from repro.models.policy import Policy, trainable_parameters
from repro.rl.checkpoint import TrainState
from repro.rl.diagnostics import token_mean
from repro.rl.lessons import Lesson, rows_of
from repro.rl.loop import TrainResult, load_or_begin, run_steps
from repro.rl.micro_batches import split_by_tokens, token_budget
from repro.rl.noise import NoiseReceipt, perturbed
from repro.rl.optimizer import build_optimizer, scheduled_step
from repro.rl.passes import row_logprobs
from repro.rl.receipts import (
    Values,
    at_most_what_fitted,
    count_seconds,
    note_noise,
    note_smaller_batches,
    note_step,
)
from repro.rl.rows import Rows
from repro.rl.step import within_memory
from repro.rl.trainer import require_no_dropout
from repro.spec.config import GRPO, RunConfig, TrainScale, derive_seed


def fine_tune(
    run: RunConfig,
    policy: Policy,
    lessons: Sequence[Lesson],
    *,
    folder: Path,
    on_step: Callable[[int, Values], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    evaluate: Callable[[int], float] | None = None,
) -> TrainResult:
    """Train a policy on worked solutions, from its last checkpoint if `folder` holds one.

    Parameters
    ----------
    run
        Arm, `TrainScale` and seed.
    policy
        Freshly loaded; trained in place.
    lessons
        Of the training split, in its order.
    folder
        Of the checkpoints.
    on_step, should_stop, evaluate
        As of `repro.rl.trainer.train`.

    Raises
    ------
    ValueError
        When the configuration asks for something that has no meaning here, there are no lessons, or
        a checkpoint belongs to another run.
    """
    require_supervised(run)
    require_no_dropout(policy)
    if not lessons:
        raise ValueError("there are no worked solutions; fine-tuning needs at least one")
    parameters = trainable_parameters(policy)
    optimizer = build_optimizer(parameters, run.scale.optimizer)
    state = load_or_begin(folder, run, parameters, optimizer)
    t = _Tuning(run=run, policy=policy, lessons=lessons, parameters=parameters, optimizer=optimizer)
    return run_steps(
        run,
        state,
        lambda: _iterate(t, state, on_step),
        folder=folder,
        parameters=parameters,
        optimizer=optimizer,
        should_stop=should_stop,
        evaluate=evaluate,
    )


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
    budget, least = scale.evaluation.token_budget, scale.steps * scale.rollout.max_new_tokens
    if budget < least:
        raise ValueError(
            f"evaluation.token_budget is {budget}; supervised fine-tuning takes its tokens from it "
            f"and needs room for a completion in each step, {least} or more"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tuning:
    """What a run's steps work on; everything that changes is inside its parts or in the state."""

    run: RunConfig
    policy: Policy
    lessons: Sequence[Lesson]
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer


def _iterate(t: _Tuning, state: TrainState, on_step: Callable[[int, Values], None] | None) -> None:
    """One optimiser step; `state` moves on by one."""
    scale: TrainScale = t.run.scale
    started = time.perf_counter()
    rows = rows_of(lessons_of_step(t.run, t.lessons, state))
    with perturbed(
        t.policy, t.run.arm.noise, seed=t.run.seed, step=state.step, total_steps=scale.steps
    ) as receipt:
        loss, entropy = _accumulate(t, rows, state)
    moved = scheduled_step(t.run, t.optimizer, t.parameters, state.step)
    values = note_lessons(state, rows, receipt, {"loss": loss, "entropy": entropy}, moved)
    count_seconds(state, "update_seconds", started)
    if on_step is not None:
        on_step(state.step, values)


def note_lessons(
    state: TrainState,
    rows: Rows,
    receipt: NoiseReceipt,
    found: Mapping[str, float | None],
    moved: Mapping[str, float],
) -> Values:
    """Count a step's lessons, write down the step and return its values.

    Parameters
    ----------
    found
        `loss` and `entropy` of the step, nats a token.
    moved
        `grad_norm` and `learning_rate`; see `repro.rl.optimizer.scheduled_step`.
    """
    counts, tokens = state.effects["rows"], int(rows.mask.sum())
    counts["trained_on"] += len(rows)
    counts["tokens_trained"] += tokens
    note_noise(state, receipt)
    values: Values = {
        **found,
        "tokens": tokens,
        "sigma": receipt.sigma,
        "sigma_realised": receipt.sigma_realised,
        "noise_stage": receipt.stage,
        **moved,
    }
    note_step(state, values)
    return values


def lessons_of_step(run: RunConfig, lessons: Sequence[Lesson], state: TrainState) -> list[Lesson]:
    """Return the lessons of a run's next step, at least one, and move its `draws` past them."""
    scale: TrainScale = run.scale
    counts = state.effects.setdefault("rows", {"trained_on": 0, "tokens_trained": 0})
    tokens = counts["tokens_trained"]
    wanted = scale.evaluation.token_budget * (state.step + 1) / scale.steps
    found: list[Lesson] = []
    while not found or tokens < wanted:
        found.append(_lesson_at(run, lessons, state.draws))
        tokens += len(found[-1].completion)
        state.draws += 1
    return found


def _lesson_at(run: RunConfig, lessons: Sequence[Lesson], place: int) -> Lesson:
    """Return the lesson at a place of the run's endless order: each epoch is shuffled anew.

    The order is that in which a run of the same seed would draw the problems for rollouts.
    """
    epoch, index = divmod(place, len(lessons))
    generator = torch.Generator().manual_seed(derive_seed(run.seed, "problems", epoch))
    order = torch.randperm(len(lessons), generator=generator)
    return lessons[int(order[index])]


def _accumulate(t: _Tuning, rows: Rows, state: TrainState) -> tuple[float, float | None]:
    """Add up the gradient of the step's loss; return the loss and the mean entropy, nats."""
    sizes, every = rows.packed_tokens(), torch.arange(len(rows))

    def pieces(micro_tokens: int) -> list[Tensor]:
        return split_by_tokens(sizes, every, micro_tokens)

    budget = token_budget(sizes, every, t.run.scale.micro_batch_rows)
    wanted = at_most_what_fitted(state, budget)
    sums, fitting = within_memory(
        lambda micro_tokens: _pass_over(t, rows, pieces(micro_tokens)),
        pieces,
        wanted,
        t.parameters,
    )
    note_smaller_batches(state, state.step, wanted, fitting)
    return sums


def _pass_over(t: _Tuning, rows: Rows, pieces: Sequence[Tensor]) -> tuple[float, float | None]:
    """Run the forward and backward passes of a step's pieces; see `_accumulate`."""
    tokens = int(rows.mask.sum())
    total = 0.0
    entropy = torch.zeros(rows.mask.shape)
    for index in pieces:
        part = rows.select(index)
        logprobs, part_entropy = row_logprobs(t.policy, part, 1.0)
        loss = -logprobs.sum() / tokens
        loss.backward()
        total += float(loss.detach())
        entropy[index, : part.mask.shape[1]] = part_entropy.detach().to(entropy)
    return total, token_mean(entropy, rows.mask)
