"""One optimiser step on part of a rollout: forward, loss, backward, and what memory allows.

Every tier's update goes through here, over the micro-batches of `repro.rl.micro_batches`. As the
cut changes nothing but memory, running out of it is not the end: what was added up is cleared and
the step starts over with half the tokens in a micro-batch.

If no row gives a gradient the optimiser still steps, on zeros: its moments decay and its step
counter moves, as they would have with the rows in.

Easy mistakes
-------------
* Out of memory in the middle of backward leaves gradients of some layers already added; going on
  from the micro-batch that failed would count them twice.
* A handler that tries again inside `except` holds, through the exception, the frames and so the
  tensors that did not fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from kernels.segments import sent
from repro.models.policy import Policy
from repro.rl.collect import Rollout, loss_mask
from repro.rl.diagnostics import entropies, mean_of
from repro.rl.loss import SUMS, LossResult, StepCounts, policy_loss
from repro.rl.micro_batches import Plan, plan_step, split_by_tokens
from repro.rl.rows import Rows
from repro.rl.single_run.packed import packed_logprobs
from repro.rl.single_run.ranks import ALONE, Ranks
from repro.spec.arm import LossConfig
from repro.spec.config import RunConfig, TrainScale

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """Log-probabilities and entropies of a step's rows, and the sums behind its metrics.

    Attributes
    ----------
    plan
        As carried out.
    logprobs, entropy
        (B, T) float32 on the CPU, of the whole rollout's shape; filled at the step's rows.
    loss
        Of the step.
    results
        One per micro-batch.
    """

    plan: Plan
    logprobs: Tensor
    entropy: Tensor
    loss: float
    results: list[LossResult]


def within_memory(
    attempt: Callable[[int], Result],
    size: int,
    *,
    smallest: Callable[[int], bool],
    forget: Callable[[], object],
    ranks: Ranks = ALONE,
) -> tuple[Result, int]:
    """Attempt passes, from the start with half the size of each whenever memory runs out.

    Parameters
    ----------
    attempt
        Makes all passes, each of at most that size; may leave gradients.
    size
        To begin with: packed tokens of a pass, or groups.
    smallest
        Whether passes of a size cannot be made smaller.
    forget
        Clears what an attempt has added up, before another.
    ranks
        Where memory runs out on one, all start over alike.

    Returns
    -------
    result
        Of the attempt that fitted.
    size
        Of that attempt.

    Raises
    ------
    torch.OutOfMemoryError
        When the smallest passes do not fit.
    """
    while True:
        result, lacking = None, None
        try:
            result = attempt(size)
        except torch.OutOfMemoryError as error:
            if ranks.abreast:
                raise  # the others wait in the middle of a pass: it cannot begin again
            lacking = str(error)
        if not ranks.any(lacking is not None):
            return cast(Result, result), size
        forget()
        if smallest(size):
            raise torch.OutOfMemoryError(lacking or "memory ran out on another rank")
        # Outside the handler: its exception holds the frames, and so the tensors, that failed.
        size //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def in_single_rows(pieces: Callable[[int], Sequence[Tensor]]) -> Callable[[int], bool]:
    """Return whether all of `pieces` of so many packed tokens are single rows."""
    return lambda micro_tokens: all(len(piece) == 1 for piece in pieces(micro_tokens))


def clear_gradients(parameters: dict[str, nn.Parameter]) -> None:
    """Leave the parameters without gradients."""
    for parameter in parameters.values():
        parameter.grad = None


def accumulate_step(
    policy: Policy,
    rollout: Rollout,
    index: Tensor,
    run: RunConfig,
    *,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    parameters: dict[str, nn.Parameter],
    micro_tokens: int,
    kept_blocks: int | None = 0,
    ranks: Ranks = ALONE,
) -> tuple[StepOutput, int]:
    """Run the passes of a step on rows `index`; its gradient is left in the parameters.

    Of several ranks each makes its own share of the passes, and has its share of the gradient; the
    output is that of all.

    Parameters
    ----------
    old_logprobs
        (B, T) of the ratio's denominator; None takes each pass's own, the ratio being exactly 1.
    ref_logprobs
        (B, T) of the reference policy, or None.
    micro_tokens
        Packed tokens of a micro-batch to begin with; halved whenever memory runs out.
    kept_blocks
        Of how many blocks packed passes keep the activations for backward; None keeps all.

    Returns
    -------
    output
        Of the step.
    micro_tokens
        With which it went through.

    Raises
    ------
    torch.OutOfMemoryError
        When a single row does not fit.
    """
    scale: TrainScale = run.scale
    counting = loss_mask(rollout, mask_truncated=run.arm.loss.mask_truncated)
    first = micro_tokens

    def planned(micro_tokens: int) -> Plan:
        return plan_step(
            rollout.rows,
            index,
            rollout.advantages.values,
            counting,
            run.arm.loss,
            micro_tokens=micro_tokens,
            micro_batch_rows=scale.micro_batch_rows,
            length_limit=scale.rollout.max_new_tokens,
            ranks=ranks.world,
        )

    def attempt(micro_tokens: int) -> StepOutput:
        return carry_out(
            policy, rollout, planned(micro_tokens), run, counting,
            old_logprobs=old_logprobs, ref_logprobs=ref_logprobs,
            # What ran out of memory goes on without what may be computed again.
            kept_blocks=kept_blocks if micro_tokens == first else 0, ranks=ranks,
        )  # fmt: skip

    output, fitting = within_memory(
        attempt,
        micro_tokens,
        smallest=in_single_rows(lambda tokens: planned(tokens).pieces),
        forget=lambda: clear_gradients(parameters),
        ranks=ranks,
    )
    return _of_all(output, ranks), fitting


def carry_out(
    policy: Policy,
    rollout: Rollout,
    plan: Plan,
    run: RunConfig,
    counting: Tensor,
    *,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    kept_blocks: int | None,
    ranks: Ranks = ALONE,
) -> StepOutput:
    """Run a plan's forward and backward passes; see `accumulate_step`.

    Parameters
    ----------
    counting
        (B, T) bool; tokens that the loss counts.
    """
    rows, temperature = rollout.rows, run.rollout.temperature
    results: list[LossResult] = [_NOTHING] * len(plan.micro_batches)
    passed = []
    sizes = rows.packed_tokens()
    for number in ranks.mine([int(sizes[index].sum()) for index, _ in plan.micro_batches]):
        index, counts = plan.micro_batches[number]
        part = rows.select(index)
        new, entropy = packed_logprobs(policy, part, temperature, kept_blocks=kept_blocks)
        result = loss_of_rows(
            new, rollout, index, counting, run.arm.loss, counts,
            old_logprobs=old_logprobs, ref_logprobs=ref_logprobs,
        )  # fmt: skip
        result.loss.backward()
        # Without its graph, which would hold what the pass kept.
        results[number] = dataclasses.replace(result, loss=result.loss.detach())
        passed.append((index, (new.detach(), entropy.detach())))
    _pass_beside(policy, rows, temperature, ranks.beside(len(plan.micro_batches)))
    passed += _evaluated(policy, rows, plan.idle, temperature, ranks)
    ranks.meet("passes")
    # Read only now: until here the host is ahead of the device and waits for nothing.
    into = torch.zeros(rows.mask.shape), torch.zeros(rows.mask.shape)
    _write(passed, into)
    loss = sum(float(result.loss) for result in results)
    return StepOutput(plan=plan, logprobs=into[0], entropy=into[1], loss=loss, results=results)


# What a micro-batch of another rank gives here.
_NOTHING = LossResult(loss=torch.zeros(()), sums=torch.zeros(len(SUMS), dtype=torch.float64))


def _share(pieces: Sequence[Tensor], sizes: Tensor, ranks: Ranks) -> list[Tensor]:
    """Return this rank's pieces, by the packed tokens of their rows."""
    return [pieces[n] for n in ranks.mine([int(sizes[piece].sum()) for piece in pieces])]


