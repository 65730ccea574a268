"""Tiers: how much hardware a run asks for, and what its result may then be said to show.

A target is the same sentence at every tier; only the scale differs. A tier speaks for itself alone:
the report gives it a column of its own and never merges two into one tick.

Nothing here imports torch, so that listing, planning and checking stay quick. The driver library is
asked through ctypes; a machine without it simply has no CUDA device.

`REPRO_DEVICE_MEMORY=24GB` limits every CUDA device to so many bytes: several runs can share a card,
and a large card can stand for a smaller one. Records name the variable.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import math
import os
import platform
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from repro.spec.checks import require, unknown
from repro.spec.hub import is_whole, snapshots

GIB = 2**30
MEMORY_VARIABLE = "REPRO_DEVICE_MEMORY"
_UNITS = {"gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20, "": 1}

# CUdevice_attribute numbers of the CUDA driver interface.
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """One CUDA device, with its (major, minor) compute capability, as the driver reports it.

    `memory_bytes` is what this process may use (`usable_bytes`).
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int


class Tier(Enum):
    """How large a run is. The value is the name used in paths and on the command line."""

    SMOKE = "smoke"
    SYSTEMS = "systems"
    MINI = "mini"
    PAPER = "paper"

    @property
    def needs(self) -> str:
        """What a machine must have."""
        return _NEEDS[self]

    @property
    def meaning(self) -> str:
        """What a pass at this tier says, and so what it does not."""
        return _MEANING[self]

    def missing(self) -> str | None:
        """Return a sentence naming what this machine lacks for the tier, or None.

        Hardware only: what would have to be downloaded is the plan's business.
        """
        if self is Tier.SMOKE:
            return None
        devices = cuda_devices()
        if not devices:
            return f"{_NEED}; found none"
        newest = max(devices, key=lambda device: (device.capability, device.memory_bytes))
        if newest.capability < (8, 0):
            return f"{_NEED}; found {newest.name} with {'.'.join(map(str, newest.capability))}"
        if newest.memory_bytes < _MINIMUM_BYTES:
            return (
                f"needs {_MINIMUM_BYTES / GIB:.0f} GiB of device memory; {newest.name} has "
                f"{newest.memory_bytes * 10 // GIB / 10} GiB"
            )
        return None


_NEEDS = {
    Tier.SMOKE: "2 CPU cores; no GPU, no network",
    Tier.SYSTEMS: "one CUDA device of compute capability 8.0 or newer; no network",
    Tier.MINI: "Qwen2.5-0.5B or 1.5B-Instruct and GSM8K (hub or a local folder), one CUDA device "
    "of 24 GB",
    Tier.PAPER: "the real checkpoints and data sets (hub or a local folder), one or more CUDA "
    "devices",
}

_MEANING = {
    Tier.SMOKE: "the whole mechanism runs end to end on a tiny policy, and its exact properties "
    "hold; nothing about the paper's models",
    Tier.SYSTEMS: "time and memory on the real shapes with random weights, device named",
    Tier.MINI: "the direction of the paper's contrast, on its data and the smallest checkpoints "
    "of its family, with seeds and intervals",
    Tier.PAPER: "the paper's own number, on the paper's checkpoints and data",
}

# What a run needs depends on its shapes and format: the memory plan says so per run, and leaves out
# the points that do not fit (`repro.run.preflight`). Cards sold as 24 GB report 22.0 to 23.7 GiB,
# those of 8 GB 7.7 GiB.
_MINIMUM_BYTES = 7 * GIB
_NEED = "needs a CUDA device of compute capability 8.0 or newer"
# Tiers whose runs load published checkpoints.
REAL_CHECKPOINTS = (Tier.MINI, Tier.PAPER)
# Tiers at which an analysis plan is fixed before the runs, and a run that fails is a result.
PLANNED = (Tier.MINI,)
# Seeds that the smoke tier plans, and the fewest that its claims are decided on. They are about the
# machinery alone, of gains of 33 to 43 points where seeds differ by 1 to 2: an interval of three
# seeds has 4.3 standard errors to either side, of five 2.8.
SMOKE_SEEDS = 3


def require_linux() -> None:
    """Raise `ValueError` where runs cannot be carried out: their locks and signals are Linux's."""
    system = platform.system()
    require(system == "Linux", f"runs need Linux (on Windows: WSL 2); this is {system}")


def parse_tier(name: str) -> Tier:
    """Return the tier called `name`; `ValueError` lists the tiers otherwise."""
    try:
        return Tier(name)
    except ValueError:
        raise ValueError(unknown("tier", [tier.value for tier in Tier], name)) from None


@functools.cache
def cuda_devices() -> tuple[CudaDevice, ...]:
    """Return the CUDA devices that this process may use; empty without a driver."""
    usable_bytes(0)  # a limit that cannot be read is refused on any machine
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return ()
    if driver.cuInit(0) != 0:
        return ()
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_describe(driver, index) for index in range(count.value))


def _describe(driver: ctypes.CDLL, index: int) -> CudaDevice:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    memory = ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    return CudaDevice(
        name=name.value.decode(errors="replace"),
        capability=(major.value, minor.value),
        memory_bytes=usable_bytes(memory.value),
    )


def host_bytes() -> int:
    """Return the RAM that this process may use: the machine's, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """Something of `nbytes` on disk that a run fetches from the hub unless it is there already.

    Its kind is `model` or `dataset`, as the hub's cache names its folders; its name `owner/name`.
    """

    kind: str
    name: str
    nbytes: int

    def present(self) -> bool:
        """Whether the hub's cache on this machine holds it (or a local folder of that name is)."""
        if Path(self.name).is_dir():
            return True
        folders = snapshots(self.kind, self.name)
        return any(map(is_whole, folders)) if self.kind == "model" else bool(folders)


def parse_bytes(text: str, name: str) -> int:
    """Return the bytes of `80GB`, `40 GiB` or a plain number; `ValueError` for anything else.

    `name` is what the error calls the value, a flag or a variable.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise ValueError(f"{name} {text}: needs a size such as 80GB or 40GiB")
    nbytes = float(match[1]) * _UNITS[match[2]]
    require(2**20 <= nbytes < math.inf, f"{name} {text}: needs 1 MiB or more, such as 24GB")
    return int(nbytes)


def usable_bytes(total: int) -> int:
    """Return how many of a device's `total` bytes this process may use."""
    limit = os.environ.get(MEMORY_VARIABLE)
    return min(total, parse_bytes(limit, MEMORY_VARIABLE)) if limit else total
