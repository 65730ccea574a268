"""One optimiser step on part of a rollout: micro-batches, normalisers, gradient, metrics.

Rows whose advantage is exactly zero give no gradient. Without a KL term they are left out of the
backward pass, which is exact because they stay in every count that the loss is divided by; they go
forward without gradient, so entropy and mismatch are those of all rows.

If no row gives a gradient the optimiser still steps, on zeros: its moments decay and its step
counter moves, as they would have with the rows in.

Running out of memory is not the end: `accumulate_within_memory` clears what was added up and starts
the step over with half the rows in a micro-batch. Normalisers belong to the step, so the gradient
is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repro.models.policy import Policy
from repro.rl.collect import Rollout, loss_mask
from repro.rl.diagnostics import entropies, mean_of
from repro.rl.loss import LossResult, StepCounts, policy_loss
from repro.rl.passes import row_logprobs
from repro.rl.rows import Rows
from repro.spec.config import LossConfig, RunConfig, TrainScale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """How one optimiser step is carried out.

    Attributes
    ----------
    index
        (b,) rows of the rollout that belong to the step.
    micro_batches
        Rows that take part in the backward pass, each with the step's counts.
    idle
        Rows that give no gradient.
    """

    index: Tensor
    micro_batches: list[tuple[Tensor, StepCounts]]
    idle: Tensor


def plan_step(
    index: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: LossConfig,
    *,
    micro_batch_rows: int,
    length_limit: int,
) -> Plan:
    """Split a step's rows into micro-batches and count what the loss is divided by.

    Parameters
    ----------
    index
        (b,) int64 rows of the step.
    advantages, mask
        (B,) and (B, T) of the whole rollout.
    config
        The objective.
    micro_batch_rows
        Rows in one backward pass.
    length_limit
        Tokens.
    """
    tokens_of_row = mask.sum(1)
    gives = tokens_of_row > 0
    if config.beta == 0:
        gives &= advantages != 0
    local = config.aggregation == "token_mean_local"
    # A local mean divides by its own micro-batch, idle rows included, so those decide the cut.
    chunks = (index if local else index[gives[index]]).split(micro_batch_rows)
    base = StepCounts(
        rows=int((tokens_of_row[index] > 0).sum()),
        tokens=int(tokens_of_row[index].sum()),
        length_limit=length_limit,
        micro_batches=len(chunks),
    )
    micro_batches = []
    for chunk in chunks:
        active = chunk[gives[chunk]]
        if len(active):
            counts = StepCounts(
                rows=base.rows,
                tokens=base.tokens,
                length_limit=length_limit,
                micro_batches=len(chunks),
                local_tokens=int(tokens_of_row[chunk].sum()) if local else None,
            )
            micro_batches.append((active, counts))
    return Plan(index=index, micro_batches=micro_batches, idle=index[~gives[index]])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """Log-probabilities and entropies of a step's rows, and the sums behind its metrics.

    Attributes
    ----------
    logprobs, entropy
        (B, T) float32 on the CPU, of the whole rollout's shape; filled at the step's rows.
    loss
        Of the step.
    results
        One a micro-batch.
    """

    logprobs: Tensor
    entropy: Tensor
    loss: float
    results: list[LossResult]


def accumulate_gradient(
    policy: Policy,
    rollout: Rollout,
    plan: Plan,
    run: RunConfig,
    *,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
) -> StepOutput:
    """Run a plan's forward and backward passes; gradients add up in the parameters.

    Parameters
    ----------
    old_logprobs
        (B, T) of the ratio's denominator; None takes each pass's own, the ratio being exactly 1.
    ref_logprobs
        (B, T) of the reference policy, or None.
    """
    scale: TrainScale = run.scale
    config = run.arm.loss
    rows = rollout.rows
    counting = loss_mask(rollout, mask_truncated=config.mask_truncated)
    logprobs, entropy = torch.zeros(rows.mask.shape), torch.zeros(rows.mask.shape)
    loss, results = 0.0, []
    for index, counts in plan.micro_batches:
        part = rows.select(index)
        width = part.mask.shape[1]
        new, new_entropy = row_logprobs(policy, part, scale.rollout.temperature)

        def beside(
            values: Tensor | None, index: Tensor = index, width: int = width, like: Tensor = new
        ) -> Tensor | None:
            return None if values is None else values[index, :width].to(like.device)

        result = policy_loss(
            new,
            rollout.advantages.values[index].to(new.device),
            counting[index, :width].to(new.device),
            config,
            counts,
            old_logprobs=beside(old_logprobs),
            sampled_logprobs=beside(rows.sampled_logprobs),
            ref_logprobs=beside(ref_logprobs),
        )
        result.loss.backward()
        loss += float(result.loss.detach())
        results.append(result)
        logprobs[index, :width] = new.detach().to(logprobs)
        entropy[index, :width] = new_entropy.detach().to(entropy)
    evaluate_rows(policy, rows, plan.idle, run, into=(logprobs, entropy))
    return StepOutput(logprobs=logprobs, entropy=entropy, loss=loss, results=results)


def accumulate_within_memory(
    policy: Policy,
    rollout: Rollout,
    index: Tensor,
    run: RunConfig,
    *,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    parameters: dict[str, nn.Parameter],
    micro_batch_rows: int,
) -> tuple[Plan, StepOutput, int]:
    """Plan a step on rows `index` and accumulate its gradient, in smaller parts if it must be.

    Returns
    -------
    plan, output
        As carried out.
    micro_batch_rows
        With which it went through.

    Raises
    ------
    torch.OutOfMemoryError
        When a single row does not fit, or the objective depends on the cut.
    """
    scale: TrainScale = run.scale
    config = run.arm.loss
    counting = loss_mask(rollout, mask_truncated=config.mask_truncated)
    while True:
        plan = plan_step(
            index,
            rollout.advantages.values,
            counting,
            config,
            micro_batch_rows=micro_batch_rows,
            length_limit=scale.rollout.max_new_tokens,
        )
        try:
            output = accumulate_gradient(
                policy, rollout, plan, run, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs
            )
        except torch.OutOfMemoryError:
            if micro_batch_rows == 1 or config.aggregation == "token_mean_local":
                raise
            for parameter in parameters.values():
                parameter.grad = None
        else:
            return plan, output, micro_batch_rows
        # Outside the handler: its exception holds the frames, and so the tensors, that failed.
        micro_batch_rows //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def evaluate_rows(
    policy: Policy,
    rows: Rows,
    index: Tensor,
    run: RunConfig,
    *,
    into: tuple[Tensor, Tensor],
) -> None:
    """Write log-probabilities and entropies of rows `index` into (B, T) tensors, no gradient."""
    scale: TrainScale = run.scale
    for chunk in index.split(scale.micro_batch_rows):
        if len(chunk):
            _evaluate_chunk(policy, rows, chunk, scale.rollout.temperature, into)


def _evaluate_chunk(
    policy: Policy,
    rows: Rows,
    chunk: Tensor,
    temperature: float,
    into: tuple[Tensor, Tensor],
) -> None:
    """Evaluate one chunk of rows, by halves where memory runs out."""
    try:
        with torch.no_grad():
            found = row_logprobs(policy, rows.select(chunk), temperature)
    except torch.OutOfMemoryError:
        if len(chunk) == 1:
            raise
    else:
        for target, values in zip(into, found, strict=True):
            target[chunk, : values.shape[1]] = values.to(target)
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    for half in chunk.tensor_split(2):
        _evaluate_chunk(policy, rows, half, temperature, into)


def zero_missing_gradients(parameters: dict[str, nn.Parameter]) -> None:
    """Give parameters without gradient a zero one, so that the optimiser does not skip them."""
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def step_metrics(rollout: Rollout, plan: Plan, output: StepOutput) -> dict[str, float | int | None]:
    """Return the metrics of one optimiser step over its own rows."""
    index = plan.index
    mask, truncated = rollout.rows.mask[index], rollout.rows.truncated[index]
    members = index.tolist()
    tokens = sum(result.tokens for result in output.results)

    def share(total: float) -> float:
        return total / tokens if tokens else 0.0

    metrics: dict[str, float | int | None] = {
        "reward": mean_of([rollout.reward[row] for row in members]),
        "accuracy": mean_of([rollout.accuracy[row] for row in members]),
        "format": mean_of([rollout.format[row] for row in members]),
        "completion_tokens": float(mask.sum(1).double().mean()) if members else None,
        "truncation_rate": float(truncated.double().mean()) if members else None,
        "loss": output.loss,
        "clip_fraction_low": share(sum(result.clipped_low for result in output.results)),
        "clip_fraction_high": share(sum(result.clipped_high for result in output.results)),
        "dual_clip_fraction": share(sum(result.dual_clipped for result in output.results)),
        "ratio": share(sum(result.ratio_sum for result in output.results)) if tokens else None,
        "kl": share(sum(result.kl_sum for result in output.results)),
        "importance_weight": share(sum(r.weight_sum for r in output.results)) if tokens else None,
    }
    return metrics | entropies(output.entropy[index], mask, truncated)


def reference_logprobs(
    policy: Policy,
    rows: Rows,
    run: RunConfig,
    parameters: dict[str, nn.Parameter],
    reference: dict[str, Tensor],
) -> Tensor:
    """Return (B, T) log-probabilities under the weights `reference`, swapped in for the pass.

    Holding the trainable tensors' first values serves LoRA, norms and full training alike.
    """
    into = torch.zeros(rows.mask.shape), torch.zeros(rows.mask.shape)
    held = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = reference[name]
        evaluate_rows(policy, rows, torch.arange(len(rows)), run, into=into)
    finally:
        for name, parameter in parameters.items():
            parameter.data = held[name]
    return into[0]
