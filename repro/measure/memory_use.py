"""Peak memory of one run: of the device where there is one in use, else of this process.

A worker process carries out one run after another, so its lifetime peak would charge a run with
its predecessor's; Linux lets the high-water mark be reset. Where it cannot be, the figure is an
upper bound.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Begin a new measurement."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")  # "5" resets the peak resident size: man 5 proc


def peak_bytes() -> int:
    """Return the peak since `reset_peak`, in bytes."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return int(torch.cuda.max_memory_reserved())
    return host_peak_bytes()


def host_peak_bytes() -> int:
    """Return this process's peak resident bytes since `reset_peak`."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def driver_bytes() -> int:
    """Return the device memory in use as the driver sees it, of all processes together."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def context_bytes() -> int:
    """Return what is in use on the device beyond the allocator's reserve."""
    return driver_bytes() - int(torch.cuda.memory_reserved())
