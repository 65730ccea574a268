"""The training loop, top to bottom: rollout under noise, advantages, updates, logs, checkpoints.

The details that decide whether a run means what it says, with where they come from:

1.  Problems in an order fixed by the run's seed; completions' seeds from (seed, step, problem, k):
    all arms of a seed are paired. (ours)
2.  Noise is added before sampling and removed after it; the trainer's log-probabilities are clean
    (Fig. 2, released code) unless `reach` is `shared`. Redrawn each rollout (Algorithm 1; section
    3.3 says "each forward pass").
3.  The sampler's tokens are drawn at T = 1 from the full distribution (Table 4); top-p, top-k and
    min-p are refused in rollouts, because the trainer's softmax would not be the sampler's.
4.  Advantages by group, ddof 1 (Eq. 3; released code), zero for groups of equal rewards.
5.  The ratio divides by the trainer's own log-probabilities (released code) or the sampler's
    (Algorithm 1 as written). With one update per rollout the former is exactly 1: no second pass is
    made and clipping cannot act. The first update of every rollout is such a one.
6.  `updates_per_rollout` equal parts of a rollout, one optimiser step each (4 on GSM8K, Table 4);
    the released scripts use 1.
7.  Rows with zero advantage skip the backward pass and stay in all normalisers. (exact)
    Micro-batches are cut by tokens; where memory runs out the step starts over with half as many.
8.  Sampler and trainer are compared on every rollout; correction by truncated importance sampling
    is the loss's choice (absent in paper and released code).
9.  Masters, moments and noise are float32; gradient norm clipped before AdamW (released: 0.2).
10. No dropout anywhere: it would move the ratio off 1. Refused when a model has any.
11. A checkpoint holds no random state, since none exists; a resumed run continues to the bit on one
    thread.

Sources: arXiv 2510.11696 sections 3.2 to 4.1, Algorithm 1, Table 4, App. E.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from repro.data.problem import Problem
from repro.models.policy import Policy, trainable_parameters
from repro.rl.checkpoint import TrainState
from repro.rl.clock import Clock, NoClock
from repro.rl.collect import Prompts, PromptSource, Rollout, ScoreFunction, collect
from repro.rl.loop import TrainResult, load_or_begin, run_steps
from repro.rl.loss import check_loss
from repro.rl.micro_batches import token_budget
from repro.rl.noise import NoiseReceipt, perturbed
from repro.rl.optimizer import build_optimizer, scheduled_step
from repro.rl.receipts import (
    Values,
    at_most_what_fitted,
    count_seconds,
    note_rollout,
    note_smaller_batches,
    note_step,
)
from repro.rl.rows import Rows
from repro.rl.step import (
    accumulate_step,
    evaluate_rows,
    reference_logprobs,
    step_metrics,
    zero_missing_gradients,
)
from repro.spec.config import RunConfig, TrainScale

if TYPE_CHECKING:
    from repro.rollout.sampler import Sampler


def train(
    run: RunConfig,
    policy: Policy,
    sampler: Sampler,
    problems: Sequence[Problem],
    score: ScoreFunction,
    *,
    folder: Path,
    on_step: Callable[[int, Values], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    evaluate: Callable[[int], float] | None = None,
) -> TrainResult:
    """Train a policy, from its last checkpoint if `folder` holds one.

    Parameters
    ----------
    run
        Arm, `TrainScale` and seed.
    policy
        Freshly loaded; trained in place.
    sampler
        Samples under `policy`; its `refresh()` is called after every rollout's updates.
    problems
        The training split.
    score
        Texts, golds and seeds of completions to their rewards.
    folder
        Of the checkpoints.
    on_step
        Called with the number of steps done and the step's values.
    should_stop
        Asked before each rollout; True writes a checkpoint and returns.
    evaluate
        Called with the steps done every `scale.evaluation.every` steps (and before the first where
        the scale has a `token_budget`), without noise; its value goes into the series.

    Raises
    ------
    ValueError
        When the configuration asks for something that cannot be trained as it says, or a checkpoint
        belongs to another run.
    """
    if policy.tokenizer is None:
        raise ValueError("the policy has no tokenizer; training needs one to read completions")
    source = PromptSource(problems, policy.tokenizer, run)
    t = prepare(run, policy, sampler, source, score)
    state = load_or_begin(folder, run, t.parameters, t.optimizer)
    sampler.refresh()
    result = run_steps(
        run,
        state,
        lambda: iterate(t, state, on_step),
        folder=folder,
        parameters=t.parameters,
        optimizer=t.optimizer,
        should_stop=should_stop,
        evaluate=evaluate,
    )
    if result.finished:
        require_acting_terms(run, state)
    return result


def everything(rows: Rows) -> Tensor:
    """Return the indices of all rows, (B,) int64."""
    return torch.arange(len(rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training:
    """What a run's steps work on; everything that changes is inside its parts or in the state.

    Attributes
    ----------
    reference
        Copies of what is trained, from before training, for a KL term; else empty.
    micro_tokens
        Packed tokens of a micro-batch; None takes those of `micro_batch_rows` rows as long as the
        step's longest.
    checkpointing
        Whether packed passes compute blocks again in backward.
    taking_part
        Which rows of a rollout the updates are on, by index.
    clock
        Marked at the end of each phase.
    """

    run: RunConfig
    policy: Policy
    sampler: Sampler
    source: Prompts
    score: ScoreFunction
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    reference: dict[str, Tensor]
    micro_tokens: int | None = None
    checkpointing: bool = True
    taking_part: Callable[[Rows], Tensor] = everything
    clock: Clock = field(default_factory=NoClock)


def prepare(
    run: RunConfig, policy: Policy, sampler: Sampler, source: Prompts, score: ScoreFunction
) -> Training:
    """Build the optimiser and, for a KL term, the reference weights of a run that can be trained.

    Raises
    ------
    ValueError
        When the configuration asks for something that cannot be trained as it says.
    """
    require_trainable(run)
    require_no_dropout(policy)
    parameters = trainable_parameters(policy)
    reference: dict[str, Tensor] = {}
    if run.arm.loss.beta > 0:
        # Copied before a checkpoint is loaded: the reference is the policy before training.
        reference = {name: p.detach().clone() for name, p in parameters.items()}
    return Training(
        run=run,
        policy=policy,
        sampler=sampler,
        source=source,
        score=score,
        parameters=parameters,
        optimizer=build_optimizer(parameters, run.scale.optimizer),
        reference=reference,
    )


def iterate(
    t: Training, state: TrainState, on_step: Callable[[int, Values], None] | None = None
) -> None:
    """One rollout and its updates; `state` moves on by as many steps.

    This is the step of every tier: the systems tier calls it under a clock of its own.
    """
    scale: TrainScale = t.run.scale
    step, noise = state.step, t.run.arm.noise

    def noisy() -> AbstractContextManager[NoiseReceipt]:
        return perturbed(t.policy, noise, seed=t.run.seed, step=step, total_steps=scale.steps)

    started = time.perf_counter()
    with noisy() as receipt:
        rollout = collect(
            t.run, t.sampler, t.source, t.score, t.clock, step=step, draws=state.draws
        )
    state.draws += rollout.batches
    count_seconds(state, "rollout_seconds", started)

    started = time.perf_counter()
    updates = min(scale.updates_per_rollout, scale.steps - step)
    parts = t.taking_part(rollout.rows).tensor_split(scale.updates_per_rollout)[:updates]
    shared = noise is not None and noise.reach == "shared"
    t.clock.mark("idle")
    with noisy() if shared else nullcontext():
        steps, before = _update_all(t, rollout, parts, state)
    t.sampler.refresh()
    t.clock.mark("optimizer")
    count_seconds(state, "update_seconds", started)

    once = note_rollout(t.run, state, rollout, receipt, before, torch.cat(parts))
    for values in steps:
        values |= once
        note_step(state, values)
        if on_step is not None:
            on_step(state.step, values)
    t.clock.mark("idle")


def _update_all(
    t: Training, rollout: Rollout, parts: Sequence[Tensor], state: TrainState
) -> tuple[list[Values], Tensor]:
    """One optimiser step per part, from `state.step` on.

    Returns
    -------
    values
        One dictionary per step.
    before : Tensor, (B, T)
        The trainer's log-probabilities before the first of them.
    """
    rows, temperature = rollout.rows, t.run.scale.rollout.temperature
    before, entropy = torch.zeros(rows.mask.shape), torch.zeros(rows.mask.shape)
    # The first part's own pass serves as its old log-probabilities: the ratio is 1 to the bit.
    for part in parts[1:]:
        wanted = _micro_tokens(t, rows, part, state)
        fitting = evaluate_rows(
            t.policy, rows, part, temperature, micro_tokens=wanted, into=(before, entropy)
        )
        note_smaller_batches(state, state.step, wanted, fitting)
    ref = None
    if t.reference:
        wanted = _micro_tokens(t, rows, everything(rows), state)
        ref, fitting = reference_logprobs(
            t.policy, rows, temperature, t.parameters, t.reference, micro_tokens=wanted
        )
        note_smaller_batches(state, state.step, wanted, fitting)
    steps = []
    for number, part in enumerate(parts):
        values, logprobs = _update(
            t, rollout, part, None if number == 0 else before, ref, state, step=state.step + number
        )
        if number == 0:
            before[part] = logprobs[part]
        steps.append(values)
    return steps, before


def _update(
    t: Training,
    rollout: Rollout,
    index: Tensor,
    before: Tensor | None,
    ref: Tensor | None,
    state: TrainState,
    *,
    step: int,
) -> tuple[Values, Tensor]:
    """One optimiser step on rows `index`; returns its values and its log-probabilities (B, T)."""
    loss = t.run.arm.loss
    wanted = _micro_tokens(t, rollout.rows, index, state)
    plan, output, fitting = accumulate_step(
        t.policy,
        rollout,
        index,
        t.run,
        old_logprobs=rollout.rows.sampled_logprobs if loss.old_policy == "sampler" else before,
        ref_logprobs=ref,
        parameters=t.parameters,
        micro_tokens=wanted,
        checkpointing=t.checkpointing,
    )
    note_smaller_batches(state, step, wanted, fitting)
    t.clock.mark("update")
    zero_missing_gradients(t.parameters)
    moved = scheduled_step(t.run, t.optimizer, t.parameters, step)
    t.clock.mark("optimizer")
    return step_metrics(rollout, plan, output) | moved, output.logprobs


def _micro_tokens(t: Training, rows: Rows, index: Tensor, state: TrainState) -> int:
    """Return the packed tokens of a micro-batch of rows `index` to begin with."""
    scale: TrainScale = t.run.scale
    budget = token_budget(rows.packed_tokens(), index, scale.micro_batch_rows)
    return at_most_what_fitted(state, t.micro_tokens or budget)


def require_trainable(run: RunConfig) -> None:
    """Raise `ValueError` for what would train something else than configured."""
    scale = run.scale
    if not isinstance(scale, TrainScale):
        raise TypeError(f"run.scale is a {type(scale).__name__}; training needs a TrainScale")
    check_loss(run.arm.loss)
    sampling = scale.rollout
    if sampling.temperature <= 0:
        raise ValueError(
            f"rollout temperature is {sampling.temperature}; training samples, so it must be > 0"
        )
    if sampling.top_p != 1 or sampling.top_k != 0 or sampling.min_p != 0:
        raise ValueError(
            f"rollouts use top_p {sampling.top_p}, top_k {sampling.top_k}, min_p {sampling.min_p}; "
            "the trainer's log-probabilities are of the full softmax, so they must be 1, 0 and 0"
        )


def require_no_dropout(policy: Policy) -> None:
    """Raise `ValueError` when a module of the policy would drop anything out."""
    for name, module in policy.model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(f"{name} drops out with p = {module.p}; training needs 0")


def require_acting_terms(run: RunConfig, state: TrainState) -> None:
    """Raise `ValueError` when a configured loss term never had a value."""
    moved = any(state.series.get("grad_norm", [])[:-1])
    if run.arm.loss.beta > 0 and moved and not any(state.series["kl"]):
        raise ValueError(
            f"loss.beta is {run.arm.loss.beta} and the KL term was 0 at every step; "
            "it must act at least once"
        )
