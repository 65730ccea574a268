"""Groups of completions of S runs as rectangular tensors, and back.

A micro-batch takes U groups of each run: their prompts (S, U, Tp), padded on the left, and their
completions (S, U, G, Tc), padded on the right. Prompts go forward once for their G completions. A
run with fewer groups than U gets empty ones, whose tokens nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.rl.rows import Rows
from repro.rl.stacked.forward import aligned


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A micro-batch, and where its counting tokens are.

    Attributes
    ----------
    prompt_ids : Tensor, (S, U, Tp), int64
    padding : Tensor, (S, U), int64
        Columns on the left of each prompt that hold nothing; Tp for an empty group.
    token_ids : Tensor, (S, U, G, Tc), int64
        Completions without their last token.
    select : Tensor, (n,), int64
        Counting tokens, run by run: index into (S, U, G, 1 + Tc) flattened, of the position that
        predicts the token.
    targets : Tensor, (n,), int64
        The tokens themselves.
    rows
        One tensor per run: rows of its rollout in the micro-batch, (u * G,) int64.
    counts
        One number per run: its counting tokens.
    """

    prompt_ids: Tensor
    padding: Tensor
    token_ids: Tensor
    select: Tensor
    targets: Tensor
    rows: list[Tensor]
    counts: list[int]

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on a device (`rows` stay on the CPU)."""
        return Batch(
            prompt_ids=self.prompt_ids.to(device, non_blocking=True),
            padding=self.padding.to(device, non_blocking=True),
            token_ids=self.token_ids.to(device, non_blocking=True),
            select=self.select.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            rows=self.rows,
            counts=self.counts,
        )


def make_batch(rows: Sequence[Rows | None], groups: Sequence[Sequence[int]], size: int) -> Batch:
    """Build a micro-batch.

    Parameters
    ----------
    rows
        One rollout per run, in groups of `size`; None where a run takes no part.
    groups
        One list per run: the groups that it brings, by number.
    size
        G.
    """
    S, U = len(rows), max(len(own) for own in groups)
    present = [(s, run, groups[s]) for s, run in enumerate(rows) if run is not None and groups[s]]
    index = [torch.zeros(0, dtype=torch.long) for _ in rows]
    for s, _, own in present:
        first = torch.tensor(own).unsqueeze(1) * size  # (u, 1)
        index[s] = (first + torch.arange(size)).flatten()  # (u * G,)
    prompt_width = aligned(max(len(run.prompts[g]) for _, run, own in present for g in own))
    longest = max(int(run.mask[index[s]].sum(1).max()) for s, run, _ in present)
    width = aligned(max(longest - 1, 1))
    prompt_ids = torch.zeros(S, U, prompt_width, dtype=torch.long)
    padding = torch.full((S, U), prompt_width, dtype=torch.long)
    token_ids = torch.zeros(S, U * size, width, dtype=torch.long)
    select, targets, counts = [], [], [0] * S
    for s, run, own in present:
        for u, group in enumerate(own):
            prompt = run.prompts[group]
            prompt_ids[s, u, prompt_width - len(prompt) :] = torch.tensor(prompt)
            padding[s, u] = prompt_width - len(prompt)
        ids, mask = run.token_ids[index[s]], run.mask[index[s]]  # (u * G, T) each
        columns = min(ids.shape[1], width)
        token_ids[s, : len(ids), :columns] = ids[:, :columns]
        row, column = mask.nonzero(as_tuple=True)  # (tokens,) each
        select.append((s * U * size + row) * (1 + width) + column)
        targets.append(ids[mask])
        counts[s] = len(row)
    return Batch(
        prompt_ids=prompt_ids,
        padding=padding,
        token_ids=token_ids.view(S, U, size, width),
        select=torch.cat(select),
        targets=torch.cat(targets),
        rows=index,
        counts=counts,
    )
