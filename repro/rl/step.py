"""One optimiser step on part of a rollout: forward, loss and backward passes in micro-batches.

All tiers use this module, with the micro-batches of `repro.rl.micro_batches`. Their size affects
memory but not the result. So if memory runs out, the accumulated gradients are cleared and the step
starts over with half as many tokens per micro-batch.

If no row contributes a gradient, the optimiser still steps, with gradients of zero: its moments
decay and its step counter advances, as with the rows included.

Easy mistakes
-------------
* If memory runs out during backward, some layers already have the gradient of that micro-batch;
  repeating the micro-batch would count it twice.
* An `except` block that tries again still holds the exception, and through its frames the tensors
  that did not fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from kernels.segments import sent
from repro.distributed import ALONE, Ranks
from repro.models.policy import Policy
from repro.rl.collect import Rollout, loss_mask
from repro.rl.loss import SUMS, LossResult, StepCounts, policy_loss
from repro.rl.micro_batches import Plan, plan_step, split_by_tokens
from repro.rl.packed import packed_logprobs
from repro.rl.rows import Rows, entropies, mean_of
from repro.spec.arm import LossConfig
from repro.spec.config import RunConfig, TrainScale

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """The inputs of an optimiser step: its rows, and log-probabilities for the loss.

    Attributes
    ----------
    step
        The optimiser step, counted from 0.
    index : Tensor, (b,), int64
        The rows of the rollout that the step trains on.
    old : Tensor or None, (B, T)
        Log-probabilities in the ratio's denominator; None takes those of the step's own forward
        pass, so that the ratio is exactly 1.
    reference : Tensor or None, (B, T)
        Log-probabilities under the reference policy.
    """

    step: int
    rollout: Rollout
    index: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """Log-probabilities and entropies of a step's rows, and the sums behind its metrics.

    `logprobs` and `entropy`, (B, T) float32 on the CPU, have the whole rollout's shape, and are
    filled at the step's rows; `results` has one per micro-batch.
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
    pieces: Callable[[int], Sequence[Tensor]],
    parameters: Iterable[nn.Parameter] = (),
    ranks: Ranks = ALONE,
) -> tuple[Result, int]:
    """Run all passes; whenever memory runs out, start over with passes of half the size.

    Raises `torch.OutOfMemoryError` when passes of single rows do not fit.

    Parameters
    ----------
    attempt
        Runs all passes, each of at most the given number of packed tokens.
    size
        The number to begin with.
    pieces
        Returns the rows of each pass of that size.
    parameters
        Those whose gradients an attempt leaves; they are cleared before another.
    ranks
        If memory runs out on one rank, all start over with the same size.

    Returns
    -------
    result
        Of the attempt that fitted.
    size
        Of that attempt.
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
        for parameter in parameters:
            parameter.grad = None
        if all(len(piece) == 1 for piece in pieces(size)):
            raise torch.OutOfMemoryError(lacking or "memory ran out on another rank")
        # Outside the `except` block: the exception's frames hold the tensors that did not fit.
        size //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def accumulate_step(
    policy: Policy,
    part: StepInputs,
    run: RunConfig,
    *,
    parameters: dict[str, nn.Parameter],
    micro_tokens: int,
    kept_blocks: int | None = 0,
    ranks: Ranks = ALONE,
) -> tuple[StepOutput, int]:
    """Run the passes of a step, and leave the gradient in the parameters.

    With several ranks each runs its share of the passes and has its share of the gradient; the
    output includes the passes of all ranks.

    Raises `torch.OutOfMemoryError` when a single row does not fit.

    Parameters
    ----------
    micro_tokens
        Packed tokens of a micro-batch to begin with; halved whenever memory runs out.
    kept_blocks
        Number of blocks whose activations packed passes keep for backward; None keeps all.

    Returns
    -------
    output
        The losses and statistics of the step.
    micro_tokens
        Of a micro-batch in the attempt that fitted.
    """
    scale: TrainScale = run.scale
    counting = loss_mask(part.rollout, mask_truncated=run.arm.loss.mask_truncated)

    def planned(tokens: int) -> Plan:
        return plan_step(
            part.rollout.rows,
            part.index,
            part.rollout.advantages.values,
            counting,
            run.arm.loss,
            micro_tokens=tokens,
            micro_batch_rows=scale.micro_batch_rows,
            length_limit=scale.rollout.max_new_tokens,
            ranks=ranks.world,
        )

    def attempt(tokens: int) -> StepOutput:
        # After running out of memory, activations are recomputed rather than kept.
        kept = kept_blocks if tokens == micro_tokens else 0
        return carry_out(policy, part, planned(tokens), run, counting, kept, ranks)

    output, fitting = within_memory(
        attempt,
        micro_tokens,
        pieces=lambda tokens: planned(tokens).pieces,
        parameters=parameters.values(),
        ranks=ranks,
    )
    return _of_all(output, ranks), fitting


def carry_out(
    policy: Policy,
    part: StepInputs,
    plan: Plan,
    run: RunConfig,
    counting: Tensor,
    kept_blocks: int | None,
    ranks: Ranks,
) -> StepOutput:
    """Run a plan's forward and backward passes; see `accumulate_step`.

    `counting`: (B, T) bool, the tokens that the loss counts.
    """
    rows, temperature = part.rollout.rows, run.rollout.temperature
    results: list[LossResult] = [_NOTHING] * len(plan.micro_batches)
    passed = []
    sizes = rows.packed_tokens()
    for number in ranks.mine([int(sizes[index].sum()) for index, _ in plan.micro_batches]):
        index, counts = plan.micro_batches[number]
        new, entropy = packed_logprobs(
            policy, rows.select(index), temperature, kept_blocks=kept_blocks
        )
        result = loss_of_rows(new, part, index, counting, run.arm.loss, counts)
        result.loss.backward()
        # Detached: the graph would hold the activations of the pass.
        results[number] = dataclasses.replace(result, loss=result.loss.detach())
        passed.append((index, (new.detach(), entropy.detach())))
    _pass_beside(policy, rows, temperature, ranks.beside(len(plan.micro_batches)))
    passed += _evaluated(policy, rows, plan.idle, temperature, ranks)
    ranks.meet("passes")
    # Read here and not earlier, so that the host has not waited for the device in between.
    logprobs, entropies = _written(passed, rows)
    loss = sum(float(result.loss) for result in results)
    return StepOutput(plan=plan, logprobs=logprobs, entropy=entropies, loss=loss, results=results)


# What a micro-batch of another rank gives here.
_NOTHING = LossResult(loss=torch.zeros(()), sums=torch.zeros(len(SUMS), dtype=torch.float64))


def _of_all(output: StepOutput, ranks: Ranks) -> StepOutput:
    """Return a step's output with the results of all ranks, in the plan's order."""
    # Checked here, because rows without advantage contribute no gradient in which it would show.
    bad = (~output.logprobs.isfinite().all(1)).nonzero().flatten().tolist()
    ranks.agree(f"log-probabilities of rows {bad} are not finite" if bad else None)
    if ranks.world == 1:
        return output
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
    part: StepInputs,
    index: Tensor,
    counting: Tensor,
    config: LossConfig,
    counts: StepCounts,
) -> LossResult:
    """Return the loss of some of a step's rows; see `policy_loss`.

    `logprobs`, (b, T') float, with gradient, on any device, are of rows `index`, (b,), the longest
    of which has T' tokens; `counting`, (B, T), is of the whole rollout.
    """
    width = logprobs.shape[1]

    def beside(values: Tensor) -> Tensor:
        return sent(values[index, :width], logprobs.device)

    return policy_loss(
        logprobs,
        sent(part.rollout.advantages.values[index], logprobs.device),
        beside(counting),
        config,
        counts,
        old_logprobs=None if part.old is None else beside(part.old),
        sampled_logprobs=beside(part.rollout.rows.sampled_logprobs),
        ref_logprobs=None if part.reference is None else beside(part.reference),
    )


def evaluate_rows(
    policy: Policy,
    rows: Rows,
    index: Tensor,
    temperature: float,
    *,
    micro_tokens: int,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, int]:
    """Return log-probabilities of rows `index`, (B, T), no gradient; 0 in the other rows.

    With several ranks each evaluates its share of the rows and receives the values of all. Beside
    them stand the packed tokens per pass that fitted in memory, `micro_tokens` or fewer.

    Raises `torch.OutOfMemoryError` when a single row does not fit.
    """

    def pieces(micro_tokens: int) -> list[Tensor]:
        return split_by_tokens(rows, index, micro_tokens, multiple=ranks.world)

    def attempt(micro_tokens: int) -> list[Passed]:
        return _evaluated(policy, rows, pieces(micro_tokens), temperature, ranks)

    passed, fitting = within_memory(attempt, micro_tokens, pieces=pieces, ranks=ranks)
    logprobs, _ = _written(passed, rows)
    ranks.add(logprobs, of="log-probabilities")
    return logprobs, fitting


# Rows of a pass, and their log-probabilities and entropies, (b, T') both, where they were made.
Passed = tuple[Tensor, tuple[Tensor, Tensor]]


def _evaluated(
    policy: Policy, rows: Rows, pieces: Sequence[Tensor], temperature: float, ranks: Ranks
) -> list[Passed]:
    """Run the forward passes of this rank's share of pieces without gradient."""
    sizes = rows.packed_tokens()
    own = [pieces[n] for n in ranks.mine([int(sizes[piece].sum()) for piece in pieces])]
    with torch.no_grad():
        passed = [
            (piece, packed_logprobs(policy, rows.select(piece), temperature)) for piece in own
        ]
        _pass_beside(policy, rows, temperature, ranks.beside(len(pieces)))
    return passed


def _pass_beside(policy: Policy, rows: Rows, temperature: float, count: int) -> None:
    """Make `count` passes that add nothing: ranks that gather weights must make equally many."""
    for _ in range(count):
        first = rows.select(torch.zeros(1, dtype=torch.int64))
        logprobs, _ = packed_logprobs(policy, first, temperature)
        if logprobs.requires_grad:
            (0 * logprobs.sum()).backward()


def _written(passed: Sequence[Passed], rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and entropies of passes as (B, T) on the CPU, 0 elsewhere."""
    into = torch.zeros(rows.mask.shape), torch.zeros(rows.mask.shape)
    for index, values in passed:
        for target, value in zip(into, values, strict=True):
            target[index, : value.shape[1]] = value.to(target)
    return into


def zero_missing_gradients(parameters: dict[str, nn.Parameter]) -> None:
    """Set missing gradients to zero, so that the optimiser does not skip these parameters."""
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def step_metrics(
    rollout: Rollout, index: Tensor, output: StepOutput
) -> dict[str, float | int | None]:
    """Return the metrics of one optimiser step over its own rows, `index` (b,)."""
    mask, truncated = rollout.rows.mask[index], rollout.rows.truncated[index]
    graded = [rollout.graded[row] for row in index.tolist()]
    each = [result.sums for result in output.results] or [torch.zeros(len(SUMS))]
    sums = dict(zip(SUMS, torch.stack(each).sum(0).tolist(), strict=True))
    tokens = sums["tokens"]

    def share(name: str) -> float:
        return sums[name] / tokens if tokens else 0.0

    metrics: dict[str, float | int | None] = {
        "reward": mean_of([one.reward for one in graded]),
        "accuracy": mean_of([one.accuracy for one in graded]),
        "format": mean_of([one.format for one in graded]),
        "completion_tokens": float(mask.sum(1).double().mean()) if graded else None,
        "truncation_rate": float(truncated.double().mean()) if graded else None,
        "loss": output.loss,
        "clip_fraction_low": share("clipped_low"),
        "clip_fraction_high": share("clipped_high"),
        "ratio": share("ratio") if tokens else None,
        "kl": share("kl"),
        "importance_weight": share("weight") if tokens else None,
    }
    return metrics | entropies(output.entropy[index], mask, truncated)


@contextmanager
def exchanged(parameters: dict[str, nn.Parameter], others: dict[str, Tensor]) -> Iterator[None]:
    """Exchange the values of LoRA factors, norms or whole weights with `others` inside a block."""
    _exchange(parameters, others)
    try:
        yield
    finally:
        _exchange(parameters, others)


@torch.no_grad()
def _exchange(parameters: dict[str, nn.Parameter], others: dict[str, Tensor]) -> None:
    """Exchange values in place; of what ranks divide, each exchanges its own part."""
    for name, parameter in parameters.items():
        held = parameter.clone()
        parameter.copy_(others[name])
        others[name].copy_(held)
