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
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from kernels.reference_step import RUNNING, StepRows
from kernels.segments import sent
from repro.rollout.blocks import SCRAP
from repro.rollout.draw import uniforms
from repro.rollout.scheduler import Row

# Tokens that can end a row.
MAX_ENDS = 8
_PER_SLOT = [each.name for each in fields(StepRows) if each.name not in ("ends", "temperature")]


class RowState(StepRows):
    """Per-slot tensors of `slots` rows: what a step moves on, and the rows' blocks.

    `table`, (R, max_blocks), int32, has the block numbers of each row; `ends`, (MAX_ENDS,), int64,
    has the end tokens, filled up with -1.
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

    def begin(self, ends: Sequence[int], temperature: float) -> None:
        """Set, in place, what holds for a whole rollout."""
        if len(ends) > MAX_ENDS:
            raise ValueError(f"{len(ends)} end tokens; the engine takes up to {MAX_ENDS}")
        filled = [*ends, *[-1] * (MAX_ENDS - len(ends))]
        self.ends.copy_(sent(torch.tensor(filled, dtype=torch.int64), self.device))
        if temperature > 0:
            self.temperature.fill_(temperature)

    def set_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        """Note a slot's blocks, to be sent by `send_table`."""
        self._host_table[slot, : len(blocks)] = blocks
        self._host_table[slot, len(blocks) :] = SCRAP

    def send_table(self) -> None:
        """Send all slots' blocks to the device."""
        self.table.copy_(
            sent(torch.from_numpy(self._host_table.copy()), self.device), non_blocking=True
        )

    def enter(self, rows: Sequence[Row]) -> None:
        """Put rows into their slots: the last token of each is the first to be fed."""
        numbers = [
            [row.slot, row.sequence[-1], len(row.sequence) - 1, len(row.tokens), row.limit]
            for row in rows
        ]
        packed = sent(torch.tensor(numbers, dtype=torch.int64), self.device)
        slots = packed[:, 0]
        self.tokens[slots] = packed[:, 1]
        self.positions[slots] = packed[:, 2].int()
        self.counts[slots] = packed[:, 3].int()
        self.limits[slots] = packed[:, 4].int()
        self.status[slots] = RUNNING
        drawn = torch.zeros(len(rows), self.uniforms.shape[1], dtype=torch.float64)
        for own, row in zip(drawn, rows, strict=True):
            own[: row.limit] = uniforms([row.seed], row.limit)[0]
        self.uniforms[slots] = sent(drawn, self.device)

    def leave(self, slots: Sequence[int]) -> None:
        """Empty slots."""
        for slot in slots:
            self.set_blocks(slot, [])
        self.positions[sent(torch.tensor(slots, dtype=torch.int64), self.device)] = -1

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move rows from slots to empty slots; blocks are moved by `set_blocks`."""
        pairs = sent(torch.tensor(moves, dtype=torch.int64), self.device)
        source, target = pairs[:, 0], pairs[:, 1]
        for name in _PER_SLOT:
            tensor: Tensor = getattr(self, name)
            tensor[target] = tensor[source]
        self.positions[source] = -1


@dataclass(slots=True)
class Statistics:
    """What one rollout did, as counts."""

    prefill_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