def _of_all(output: StepOutput, ranks: Ranks) -> StepOutput:
    """Return a step's output with what the other ranks' passes gave, in the plan's order."""
    if ranks.world == 1:
        return output
    # Rows without advantage give no gradient in which it would show: said here, before any step.
    bad = (~output.logprobs.isfinite().all(1)).nonzero().flatten().tolist()
    ranks.agree(f"log-probabilities of rows {bad} are not finite" if bad else None)
    ranks.add(output.logprobs, output.entropy, of="log-probabilities")
    rows = [torch.stack([r.loss.cpu().double(), *r.sums.cpu().double()]) for r in output.results]
    every = torch.stack(rows) if rows else torch.zeros(0, 1 + len(SUMS), dtype=torch.float64)
    ranks.add(every, of="losses")
    return dataclasses.replace(
        output,
        loss=sum(every[:, 0].tolist()),
        results=[LossResult(loss=row[0], sums=row[1:]) for row in every],
    )


def loss_of_rows(
    logprobs: Tensor,
    rollout: Rollout,
    index: Tensor,
    counting: Tensor,
    config: LossConfig,
    counts: StepCounts,
    *,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
) -> LossResult:
    """Return the loss of some of a rollout's rows; see `policy_loss`.

    Parameters
    ----------
    logprobs
        (b, T') float, with gradient, on any device; of rows `index`, (b,), and as many columns as
        the longest of them has.
    counting, old_logprobs, ref_logprobs
        (B, T), of the whole rollout.
    """
    width = logprobs.shape[1]

    def beside(values: Tensor) -> Tensor:
        return sent(values[index, :width], logprobs.device)

    return policy_loss(
        logprobs,
        sent(rollout.advantages.values[index], logprobs.device),
        beside(counting),
        config,
        counts,
        old_logprobs=None if old_logprobs is None else beside(old_logprobs),
        sampled_logprobs=beside(rollout.rows.sampled_logprobs),
        ref_logprobs=None if ref_logprobs is None else beside(ref_logprobs),
    )


