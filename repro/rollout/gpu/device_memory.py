"""Memory of a CUDA device as a run may use it: all of the card, or less to stand for a smaller.

`REPRO_MEMORY_GB=24` emulates a card of 24 GB in memory alone: the allocator refuses more, and what
is planned, the cache among it, fits the limit. Kernels and speed stay the card's own; with
`REPRO_KERNELS=portable` the kernels are those of other cards.
"""

from __future__ import annotations

import torch

from repro.models.memory_plan import CONTEXT_BYTES
from repro.spec.tier import memory_limit


def whole_memory(device: torch.device | int | None = None) -> int:
    """Return the bytes of the device, or the limit."""
    total = int(torch.cuda.mem_get_info(device)[1])
    return min(total, memory_limit() or total)


def free_memory(device: torch.device | int | None = None) -> int:
    """Return the bytes of the device, or of the limit, that nobody uses; 0 at least."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, whole_memory(device) - (total - free))


def limit_allocator(nbytes: int | None = None, context: int = 0) -> None:
    """Let this process's allocator take so many bytes less the driver's context.

    A context grows as kernels are loaded, so a young process leaves room for a full-grown one.
    None stands for all that the limit leaves, the whole device where there is none.
    """
    total, whole = int(torch.cuda.mem_get_info()[1]), whole_memory()
    if nbytes is None and whole == total:
        torch.cuda.set_per_process_memory_fraction(1.0)
        return
    left = min(nbytes or whole, whole) - max(context, CONTEXT_BYTES)
    torch.cuda.set_per_process_memory_fraction(min(1.0, left / total))
