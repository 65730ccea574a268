"""Sizes of memory: how they are written, and the part of a device that a process may use.

`REPRO_DEVICE_MEMORY=24GB` limits every CUDA device to so many bytes: several runs can share a
card, and a large card can stand for a smaller one. Records name the variable.
"""

from __future__ import annotations

import os
import re

MEMORY_VARIABLE = "REPRO_DEVICE_MEMORY"
_UNITS = {"gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20, "": 1}


def parse_bytes(text: str, name: str) -> int:
    """Return the bytes of `80GB`, `40 GiB` or a plain number; `ValueError` for anything else.

    `name` is what the error calls the value, a flag or a variable.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise ValueError(f"{name} {text}: needs a size such as 80GB or 40GiB")
    nbytes = int(float(match[1]) * _UNITS[match[2]])
    if nbytes <= 0:
        raise ValueError(f"{name} {text}: needs more than nothing")
    return nbytes


def usable_bytes(total: int) -> int:
    """Return how many of a device's `total` bytes this process may use."""
    limit = os.environ.get(MEMORY_VARIABLE)
    return min(total, parse_bytes(limit, MEMORY_VARIABLE)) if limit else total
