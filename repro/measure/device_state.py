"""The state of the device before and after a measurement, and the demand that its memory is free.

A measurement is worth no more than the device was free for it. `device_state` describes the device
in JSON values for the record (`facts["device"]`); `repro.evidence.receipts` refuses a record
whose device was shared, or too hot. `require_clean` runs before a model is loaded, so that memory
in use by others, or left by an earlier model, is found before anything is timed.

    at              seconds since the epoch
    memory          free_bytes, total_bytes of the device; reserved_bytes of this process's
                    allocator, its peak_bytes, and peak_allocated_bytes of tensors
    allocator       retries (it had to give blocks back and ask again), out_of_memory: since the
                    process began
    card            clocks, power, temperature, and which reasons lower the clocks at the moment
    slowed_us       how long each reason has lowered the clocks since the driver was loaded, in
                    microseconds (drivers that count it)
    processes       the others that compute on the device, where they can be told from this one and
                    from the other ranks of its run, whose buffers it may see

A probe that fails is `{"failed": reason}`. Nothing here changes a setting of the card.

Power caps and idling lower the clocks, too: both are normal. The driver's tool lists processes by
the numbers of its own namespace, foreign or hidden in a container: where this process is not among
those listed, nothing says which are others.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import torch

from repro.evidence.environment import ask_driver_tool, probe, steady_now
from repro.evidence.not_run import needs
from repro.spec.tier import GIB

# Left of the allocator's reserve once nothing is referred to: workspaces of kernels and of cuBLAS.
RESERVED_MOST = GIB // 2
# In use outside the reserve: this process's context, 0.82 to 0.85 GiB full-grown on one H200, and
# what NCCL holds where several ranks measure.
OTHER_MOST = 2 * GIB
# The driver takes a moment to take back the memory of a process that has just ended.
_PATIENCE_SECONDS = 10.0

_CARD = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "temperature.gpu",
)
_REASONS = (
    "sw_power_cap",
    "gpu_idle",
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sw_thermal_slowdown",
)
_SLOWED = tuple(name for name in _REASONS if name not in ("gpu_idle", "hw_slowdown"))
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_EXHAUSTED = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_TRIED = re.compile(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}


class DeviceBusyError(RuntimeError):
    """The device's memory is in use, so that nothing can be measured on it."""


def device_state() -> dict[str, Any]:
    """Return the state of this process's CUDA device as JSON values; see the module."""
    # First what makes a context, so that the driver's tool finds this process among the others.
    memory = probe(_memory)
    return {
        "at": steady_now().timestamp(),
        "memory": memory,
        "allocator": probe(_allocator),
        "card": probe(_card),
        "slowed_us": probe(slowed_us),
        "processes": probe(_processes),
    }


def between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the record's account of its device: both states, and the allocator between them."""
    span: dict[str, Any] = {"before": before, "after": after}
    counts = [state["allocator"].get("retries") for state in (before, after)]
    if None not in counts:
        span["retries"] = counts[1] - counts[0]
    span["peak_bytes"] = after["memory"].get("peak_bytes")
    return span


def require_clean() -> None:
    """Return once the device's memory is free, the unused given back; raise if it stays in use.

    cuBLAS's workspaces go as well: nothing multiplies any more, and a workspace of 32 MiB keeps
    the whole segment of the allocator that it lies in (500 MB on an H200).
    """
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:  # a build for CUDA
        clear_workspaces()
    release()
    ends = time.monotonic() + _PATIENCE_SECONDS
    while (other := context_bytes()) > OTHER_MOST and time.monotonic() < ends:
        time.sleep(0.5)
    reserved = torch.cuda.memory_reserved()
    if reserved <= RESERVED_MOST and other <= OTHER_MOST:
        return
    sentence = (
        f"the device's memory is not free: {reserved} bytes are reserved by this process, at most "
        f"{RESERVED_MOST} allowed; {other} are in use besides, at most {OTHER_MOST} allowed"
    )
    raise DeviceBusyError(f"{sentence}; processes: {probe(_processes)}")


def release() -> None:
    """Give back device memory that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def retries() -> int:
    """Return how often the allocator has given blocks back to the driver and asked again."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out, in `error` or in one that it was raised while handling.

    A step that is being captured ends its capture on the way out, which then may fail, too. What
    the driver or cuBLAS allocate for themselves has errors of its own.
    """
    while error is not None:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _EXHAUSTED):
            return True
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False


def needs_by_allocator(error: BaseException) -> str:
    """Return how much memory was needed when it ran out; call it where the error is handled.

    What is in use then, and what was asked for on top where the error has the number.
    """
    free, total = torch.cuda.mem_get_info()
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
        cause = cause.__context__
    tried = _TRIED.search(str(cause))
    more = float(tried[1]) * _UNITS[tried[2]] if tried else 0.0
    # Blocks that were given back on the way out are free again: the request found none of them.
    return needs(total - free + max(more, free), total, "by the allocator, at least")


def _memory() -> dict[str, int]:
    free, total = torch.cuda.mem_get_info()
    return {
        "free_bytes": free,
        "total_bytes": total,
        "reserved_bytes": torch.cuda.memory_reserved(),
        "peak_bytes": torch.cuda.max_memory_reserved(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
    }


def _allocator() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {"retries": retries(), "out_of_memory": int(stats.get("num_ooms", 0))}


def _device() -> str:
    """Return the device as the driver's tool names it, whatever the order of its own list."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _card() -> dict[str, str]:
    """Return clocks and temperatures, and which reasons are active (drivers from 535 on)."""
    prefix = "clocks_event_reasons."
    (row,) = ask_driver_tool([*_CARD, *(prefix + name for name in _REASONS)], device=_device())
    return {name.removeprefix(prefix): value for name, value in row.items()}


def slowed_us() -> dict[str, int]:
    """Return how long each reason has lowered the clocks since the driver was loaded.

    In microseconds, by reason; raises where no driver counts it.
    """
    prefix = "clocks_event_reasons_counters"
    (row,) = ask_driver_tool([f"{prefix}.{name}" for name in _SLOWED], device=_device())
    return {name: int(row[f"{prefix}.{name}"].split()[0]) for name in _SLOWED}


def _processes() -> dict[str, Any]:
    """Return the others that compute on the device, or why they cannot be distinguished."""
    listed = ask_driver_tool(("pid", "used_memory"), device=_device(), about="compute-apps")
    own = str(os.getpid())
    if own not in {row["pid"] for row in listed}:
        return {
            "unknown": f"this process ({own}) is not among those listed, as in a container",
            "listed": listed,
        }
    return {"others": [row for row in listed if row["pid"] != own and not _is_rank(row["pid"])]}


def _is_rank(pid: str) -> bool:
    """Whether a process is another rank of this one's run on this host: a child of its parent."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return False  # it has ended, or another container's process
    return int(after_name[1]) == os.getppid()


def reset_peak() -> None:
    """Begin a new measurement of `peak_bytes`.

    A worker process carries out one run after another, so its lifetime peak would charge a run with
    its predecessor's; Linux lets the high-water mark be reset. Elsewhere it is an upper bound.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")  # "5" resets the peak resident size: man 5 proc


def peak_bytes() -> int:
    """Return the peak since `reset_peak`: of the device if one is in use, else of this process."""
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
