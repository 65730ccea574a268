"""From the device's rows to completions, without the loop waiting for them.

When the host learns that rows have ended, the rows' outputs are copied aside on the device's own
stream, behind the steps that wrote them and before the next row may overwrite them, and from there
to pinned memory. They are read once, when the rollout is over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference_step import STOPPED
from kernels.segments import sent
from repro.rollout.sampler import Completion
from repro.rollout.scheduler import Row
from repro.rollout.state import RowState

# A row, the tokens generated of it, and its status.
Ended = tuple[Row, int, int]


def to_host(values: Tensor) -> Tensor:
    """Return `values` on the host; on a GPU the copy may still be under way."""
    if values.device.type != "cuda":
        return values.clone()
    target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return target.copy_(values, non_blocking=True)


class Results:
    """Collects the outputs of ended rows."""

    def __init__(self, state: RowState) -> None:
        self._state = state
        # Rows that ended together, with their tokens and log-probabilities
        self._taken: list[tuple[list[Ended], Tensor, Tensor]] = []

    def take(self, ended: list[Ended]) -> None:
        """Copy the outputs of rows that have ended, before they leave their slots."""
        width = max(count for _, count, _ in ended)
        slots = sent(torch.tensor([row.slot for row, _, _ in ended]), self._state.device)
        outputs = self._state.out_tokens, self._state.out_logprobs
        tokens, logprobs = (to_host(output[:, :width][slots]) for output in outputs)
        self._taken.append((ended, tokens, logprobs))

    def completions(self) -> list[Completion]:
        """Return all completions in the order of their index; the device must be done."""
        by_index: dict[int, Completion] = {}
        for ended, *outputs in self._taken:
            lists = [output.tolist() for output in outputs]
            for (row, count, status), tokens, logprobs in zip(ended, *lists, strict=True):
                # What a preempted row had before stands on the host alone.
                before = len(row.tokens)
                by_index[row.index] = Completion(
                    token_ids=(*row.tokens, *tokens[before:count]),
                    sampled_logprobs=(*row.logprobs, *logprobs[before:count]),
                    finish_reason="stop" if status == STOPPED else "length",
                )
        return [by_index[index] for index in sorted(by_index)]
