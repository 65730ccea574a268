"""From the device's rows to completions, without the loop waiting for them.

When the host learns that rows have ended, the rows' outputs are copied aside on the device's own
stream, behind the steps that wrote them and before the next row may overwrite them, and from there
to pinned memory. They are read once, when the rollout is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference_step import STOPPED
from kernels.segments import sent
from repro.rollout.sampler import Completion
from repro.rollout.scheduler import Row
from repro.rollout.state import RowState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ended:
    rows: list[Row]
    counts: list[int]
    stopped: list[bool]
    tokens: Tensor
    logprobs: Tensor


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
        self._ended: list[_Ended] = []

    def take(self, rows: Sequence[Row], counts: Sequence[int], status: Sequence[int]) -> None:
        """Copy the outputs of rows that have ended, before they leave their slots."""
        width = max(counts)
        slots = sent(torch.tensor([row.slot for row in rows]), self._state.device)
        self._ended.append(
            _Ended(
                rows=list(rows),
                counts=list(counts),
                stopped=[value == STOPPED for value in status],
                tokens=to_host(self._state.out_tokens[:, :width][slots]),
                logprobs=to_host(self._state.out_logprobs[:, :width][slots]),
            )
        )

    def completions(self) -> list[Completion]:
        """Return all completions in the order of their index; the device must be done."""
        by_index: dict[int, Completion] = {}
        for ended in self._ended:
            zipped = zip(
                ended.rows,
                ended.counts,
                ended.stopped,
                ended.tokens.tolist(),
                ended.logprobs.tolist(),
                strict=True,
            )
            for row, count, stopped, tokens, logprobs in zipped:
                # What a preempted row had before stands on the host alone.
                before = len(row.tokens)
                by_index[row.index] = Completion(
                    token_ids=(*row.tokens, *tokens[before:count]),
                    sampled_logprobs=(*row.logprobs, *logprobs[before:count]),
                    finish_reason="stop" if stopped else "length",
                )
        return [by_index[index] for index in sorted(by_index)]
