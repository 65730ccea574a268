"""Micro-batches of one optimiser step: rows cut by tokens, and what the step's loss is divided by.

Rows are cut, in their order, into micro-batches of a number of *packed tokens* at most (prompts and
completions end to end, no padding, a prompt once): memory is spent on tokens. The counts that the
loss is divided by are those of the whole step, so the cut changes memory and nothing else.

Rows whose advantage is exactly zero give no gradient. Without a KL term they are left out of the
backward pass, which is exact because they stay in every count; they go forward without gradient,
so entropy and mismatch are those of all rows.

Easy to get wrong: `token_mean_local` divides by the tokens of its own micro-batch of
`micro_batch_rows` rows. That cut is part of the objective; the cut by tokens is made inside it and
changes nothing.
"""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass

from torch import Tensor

from repro.rl.loss import StepCounts
from repro.rl.rows import Rows
from repro.spec.arm import LossConfig


def split_by_tokens(
    rows: Rows, index: Tensor, micro_tokens: int, *, multiple: int = 1
) -> list[Tensor]:
    """Cut rows, in their order, into the fewest pieces of at most `micro_tokens` tokens.

    Pieces are as even as their number allows: a small last one would cost as much as a large one
    does beyond its tokens. A prompt counts once in each piece, as it goes forward once there; a row
    longer than `micro_tokens` stands alone.

    `index` are the rows to cut, (b,) int64. The number of pieces is a multiple of `multiple`, that
    of the ranks that share them, where rows allow.
    """
    prompts = rows.prompt_of_row[index].tolist()
    own = (rows.lengths()[index] - 1).tolist()

    def cut(most: int) -> list[int]:
        """Return the number of rows in each piece of at most so many tokens."""
        counts: list[int] = []
        seen: set[int] = set()
        room = 0
        for prompt, size in zip(prompts, own, strict=True):
            needed = size + (0 if prompt in seen else len(rows.prompts[prompt]))
            if not counts or needed > room:
                counts.append(0)
                needed, room, seen = size + len(rows.prompts[prompt]), most, set()
            counts[-1] += 1
            seen.add(prompt)
            room -= needed
        return counts

    if not len(index):
        return []
    fewest = min(-(-len(cut(micro_tokens)) // multiple) * multiple, len(index))
    # The smallest pieces of which there are no more.
    even = bisect.bisect_left(range(micro_tokens), -fewest, key=lambda most: -len(cut(most)))
    return list(index.split(cut(even if fewest > 1 else micro_tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one optimiser step is carried out.

    The rows of `micro_batches` take part in the backward pass, each with the step's counts; `idle`
    rows give no gradient, and stand in the pieces in which they go forward.
    """

    micro_batches: list[tuple[Tensor, StepCounts]]
    idle: list[Tensor]

    @property
    def pieces(self) -> list[Tensor]:
        """Rows of every pass."""
        return [*(rows for rows, _ in self.micro_batches), *self.idle]


def plan_step(
    rows: Rows,
    index: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: LossConfig,
    *,
    micro_tokens: int,
    micro_batch_rows: int,
    length_limit: int,
    ranks: int = 1,
) -> Plan:
    """Split a step's rows into micro-batches and count what the loss is divided by.

    Parameters
    ----------
    index
        (b,) int64 rows of the step.
    advantages, mask
        (B,), and (B, T) tokens that the loss counts, of the whole rollout.
    micro_batch_rows
        Rows over which `token_mean_local` takes a mean; other objectives do not depend on it.
    length_limit
        Tokens; the constant of `constant` aggregation.
    ranks
        That share the passes.
    """
    tokens_of_row = mask.sum(1)
    gives = tokens_of_row > 0
    if config.beta == 0:
        gives &= advantages != 0
    local = config.aggregation == "token_mean_local"
    # A local mean divides by the tokens of its own rows, idle ones included: those decide this cut.
    chunks = index.split(micro_batch_rows) if local else (index,)
    counts = StepCounts(
        rows=int((tokens_of_row[index] > 0).sum()),
        tokens=int(tokens_of_row[index].sum()),
        length_limit=length_limit,
        micro_batches=len(chunks),
    )
    micro_batches = []
    for chunk in chunks:
        if local:
            counts = dataclasses.replace(counts, local_tokens=int(tokens_of_row[chunk].sum()))
        pieces = split_by_tokens(
            rows, chunk[gives[chunk]], micro_tokens, multiple=1 if local else ranks
        )
        micro_batches += [(piece, counts) for piece in pieces]
    idle = split_by_tokens(rows, index[~gives[index]], micro_tokens, multiple=ranks)
    return Plan(micro_batches=micro_batches, idle=idle)
