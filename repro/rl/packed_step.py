"""A step's rows in packed passes: micro-batches of at most so many tokens, fewer when memory ends.

Normalisers belong to the step, so the cut changes memory and nothing else. That is why running out
of memory is not the end: the gradients are cleared and the step starts over with half the tokens.

Easy to get wrong: out of memory in the middle of backward leaves gradients of some layers already
added; going on from the micro-batch that failed would count them twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import dispatch
from repro.models.policy import Policy
from repro.rl.logprobs import Head
from repro.rl.loss import LossResult, StepCounts, policy_loss
from repro.rl.packed import packed_logprobs
from repro.rl.rows import Rows
from repro.spec.config import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedStep:
    """What one step's forward and backward passes came to.

    Attributes
    ----------
    logprobs : Tensor, (B, T), float32, on the CPU
    loss
        Of the step.
    results
        One a micro-batch.
    micro_tokens
        Tokens of a micro-batch with which it went through.
    fallbacks
        Tokens with which it ran out of memory before, from the first try on.
    """

    logprobs: Tensor
    loss: float
    results: list[LossResult]
    micro_tokens: int
    fallbacks: list[int]


def split_rows(rows: Rows, micro_tokens: int) -> list[Tensor]:
    """Cut rows, in their order, into micro-batches of at most `micro_tokens` packed tokens.

    A row longer than that stands alone.
    """
    counts = rows.lengths().tolist()
    sizes = [
        len(rows.prompts[prompt]) + count - 1
        for prompt, count in zip(rows.prompt_of_row.tolist(), counts, strict=True)
    ]
    batches: list[list[int]] = []
    room = 0
    for row, size in enumerate(sizes):
        if not batches or size > room:
            batches.append([])
            room = micro_tokens
        batches[-1].append(row)
        room -= size
    return [torch.tensor(batch) for batch in batches]


def evaluate_packed(
    policy: Policy,
    rows: Rows,
    temperature: float,
    *,
    micro_tokens: int,
    head: Head = dispatch.token_logprobs,
    fallbacks: list[int] | None = None,
) -> Tensor:
    """Return (B, T) float32 log-probabilities on the CPU, without gradient.

    Whenever memory runs out the tokens of a micro-batch are halved; `fallbacks` takes down the
    sizes that were too large.

    Raises
    ------
    torch.OutOfMemoryError
        When a single row does not fit.
    """
    while True:
        batches = split_rows(rows, micro_tokens)
        try:
            return _evaluate(policy, rows, temperature, batches, head)
        except torch.OutOfMemoryError:
            if all(len(batch) == 1 for batch in batches):
                raise
        if fallbacks is not None:
            fallbacks.append(micro_tokens)
        micro_tokens //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _evaluate(
    policy: Policy, rows: Rows, temperature: float, batches: Sequence[Tensor], head: Head
) -> Tensor:
    found = torch.zeros(rows.mask.shape)
    parts = []
    with torch.no_grad():
        for index in batches:
            values = packed_logprobs(policy, rows.select(index), temperature, head=head)[0]
            parts.append((index, values))
    for index, values in parts:
        found[index, : values.shape[1]] = values.float().cpu()
    return found


def accumulate_packed(
    policy: Policy,
    rows: Rows,
    advantages: Tensor,
    config: LossConfig,
    temperature: float,
    *,
    length_limit: int,
    micro_tokens: int,
    old_logprobs: Tensor | None = None,
    checkpointing: bool = True,
    head: Head = dispatch.token_logprobs,
) -> PackedStep:
    """Run a step's forward and backward passes; gradients are left in the parameters.

    Parameters
    ----------
    advantages : Tensor, (B,)
    config
        The objective, without KL term.
    length_limit
        Tokens; the constant of `constant` aggregation.
    micro_tokens
        Tokens of a micro-batch to begin with; halved whenever memory runs out.
    old_logprobs : Tensor or None, (B, T)
        The ratio's denominator; None makes the ratio exactly 1.

    Raises
    ------
    ValueError
        When the objective's value depends on the cut, or a gradient is there already.
    torch.OutOfMemoryError
        When a single row does not fit.
    """
    if config.aggregation == "token_mean_local" or config.beta:
        raise ValueError(
            f"loss {config.name} has aggregation {config.aggregation} and beta {config.beta}; "
            "packed steps need normalisers of the whole step and no KL term"
        )
    held = [p for p in policy.model.parameters() if p.requires_grad]
    if any(parameter.grad is not None for parameter in held):
        raise ValueError("a parameter has a gradient already; a packed step starts from none")
    fallbacks: list[int] = []
    while True:
        batches = split_rows(rows, micro_tokens)
        try:
            logprobs, loss, results = _accumulate(
                policy, rows, advantages, config, temperature, batches,
                length_limit=length_limit, old_logprobs=old_logprobs,
                checkpointing=checkpointing, head=head,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            for parameter in held:
                parameter.grad = None
            if all(len(batch) == 1 for batch in batches):
                raise
            fallbacks.append(micro_tokens)
            micro_tokens //= 2
        else:
            return PackedStep(
                logprobs=logprobs,
                loss=loss,
                results=results,
                micro_tokens=micro_tokens,
                fallbacks=fallbacks,
            )
        # Outside the handler: its exception holds the frames, and so the tensors, that failed.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _accumulate(
    policy: Policy,
    rows: Rows,
    advantages: Tensor,
    config: LossConfig,
    temperature: float,
    batches: Sequence[Tensor],
    *,
    length_limit: int,
    old_logprobs: Tensor | None,
    checkpointing: bool,
    head: Head,
) -> tuple[Tensor, float, list[LossResult]]:
    counts = StepCounts(
        rows=len(rows),
        tokens=int(rows.mask.sum()),
        length_limit=length_limit,
        micro_batches=len(batches),
    )
    logprobs, losses, results = torch.zeros(rows.mask.shape), [], []
    for index in batches:
        part = rows.select(index)
        width = part.mask.shape[1]
        new, _ = packed_logprobs(policy, part, temperature, checkpointing=checkpointing, head=head)
        beside = {
            name: None if values is None else values[index, :width].to(new.device)
            for name, values in (("old", old_logprobs), ("sampled", rows.sampled_logprobs))
        }
        result = policy_loss(
            new,
            advantages[index].to(new.device),
            part.mask.to(new.device),
            config,
            counts,
            old_logprobs=beside["old"],
            sampled_logprobs=beside["sampled"],
        )
        result.loss.backward()
        losses.append(float(result.loss.detach()))
        results.append(result)
        logprobs[index, :width] = new.detach().float().cpu()
    return logprobs, sum(losses), results
