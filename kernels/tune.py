"""Find the fastest `Choice` for the linear layers of Qwen2.5, alone and with an adapter.

    python -m kernels.tune OUT.json [ROWS,ROWS,...]

Times every candidate (`kernels.tune_candidates`) on random codes with cold caches
(`kernels.timing`; weights and adapters rotate together), for the fused layers of the 7B and 32B
blocks and a set of row counts, and writes the winners as a table for `kernels/tuned/`: `entries`
for a layer alone, `adapted` for few rows whose adapter, of rank 32, shares the launch. Needs a
Hopper GPU and a few minutes; all candidates are compiled first, on all processors. NVFP4 is
timed; the other formats read the same bytes in the same shapes.

The table is written after each entry, and entries that OUT.json has are not timed again where it
was made on this device by these versions: what was interrupted goes on. To measure again, name
another file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import fused_adapter, hopper, linear, timing, tune_candidates, tuning
from kernels.cuda import compiler, driver
from kernels.cuda.compiler import CompileError
from kernels.fused_adapter import Joining
from kernels.hopper import Adapter, Choice
from kernels.packing import PACK_BYTES, PACK_COLUMNS, PACK_ROWS, PackedWeight

LAYERS = {
    "7b": {
        "qkv": (4608, 3584),
        "o": (3584, 3584),
        "gate_up": (37888, 3584),
        "down": (3584, 18944),
    },
    "32b": {
        "qkv": (7168, 5120),
        "o": (5120, 5120),
        "gate_up": (55296, 5120),
        "down": (5120, 27648),
    },
}
# Projections that share a weight: columns after which the next begins.
ENDS = {
    ("7b", "qkv"): (3584, 4096),
    ("7b", "gate_up"): (18944,),
    ("32b", "qkv"): (5120, 6144),
    ("32b", "gate_up"): (27648,),
}
RANK = 32
ADAPTED_ROWS = (1, 8, 16)
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def random_packed(N: int, K: int, format: str, seed: int) -> PackedWeight:
    """Return a packed weight of random codes and mid-range scales."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    tiles, packs = -(-N // PACK_ROWS), -(-K // PACK_COLUMNS)
    data = torch.randint(
        0, 256, (tiles, packs, PACK_BYTES), dtype=torch.uint8, device="cuda", generator=generator
    )
    if format == "nf4":
        absmax = torch.rand(tiles, packs, 64, device="cuda", generator=generator) * 0.02 + 0.001
        data[:, :, 2048:] = absmax.view(torch.uint8).view(tiles, packs, 256)
    else:
        low, high = (8, 120) if format == "nvfp4" else (240, 254)
        data[:, :, 2048:] = torch.randint(
            low, high, (tiles, packs, 256), dtype=torch.uint8, device="cuda", generator=generator
        )
    # NVFP4's gain holds the kernel's 2**8; MXFP4's must be a power of two.
    gain = {"nvfp4": 256 / 40000, "mxfp4": 2.0**-9, "nf4": 1.0}[format]
    return PackedWeight(
        format=format,
        shape=(N, K),
        packs=data,
        gain=torch.tensor(gain, device="cuda"),
        extras={"encode_scale": torch.tensor(40000.0, device="cuda")},
    )


