r"""Data parallelism for one optimiser step: counts and gradients over processes.

With W processes, each holding part of the rows of a step, the loss divides by counts over *all*
rows, and gradients are added up, not averaged::

    grad = sum_w grad_w,    grad_w = d/dtheta sum_{rows of w} loss / N,    N = sum_w N_w

Easy mistakes: dividing by a process's own count and averaging, which weighs a process with short
completions as much as one with long ones (the mean of ratios is not the ratio of sums); a wrapper
that averages gradients by itself, which then needs the factor W back; counting tokens of the
*rollout* where a step takes a part of it. A process without rows must still take part in every
exchange, with zeros, or the others wait for ever.

Every process must arrive with the same parameters in the same order; order is by name.

Not yet wired to a command: a run trains in one process.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.rl.loss import StepCounts


def share_counts(counts: StepCounts, device: torch.device | str = "cpu") -> StepCounts:
    """Return the counts of the step over all processes; every process must call it.

    Parameters
    ----------
    counts
        Of this process's rows. `local_tokens` stays its own.
    device
        Where the exchange happens; a NCCL group needs a GPU.
    """
    numbers = torch.tensor(
        [counts.rows, counts.tokens, counts.micro_batches], dtype=torch.int64, device=device
    )
    dist.all_reduce(numbers)
    rows, tokens, micro_batches = numbers.tolist()
    return dataclasses.replace(counts, rows=rows, tokens=tokens, micro_batches=micro_batches)


def sum_gradients(parameters: dict[str, nn.Parameter]) -> None:
    """Add up each parameter's gradient over all processes, in place.

    A missing gradient counts as zero. All gradients of a dtype travel as one tensor.

    Raises
    ------
    ValueError
        When there are no parameters.
    """
    if not parameters:
        raise ValueError("there are no parameters; there is no gradient to add up")
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for name in sorted(parameters):
        parameter = parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter)
    for members in by_dtype.values():
        flat = torch.cat([_gradient(member).flatten() for member in members])  # (numbers,)
        dist.all_reduce(flat)
        start = 0
        for member in members:
            gradient = _gradient(member)
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        raise ValueError("a parameter has no gradient")
    return gradient
