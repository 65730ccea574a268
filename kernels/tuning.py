"""Which kernel in which shape serves a linear layer: a checked-in table by device.

`kernels/tuned/<device>.json` holds, for a set of (N, K) and M, the fastest `Choice` that
`python -m kernels.tune` found on that device, with the versions it was found under. Nothing
searches at import or at a first call: a shape that is not in the table takes the entry of the
nearest size, and a device without a table takes the H200's and says so once.

Easy to get wrong: an entry for M serves all M down to the next smaller entry, not the nearest M,
because a narrow kernel covers at most 32 rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from functools import lru_cache
from pathlib import Path

import torch

from kernels.hopper import Choice

FOLDER = Path(__file__).parent / "tuned"
FALLBACK = "nvidia-h200"


def device_slug(name: str) -> str:
    """Return a device's name as a file's: "NVIDIA H200" gives "nvidia-h200"."""
    return "-".join(name.lower().split())


@lru_cache(maxsize=8)
def table(device: int) -> dict[tuple[int, int], dict[int, Choice]]:
    """Return {(N, K): {M: choice}} for a CUDA device."""
    slug = device_slug(torch.cuda.get_device_name(device))
    path = FOLDER / f"{slug}.json"
    if not path.is_file():
        warnings.warn(
            f"no tuned table for {slug}; the {FALLBACK} one is used (python -m kernels.tune)",
            stacklevel=2,
        )
        path = FOLDER / f"{FALLBACK}.json"
    entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
    found: dict[tuple[int, int], dict[int, Choice]] = {}
    for entry in entries:
        fields = {f.name for f in dataclasses.fields(Choice)}
        choice = Choice(**{key: value for key, value in entry.items() if key in fields})
        found.setdefault((entry["N"], entry["K"]), {})[entry["M"]] = choice
    return found


@lru_cache(maxsize=4096)
def choose(device: int, N: int, K: int, M: int) -> Choice:
    """Return the choice for y (M, N) = x (M, K) W^T.

    Parameters
    ----------
    device
        Index of the CUDA device.
    """
    known = table(device)

    def distance(shape: tuple[int, int]) -> float:
        return abs(math.log(shape[0] / N)) + abs(math.log(shape[1] / K))

    by_rows = known[min(known, key=distance)]
    at_least = [rows for rows in by_rows if rows >= M]
    choice = by_rows[min(at_least)] if at_least else by_rows[max(by_rows)]
    if choice.path == "narrow" and M > 32:
        raise ValueError(f"the tuned table gives the narrow kernel for {M} rows; it takes 32")
    return choice
