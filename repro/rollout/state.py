"""What the device knows of the running rows, in tensors that stay where they are.

A decode step reads and writes these tensors in place, so that it can be captured once and replayed
without the host: it takes each row's current token and position, and leaves the next ones. The host
looks at `status` now and then.

A row that has ended, or a slot that holds none, has position -1: it still takes part in every
product, but writes no key, no token and no count.

Easy to get wrong: the host must not hand a slot's blocks to another row while steps that were
launched for the old row may still write to them. Steps, copies and new rows all go through one
stream, in order; and the old row's position is -1 from the step at which it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.reference_step import FAULTY, FULL, RUNNING, STOPPED, advance
from repro.rollout.blocks import SCRAP

# Tokens that can end a row.
MAX_ENDS = 8

__all__ = [
    "FAULTY", "FULL", "MAX_ENDS", "RUNNING", "STOPPED", "Entry", "RowState", "Statistics",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row that enters a slot: its last token, and that one's position.

    `count` tokens were generated before; the row ends at `limit`, with a float64 number of
    `uniforms` for each.
    """

    slot: int
    token: int
    position: int
    count: int
    limit: int
    uniforms: Tensor


class RowState:
    """Per-slot tensors of `slots` rows.

    Attributes
    ----------
    tokens : Tensor, (R,), int64
        The token that the next step feeds.
    positions : Tensor, (R,), int32
        Its position; -1 where no row runs.
    counts, limits : Tensor, (R,), int32
        Tokens generated, and the number at which the row ends.
    status : Tensor, (R,), int32
        RUNNING, STOPPED (end token), FULL (limit) or FAULTY (logits not finite).
    uniforms : Tensor, (R, T), float64
    out_tokens : Tensor, (R, T), int32
    out_logprobs : Tensor, (R, T), float32
    table : Tensor, (R, max_blocks), int32
        Block numbers of each row.
    ends : Tensor, (MAX_ENDS,), int64
        End tokens, filled up with -1.
    temperature : Tensor, (), float32
    """

    def __init__(
        self, slots: int, *, max_new_tokens: int, max_blocks: int, device: torch.device
    ) -> None:
        self.device = device
        shape = (slots, max_new_tokens)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.positions = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(slots, dtype=torch.int32, device=device)
        self.limits = torch.zeros(slots, dtype=torch.int32, device=device)
        self.status = torch.zeros(slots, dtype=torch.int32, device=device)
        self.uniforms = torch.zeros(shape, dtype=torch.float64, device=device)
        self.out_tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self.out_logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.table = torch.full((slots, max_blocks), SCRAP, dtype=torch.int32, device=device)
        self.ends = torch.full((MAX_ENDS,), -1, dtype=torch.int64, device=device)
        self.temperature = torch.ones((), dtype=torch.float32, device=device)
        self._host_table = np.full((slots, max_blocks), SCRAP, dtype=np.int32)

    def _per_slot(self) -> tuple[Tensor, ...]:
        return (
            self.tokens,
            self.positions,
            self.counts,
            self.limits,
            self.status,
            self.uniforms,
            self.out_tokens,
            self.out_logprobs,
        )

    def push(self, values: Tensor) -> Tensor:
        """Return host values on the device, without waiting for the copy."""
        if self.device.type != "cuda":
            return values
        return values.pin_memory().to(self.device, non_blocking=True)

    def begin(self, ends: Sequence[int], temperature: float) -> None:
        """Set, in place, what holds for a whole rollout."""
        if len(ends) > MAX_ENDS:
            raise ValueError(f"{len(ends)} end tokens; the engine takes up to {MAX_ENDS}")
        filled = [*ends, *[-1] * (MAX_ENDS - len(ends))]
        self.ends.copy_(self.push(torch.tensor(filled, dtype=torch.int64)))
        if temperature > 0:
            self.temperature.fill_(temperature)

    def set_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        """Note a slot's blocks, to be sent by `send_table`."""
        self._host_table[slot, : len(blocks)] = blocks
        self._host_table[slot, len(blocks) :] = SCRAP

    def send_table(self) -> None:
        """Send all slots' blocks to the device."""
        self.table.copy_(self.push(torch.from_numpy(self._host_table.copy())), non_blocking=True)

    def enter(self, entries: Sequence[Entry]) -> None:
        """Put rows into their slots."""
        numbers = [[e.slot, e.token, e.position, e.count, e.limit] for e in entries]
        packed = self.push(torch.tensor(numbers, dtype=torch.int64))
        slots = packed[:, 0]
        self.tokens[slots] = packed[:, 1]
        self.positions[slots] = packed[:, 2].int()
        self.counts[slots] = packed[:, 3].int()
        self.limits[slots] = packed[:, 4].int()
        self.status[slots] = RUNNING
        width = self.uniforms.shape[1]
        uniforms = torch.zeros(len(entries), width, dtype=torch.float64)
        for row, entry in zip(uniforms, entries, strict=True):
            row[: len(entry.uniforms)] = entry.uniforms
        self.uniforms[slots] = self.push(uniforms)

    def leave(self, slots: Sequence[int]) -> None:
        """Empty slots."""
        for slot in slots:
            self.set_blocks(slot, [])
        self.positions[self.push(torch.tensor(slots, dtype=torch.int64))] = -1

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move rows from slots to empty slots; blocks are moved by `set_blocks`."""
        pairs = self.push(torch.tensor(moves, dtype=torch.int64))
        source, target = pairs[:, 0], pairs[:, 1]
        for tensor in self._per_slot():
            tensor[target] = tensor[source]
        self.positions[source] = -1

    def advance(self, ids: Tensor, logprobs: Tensor, faulty: Tensor) -> None:
        """Take one token per slot, for the first b slots; see `kernels.reference_step.advance`.

        Parameters
        ----------
        ids : Tensor, (b,), int64
        logprobs : Tensor, (b,), float32
        faulty : Tensor, (b,), bool
            Rows whose logits were not finite: they stop as they are, with no token taken.
        """
        advance(
            ids,
            logprobs,
            faulty,
            tokens=self.tokens,
            positions=self.positions,
            counts=self.counts,
            limits=self.limits,
            status=self.status,
            out_tokens=self.out_tokens,
            out_logprobs=self.out_logprobs,
            ends=self.ends,
        )


@dataclass(slots=True)
class Statistics:
    """What one rollout did, as counts."""

    prefill_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