def evaluate_rows(
    policy: Policy,
    rows: Rows,
    index: Tensor,
    temperature: float,
    *,
    micro_tokens: int,
    into: tuple[Tensor, Tensor],
    ranks: Ranks = ALONE,
) -> int:
    """Write log-probabilities and entropies of rows `index` into (B, T) tensors, no gradient.

    Of several ranks each passes its own share, and has the values of all.

    Returns
    -------
    int
        Packed tokens of a pass with which memory sufficed, `micro_tokens` or fewer.

    Raises
    ------
    torch.OutOfMemoryError
        When a single row does not fit.
    """

    def pieces(micro_tokens: int) -> list[Tensor]:
        return split_by_tokens(rows, index, micro_tokens, multiple=ranks.world)

    def attempt(micro_tokens: int) -> list[Passed]:
        return _evaluated(policy, rows, pieces(micro_tokens), temperature, ranks)

    passed, fitting = within_memory(
        attempt, micro_tokens, smallest=in_single_rows(pieces), forget=lambda: None, ranks=ranks
    )
    own = torch.zeros_like(into[0]), torch.zeros_like(into[1])
    _write(passed, own)
    ranks.add(*own, of="log-probabilities")
    for target, values in zip(into, own, strict=True):
        target[index] = values[index]
    return fitting


# Rows of a pass, and their log-probabilities and entropies, (b, T') both, where they were made.
Passed = tuple[Tensor, tuple[Tensor, Tensor]]


