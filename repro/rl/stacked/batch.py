"""Groups of completions of S runs as rectangular tensors, and back.

A micro-batch takes U groups of each run: their prompts (S, U, Tp), padded on the left, and their
completions (S, U, G, Tc), padded on the right. Prompts go forward once for their G completions. A
run with fewer groups than U gets empty ones, whose tokens nobody reads.

Which groups go together is a trade (`cut`): what is padded is computed for nothing, and every
micro-batch costs the host as much as some tokens cost the device. Where a few completions are long
and most are short, the long ones' groups go apart and the short ones' together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.rl.rows import Rows
from repro.rl.stacked.stacked_block import aligned

# What a micro-batch costs beside its tokens, in padded tokens of each run. From the profile of a
# step of 60 runs of 30 million parameters on an H200: the host computes losses run by run, about
# 2 ms each, and a token of each run took the device about 2.3 microseconds, there and back.
_BESIDE_TOKENS = 800
# Of a token's time, there and back, the way there.
_FORWARD_SHARE = 1 / 3


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


def padded_tokens(prompt: int, completion: int, size: int) -> int:
    """Return the tokens that a group takes in a batch of a longest prompt and completion."""
    return aligned(prompt) + size * _columns(completion)


def _columns(completion: int) -> int:
    """Return the columns of completions: the last token predicts nothing."""
    return aligned(max(completion - 1, 1))


def group_lengths(rows: Rows, size: int) -> list[int]:
    """Return the longest completion of each group."""
    longest: list[int] = rows.lengths().view(-1, size).amax(1).tolist()  # (P, G) -> (P,)
    return longest


def largest_group(rows: Sequence[Rows | None], size: int) -> int:
    """Return the padded tokens of the largest group, which no cut makes smaller."""
    present = [run for run in rows if run is not None]
    sizes = [
        padded_tokens(len(prompt), longest, size)
        for run in present
        for prompt, longest in zip(run.prompts, group_lengths(run, size), strict=True)
    ]
    return max(sizes, default=1)


def cut(
    rows: Sequence[Rows | None],
    groups: Sequence[Sequence[int]],
    size: int,
    most: int,
    *,
    learning: int = 0,
) -> list[list[list[int]]]:
    """Cut each run's groups, in their order, into micro-batches at the least cost.

    Parameters
    ----------
    rows
        One rollout per run, in groups of `size`; None where a run takes no part.
    groups
        One list per run.
    most
        Padded tokens of each run that a micro-batch may take; a group of more stands alone.
    learning
        How many of the first groups give some run a gradient; a micro-batch with one of them goes
        backward, too, as a whole.

    Returns
    -------
    list
        Of each micro-batch, each run's groups: the n-th of all runs go together.
    """
    places = max((len(own) for own in groups), default=0)
    prompts, completions = [1] * places, [1] * places
    for run, own in zip(rows, groups, strict=True):
        if run is None or not own:
            continue
        lengths = group_lengths(run, size)
        for place, group in enumerate(own):
            prompts[place] = max(prompts[place], len(run.prompts[group]))
            completions[place] = max(completions[place], lengths[group])
    # Of the first so many places: the least cost, and where the last micro-batch begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, places + 1):
        ways, prompt, completion = [], 1, 1
        for begin in range(end - 1, -1, -1):
            prompt, completion = max(prompt, prompts[begin]), max(completion, completions[begin])
            tokens = (end - begin) * padded_tokens(prompt, completion, size)
            if tokens > most and begin < end - 1:
                break
            cost = tokens if begin < learning else tokens * _FORWARD_SHARE
            ways.append((best[begin][0] + cost + _BESIDE_TOKENS, begin))
        best.append(min(ways))
    edges = [places]
    while edges[-1]:
        edges.append(best[edges[-1]][1])
    pieces = itertools.pairwise(reversed(edges))
    return [[list(own[begin:end]) for own in groups] for begin, end in pieces]


def make_batch(
    rows: Sequence[Rows | None],
    groups: Sequence[Sequence[int]],
    size: int,
) -> Batch:
    """Build a micro-batch of the groups that each run brings, by number.

    As for `cut`, `rows` has one rollout per run, in groups of `size`, or None.
    """
    S, U = len(rows), max(len(own) for own in groups)
    present = [(s, run, groups[s]) for s, run in enumerate(rows) if run is not None and groups[s]]
    index = [torch.zeros(0, dtype=torch.long) for _ in rows]
    for s, _, own in present:
        first = torch.tensor(own).unsqueeze(1) * size  # (u, 1)
        index[s] = (first + torch.arange(size)).flatten()  # (u * G,)
    prompt_length = max(len(run.prompts[g]) for _, run, own in present for g in own)
    completion_length = max(int(run.mask[index[s]].sum(1).max()) for s, run, _ in present)
    prompt_width = aligned(prompt_length)
    width = _columns(completion_length)
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
