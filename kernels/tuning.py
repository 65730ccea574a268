"""The choice of kernel and shape for a linear layer, from a committed table per device.

`kernels/tuned/<device>.json` holds, for a set of (N, K) and M, the fastest `Choice` that
`python -m kernels.tune` found on that device, and the versions used. `adapted` layers have their
adapter in the same launch. `in_steps` are adapted layers that were chosen by the time of a whole
decode step (`38b89bc` has the tool); they apply only to exactly these sizes, and to ranks up to the
entry's. Nothing is searched at run time: other shapes take the entry of the nearest size, and a
device without a table takes the H200's, with a warning.

Easy to get wrong: an entry for M serves all M down to the next smaller entry, not the nearest M,
because a narrow kernel covers at most 32 rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kernels.cuda.fused_adapter import Joining
from kernels.cuda.hopper import Choice

FOLDER = Path(__file__).parent / "tuned"
FALLBACK = "nvidia-h200"
PARTS = ("entries", "adapted", "in_steps")
Entry = dict[str, Any]


def device_slug(name: str) -> str:
    """Return a device's name as a file's: "NVIDIA H200" gives "nvidia-h200"."""
    return "-".join(name.lower().split())


@lru_cache(maxsize=8)
def stored_table(device: int) -> dict[str, Any]:
    """Return the contents of a CUDA device's table."""
    slug = device_slug(torch.cuda.get_device_name(device))
    path = FOLDER / f"{slug}.json"
    if not path.is_file():
        warnings.warn(
            f"no tuned table for {slug}; the {FALLBACK} one is used (python -m kernels.tune)",
            stacklevel=2,
        )
        path = FOLDER / f"{FALLBACK}.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def write(table: Mapping[str, Any], out: Path) -> None:
    """Write a table: device and versions, then the parts with one line per entry."""
    head = {key: value for key, value in table.items() if key not in PARTS}
    parts = []
    for name in (name for name in PARTS if name in table):
        lines = ",\n".join("  " + json.dumps(row) for row in table[name])
        parts.append(f'"{name}": [\n{lines}\n]')
    fresh = out.with_suffix(".tmp")
    fresh.write_text(json.dumps(head)[:-1] + ", " + ", ".join(parts) + "}\n", encoding="utf-8")
    os.replace(fresh, out)


def _made(kind: type[Any], entry: Entry) -> Any:
    fields = {f.name for f in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in entry.items() if key in fields})


Way = tuple[Choice, Joining]


def way_of(entry: Entry) -> Way:
    """Return the choice and the joining of an entry of a layer with an adapter."""
    return _made(Choice, {"path": "narrow"} | entry), _made(Joining, entry)


@lru_cache(maxsize=24)
def part_of(device: int, part: str) -> dict[tuple[int, int], dict[int, Entry]]:
    """Return {(N, K): {M: entry}} for a part of a CUDA device's table."""
    known: dict[tuple[int, int], dict[int, Entry]] = {}
    for entry in stored_table(device).get(part, ()):
        known.setdefault((entry["N"], entry["K"]), {})[entry["M"]] = entry
    return known


def _nearest(device: int, part: str, N: int, K: int, M: int) -> Entry:
    def distance(shape: tuple[int, int]) -> float:
        return abs(math.log(shape[0] / N)) + abs(math.log(shape[1] / K))

    known = part_of(device, part)
    by_rows = known[min(known, key=distance)]
    at_least = [rows for rows in by_rows if rows >= M]
    return by_rows[min(at_least)] if at_least else by_rows[max(by_rows)]


@lru_cache(maxsize=4096)
def choose_adapted(device: int, N: int, K: int, M: int, rank: int, steps: bool = True) -> Way:
    """Return choice and joining for x (M, K) W^T with its adapter in one launch, M up to 16.

    With `steps`, a choice by the time of whole decode steps, which ran NVFP4, comes first.
    """
    in_steps = part_of(device, "in_steps").get((N, K), {}) if steps else {}
    at_least = [rows for rows in in_steps if rows >= M]
    if at_least:
        entry = in_steps[min(at_least)]
        if rank <= entry["rank"]:
            return way_of(entry)
    return way_of(_nearest(device, "adapted", N, K, M))


@lru_cache(maxsize=4096)
def choose(device: int, N: int, K: int, M: int) -> Choice:
    """Return the choice for y (M, N) = x (M, K) W^T."""
    choice: Choice = _made(Choice, _nearest(device, "entries", N, K, M))
    if choice.path == "narrow" and M > 32:
        raise ValueError(f"the tuned table gives the narrow kernel for {M} rows; it takes 32")
    return choice