def _evaluated(
    policy: Policy, rows: Rows, pieces: Sequence[Tensor], temperature: float, ranks: Ranks
) -> list[Passed]:
    """Run this rank's share of pieces forward without gradient."""
    with torch.no_grad():
        passed = [
            (piece, packed_logprobs(policy, rows.select(piece), temperature))
            for piece in _share(pieces, rows.packed_tokens(), ranks)
        ]
        _pass_beside(policy, rows, temperature, ranks.beside(len(pieces)))
    return passed


def _pass_beside(policy: Policy, rows: Rows, temperature: float, count: int) -> None:
    """Pass a row without effect, so often: where ranks gather weights, all make as many passes."""
    first = rows.select(torch.zeros(1, dtype=torch.int64))
    for _ in range(count):
        logprobs, _ = packed_logprobs(policy, first, temperature)
        if logprobs.requires_grad:
            (0 * logprobs.sum()).backward()


def _write(passed: Sequence[Passed], into: tuple[Tensor, Tensor]) -> None:
    """Copy what passes gave into (B, T) tensors on the CPU."""
    for index, values in passed:
        for target, value in zip(into, values, strict=True):
            target[index, : value.shape[1]] = value.to(target)


def zero_missing_gradients(parameters: dict[str, nn.Parameter]) -> None:
    """Give parameters without gradient a zero one, so that the optimiser does not skip them."""
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def step_metrics(rollout: Rollout, output: StepOutput) -> dict[str, float | int | None]:
    """Return the metrics of one optimiser step over its own rows."""
    index = output.plan.index
    mask, truncated = rollout.rows.mask[index], rollout.rows.truncated[index]
    members = index.tolist()
    each = [result.sums for result in output.results] or [torch.zeros(len(SUMS))]
    sums = dict(zip(SUMS, torch.stack(each).sum(0).tolist(), strict=True))
    tokens = sums["tokens"]

    def share(name: str) -> float:
        return sums[name] / tokens if tokens else 0.0

    metrics: dict[str, float | int | None] = {
        "reward": mean_of([rollout.reward[row] for row in members]),
        "accuracy": mean_of([rollout.accuracy[row] for row in members]),
        "format": mean_of([rollout.format[row] for row in members]),
        "completion_tokens": float(mask.sum(1).double().mean()) if members else None,
        "truncation_rate": float(truncated.double().mean()) if members else None,
        "loss": output.loss,
        "clip_fraction_low": share("clipped_low"),
        "clip_fraction_high": share("clipped_high"),
        "dual_clip_fraction": share("dual_clipped"),
        "ratio": share("ratio") if tokens else None,
        "kl": share("kl"),
        "importance_weight": share("weight") if tokens else None,
    }
    return metrics | entropies(output.entropy[index], mask, truncated)


def reference_logprobs(
    policy: Policy,
    rows: Rows,
    temperature: float,
    parameters: dict[str, nn.Parameter],
    reference: dict[str, Tensor],
    *,
    micro_tokens: int,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, int]:
    """Return (B, T) log-probabilities under the weights `reference`, swapped in for the pass.

    Holding the trainable tensors' first values serves LoRA, norms and full training alike. Beside
    them stand the tokens of a pass with which memory sufficed.
    """
    into = torch.zeros(rows.mask.shape), torch.zeros(rows.mask.shape)
    _exchange(parameters, reference)
    try:
        everything = torch.arange(len(rows))
        micro_tokens = evaluate_rows(
            policy, rows, everything, temperature,
            micro_tokens=micro_tokens, into=into, ranks=ranks,
        )  # fmt: skip
    finally:
        _exchange(parameters, reference)
    return into[0], micro_tokens


@torch.no_grad()
def _exchange(parameters: dict[str, nn.Parameter], others: dict[str, Tensor]) -> None:
    """Exchange values in place: a part of what ranks divide is seen through its own memory."""
    for name, parameter in parameters.items():
        held = parameter.clone()
        parameter.copy_(others[name])
        others[name].copy_(held)
