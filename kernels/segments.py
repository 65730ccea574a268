"""Where the rows of a packed pass lie: prompts first, each once, then all completions.

Needs no Triton. Built on the host from lengths alone and sent to the device in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Bounds of the sequences that attend to themselves, and of those that also see a prompt.

    Attributes
    ----------
    ends : Tensor, (n + 1,), int32
        0, then the end of every prompt and completion that has tokens.
    longest
        Tokens of the longest of them.
    begin, end
        First token after the prompts, and after the completions.
    seen
        Tokens of the prompts that some completion's tokens see; these prompts come first.
    query_ends, key_ends : Tensor, (groups + 1,), int32
        Of the completions of each such prompt, counted from `begin`, and of the prompts.
    longest_queries, longest_keys
        Tokens of the largest of each.
    """

    ends: Tensor
    longest: int
    begin: int
    end: int
    seen: int
    query_ends: Tensor
    key_ends: Tensor
    longest_queries: int
    longest_keys: int

    @property
    def shared(self) -> bool:
        """Whether any token sees a prompt beside its own row."""
        return self.longest_queries > 0


def sent(values: Tensor, device: torch.device | str) -> Tensor:
    """Return values of the host on a device, without waiting for what the device still does."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    # Copies of pageable memory wait for the device.
    return values.pin_memory().to(device, non_blocking=True)


def segments(
    prompts: Tensor,
    completions: Tensor,
    of_prompt: Tensor,
    device: torch.device | str,
    padding: int = 0,
) -> Segments:
    """Return the segments of a pass.

    Raises `ValueError` when rows are out of that order.

    Parameters
    ----------
    prompts : Tensor, (U,), int64, on the CPU
        Tokens of each prompt; those without completion tokens come last.
    completions : Tensor, (B,), int64
        Tokens of each completion, those of a prompt side by side, in the prompts' order; 0 allowed.
    of_prompt : Tensor, (B,), int64
        Index of each completion's prompt.
    padding
        Tokens behind all others, which attend to themselves.
    """
    queries = torch.zeros_like(prompts).index_add_(0, of_prompt, completions)
    groups = int((queries > 0).sum())
    if bool((of_prompt.diff() < 0).any()) or bool((queries[groups:] > 0).any()):
        raise ValueError(
            "completions must stand in their prompts' order, and prompts without any come last; "
            f"got completions of prompts {of_prompt.tolist()}, {queries.tolist()} tokens each"
        )
    keys = prompts[:groups]
    own = torch.cat([prompts, completions, prompts.new_tensor([padding])])
    own = own[own > 0]
    parts = [functional.pad(part.cumsum(0), (1, 0)) for part in (own, queries[:groups], keys)]
    ends = sent(torch.cat(parts).to(torch.int32), device).split([len(part) for part in parts])
    return Segments(
        ends=ends[0],
        longest=int(own.max()),
        begin=int(prompts.sum()),
        end=int(prompts.sum() + completions.sum()),
        seen=int(keys.sum()),
        query_ends=ends[1],
        key_ends=ends[2],
        longest_queries=int(queries.max()),
        longest_keys=int(keys.max()) if groups else 0,
    )