# A candidate: with a `Joining` where an adapter shares the launch.
Way = tuple[Choice, Joining | None]
Build = tuple[tuple[str, ...], dict[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the table: y (M, N) = x (M, K) W^T, `adapted` or alone."""

    adapted: bool
    M: int
    N: int
    K: int
    ends: tuple[int, ...]

    @property
    def part(self) -> str:
        """The table's part that the entry is of."""
        return "adapted" if self.adapted else "entries"

    def ways(self, processors: int) -> Iterator[Way]:
        """Yield what is worth trying."""
        if self.adapted:
            yield from tune_candidates.with_adapter(self.M)
        else:
            for choice in tune_candidates.alone(self.N, self.K, self.M, processors):
                yield choice, None


def all_entries(rows: Sequence[int] = ROWS) -> list[Entry]:
    """Return the entries of a whole table, layer by layer; of `rows` alone where they are given."""
    return [
        Entry(adapted=adapted, M=M, N=N, K=K, ends=ENDS.get((block, name), ()))
        for block, layers in LAYERS.items()
        for name, (N, K) in layers.items()
        for adapted, counts in ((False, ROWS), (True, ADAPTED_ROWS))
        for M in counts
        if M in rows
    ]


def builds(entry: Entry, processors: int) -> Iterator[Build]:
    """Yield the sources and macros that an entry's candidates are compiled from."""
    packs = torch.empty(
        -(-entry.N // PACK_ROWS), -(-entry.K // PACK_COLUMNS), PACK_BYTES, device="meta",
        dtype=torch.uint8,
    )  # fmt: skip
    weight = PackedWeight(
        format="nvfp4", shape=(entry.N, entry.K), packs=packs, gain=torch.ones(()), extras={}
    )
    for choice, joining in entry.ways(processors):
        if joining is not None:
            macros = fused_adapter.macros(weight, choice, entry.M, RANK, joining)
            yield fused_adapter.FILES, macros
        elif choice.path == "narrow":
            yield hopper.NARROW_FILES, hopper.narrow_macros(weight, choice, entry.M)
        elif choice.path == "wide":
            yield hopper.WIDE_FILES, hopper.wide_macros(weight, choice)


def compile_ahead(entries: Sequence[Entry], processors: int, architecture: str) -> int:
    """Compile what the entries' candidates need into the cache; return how many builds they are.

    What cannot be compiled is left to the candidate itself, which says so.
    """
    unique = {
        (files, tuple(sorted(macros.items())))
        for entry in entries
        for files, macros in builds(entry, processors)
    }
    # The children compile on the host alone: a context of the device is of no use to them.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        list(pool.map(partial(_compile, architecture), sorted(unique)))
    return len(unique)


def _compile(architecture: str, build: tuple[tuple[str, ...], tuple[tuple[str, int], ...]]) -> None:
    files, macros = build
    try:
        compiler.build(files, dict(macros), architecture)
    except CompileError:
        return


def _call(
    x: Tensor, weight: PackedWeight, adapter: Adapter | None, out: Tensor, way: Way
) -> Callable[[], object]:
    """Return a call of one candidate."""
    choice, joining = way
    if joining is not None and adapter is not None:
        return lambda: fused_adapter.narrow(x, weight, None, out, choice, adapter, joining)
    if choice.path == "dense":
        return lambda: linear.dense_linear(x, weight, None, out, None)
    run = hopper.narrow if choice.path == "narrow" else hopper.wide
    return lambda: run(x, weight, None, out, choice)


class Layers:
    """Copies of the weights and adapters of one layer at a time, which together outgrow the L2."""

    def __init__(self) -> None:
        self._of: tuple[int, int] | None = None
        self.weights: list[PackedWeight] = []
        self.adapters: list[Adapter] = []

    def take(self, entry: Entry) -> None:
        """Make those of an entry's layer, unless they are at hand."""
        if self._of == (entry.N, entry.K):
            return
        self._of, self.weights, self.adapters = (entry.N, entry.K), [], []
        torch.cuda.empty_cache()
        base = random_packed(entry.N, entry.K, "nvfp4", 0)
        count = timing.copies(base.packs.nbytes)
        self.weights = [dataclasses.replace(base, packs=base.packs.clone()) for _ in range(count)]
        rows = RANK * (len(entry.ends) + 1)
        self.adapters = [
            Adapter(
                a=(torch.randn(rows, entry.K, device="cuda") * 0.02).bfloat16(),
                b=(torch.randn(entry.N, RANK, device="cuda") * 0.02).bfloat16(),
                ends=entry.ends,
            )
            for _ in range(count)
        ]


def fastest(entry: Entry, layers: Layers, replays: int) -> tuple[Way, float]:
    """Return the fastest candidate for an entry and its microseconds.

    Raises
    ------
    RuntimeError
        When no candidate runs.
    """
    layers.take(entry)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    x = torch.randn(entry.M, entry.K, device="cuda").bfloat16()
    out = torch.empty(entry.M, entry.N, dtype=torch.bfloat16, device="cuda")
    times: dict[Way, float] = {}
    for way in entry.ways(processors):
        calls = [
            _call(x, weight, adapter, out, way)
            for weight, adapter in zip(layers.weights, layers.adapters, strict=True)
        ]
        try:
            times[way] = timing.time_calls(calls, replays).median
        except (CompileError, RuntimeError) as error:
            sys.stderr.write(f"{way}: {str(error).splitlines()[0]}\n")
    if not times:
        raise RuntimeError(f"no candidate runs for {entry}")
    way = min(times, key=lambda one: times[one])
    return way, times[way]


def entry_of(entry: Entry, way: Way) -> dict[str, Any]:
    """Return a table entry: what is not as by default; the join and its parts always."""
    choice, joining = way
    defaults = Choice(path="narrow")
    changed = {
        key: value
        for key, value in dataclasses.asdict(choice).items()
        if key != "path" and value != getattr(defaults, key)
    }
    head = {"N": entry.N, "K": entry.K, "M": entry.M}
    if joining is None:
        return {**head, "path": choice.path, **changed}
    return {**head, **changed, **dataclasses.asdict(joining)}


class Table:
    """The table as it grows, on disk after each entry.

    Parameters
    ----------
    out
        An earlier table there is gone on with if its `head` is the same; any other is refused.
    head
        Device, versions and command.

    Raises
    ------
    ValueError
        If `out` holds a table of another device or other versions.
    """

    def __init__(self, out: Path, head: dict[str, Any]) -> None:
        self._out, self._head = out, head
        self._parts: dict[str, list[dict[str, Any]]] = {name: [] for name in tuning.PARTS}
        if out.is_file():
            present = json.loads(out.read_text(encoding="utf-8"))
            self._parts = {name: present.pop(name, []) for name in self._parts}
            if present != head:
                raise ValueError(
                    f"{out} is a table of {present}; this is {head}: name another file"
                )

    def has(self, entry: Entry) -> bool:
        """Whether an entry is there."""
        key = (entry.N, entry.K, entry.M)
        return any((e["N"], e["K"], e["M"]) == key for e in self._parts[entry.part])

    def add(self, measured: Entry, way: Way) -> None:
        """Add an entry and write the table."""
        part = self._parts[measured.part]
        part.append(entry_of(measured, way))
        part.sort(key=lambda entry: (entry["N"] * entry["K"], entry["N"], entry["M"]))
        tuning.write(self._head | self._parts, self._out)


def main(out: Path, rows: Sequence[int] = ROWS, replays: int = 7) -> None:
    """Time what the table lacks."""
    import triton

    table = Table(
        out,
        {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "command": "python -m kernels.tune",
        },
    )
    left = [entry for entry in all_entries(rows) if not table.has(entry)]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    began = time.monotonic()
    count = compile_ahead(left, processors, driver.architecture(0))
    sys.stdout.write(f"compiled {count} kernels in {time.monotonic() - began:.0f} s\n")
    layers = Layers()
    for number, entry in enumerate(left, start=1):
        way, taken = fastest(entry, layers, replays)
        table.add(entry, way)
        sys.stdout.write(
            f"{number}/{len(left)}, {time.monotonic() - began:.0f} s: {entry.part} N {entry.N} "
            f"K {entry.K} M {entry.M}: {taken:.2f} us {entry_of(entry, way)}\n"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m kernels.tune")
    parser.add_argument("out", metavar="OUT.json", type=Path, help="the table; gone on with")
    parser.add_argument("rows", metavar="ROWS,ROWS,...", nargs="?")
    args = parser.parse_args()
    main(args.out, [int(part) for part in args.rows.split(",")] if args.rows else ROWS)
