"""Find the fastest `Choice` for the linear layers of Qwen2.5, without and with an adapter.

    python -m kernels.tune OUT.json

Times every candidate on random codes with cold caches (`kernels.timing`; weights and adapters
rotate together), for the fused layers of the 7B and 32B blocks and a set of row counts, and writes
the winners as a table for `kernels/tuned/`: `entries` for layers without an adapter, `adapted` for
few rows with an adapter of rank 32 in the same launch. Needs a Hopper GPU and a few minutes; first
all candidates are compiled, on all processors. Only NVFP4 is timed: the other formats read the same
bytes in the same shapes.

The best shape with an adapter differs from that without one, because computing z takes warps and
registers. So the two have different candidates.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import timing, tuning
from kernels.cuda import compiler, driver, fused_adapter, hopper, linear
from kernels.cuda.compiler import CompileError
from kernels.cuda.fused_adapter import Join, Joining
from kernels.cuda.hopper import Adapter, Choice
from kernels.formats import random_weight
from kernels.op import Arguments, rotated
from kernels.packing import PACK_BYTES, PACK_COLUMNS, PACK_ROWS, PackedWeight, pack

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
# Of fused projections: the first output channel of each projection but the first.
ENDS = {
    ("7b", "qkv"): (3584, 4096),
    ("7b", "gate_up"): (18944,),
    ("32b", "qkv"): (5120, 6144),
    ("32b", "gate_up"): (27648,),
}
RANK = 32
ADAPTED_ROWS = (1, 8, 16)
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# warps, row tiles, ahead, resident, prefetch
_EIGHT = (
    (14, 1, 0, 2, False), (10, 1, 0, 3, False), (10, 1, 0, 4, False), (5, 1, 0, 6, False),
    (8, 1, 0, 4, False), (4, 1, 0, 8, False), (7, 1, 0, 0, True), (5, 1, 0, 0, True),
)  # fmt: skip
_SIXTEEN = (
    (14, 1, 4, 2, False), (14, 1, 0, 2, False), (8, 1, 4, 0, False), (10, 1, 0, 3, False),
    (14, 2, 0, 0, False), (5, 2, 0, 0, False), (8, 2, 0, 0, False), (4, 2, 0, 0, False),
    (5, 1, 0, 0, True), (8, 1, 0, 4, False),
)  # fmt: skip


def random_packed(N: int, K: int, format: str, seed: int) -> PackedWeight:
    """Return a packed weight of random codes and scales."""
    return pack(random_weight(format, N, K, torch.Generator("cuda").manual_seed(seed)))


def random_adapter(N: int, K: int, rank: int, ends: tuple[int, ...]) -> Adapter:
    """Return a random adapter of an (N, K) weight, whose projections end at `ends`."""
    a = torch.randn(rank * (len(ends) + 1), K, device="cuda") * 0.02
    b = torch.randn(N, rank, device="cuda") * 0.02
    return Adapter(a=a.bfloat16(), b=b.bfloat16(), ends=ends)


def alone(N: int, K: int, M: int, processors: int) -> Iterator[Choice]:
    """Yield the candidates for y (M, N) = x (M, K) W^T on a number of multiprocessors."""
    if M <= 32:
        for warps in (4, 5, 7, 8, 10, 14):
            for row_tiles in (1,) if M <= 8 or M > 16 else (1, 2):
                for ahead in (0, 1, 2, 4) if M <= 16 else (0, 1):
                    for prefetch in (False, True) if row_tiles == 1 else (False,):
                        yield Choice(
                            path="narrow", warps=warps, row_tiles=row_tiles, ahead=ahead,
                            prefetch=prefetch,
                        )  # fmt: skip
        # More resident warps with fewer registers each.
        for warps in (4, 5, 7, 8, 10, 14) if M <= 16 else ():
            for resident_warps in (32, 40, 48):
                for ahead in (0, 1):
                    yield Choice(
                        path="narrow", warps=warps, ahead=ahead, resident=resident_warps // warps
                    )
        for warps in (4, 5, 7, 8) if 8 < M <= 16 else ():
            for ahead in (0, 1):
                yield Choice(
                    path="narrow", warps=warps, row_tiles=2, ahead=ahead, resident=20 // warps
                )
    if M >= 16:
        yield from _wide_candidates(N, K, M, processors)
    if M >= 128:
        yield Choice(path="dense")


def _wide_candidates(N: int, K: int, M: int, processors: int) -> Iterator[Choice]:
    packs = -(-K // PACK_COLUMNS)
    for tokens in (32, 64, 128, 256):
        if tokens < min(M, 128) or tokens > max(32, 2 * M):
            continue
        for consumers, row_tiles in ((2, 1), (2, 2), (3, 1), (3, 2)):
            registers = tokens * row_tiles
            if registers > 256 or (consumers == 3 and registers > 128):
                continue
            shape = Choice(path="wide", consumers=consumers, row_tiles=row_tiles, tokens=tokens)
            yield shape
            if M <= 512:
                yield dataclasses.replace(shape, whole=False)
            tiles = -(-N // (consumers * row_tiles * 64)) * -(-M // tokens)
            for cluster in range(2, min(8, packs) + 1):
                waves = tiles * cluster / processors
                if waves <= 1 or (waves <= 3 and waves % 1 >= 0.75):
                    yield dataclasses.replace(shape, cluster=cluster)


def with_adapter(M: int) -> Iterator[tuple[Choice, Joining]]:
    """Yield the candidates for M rows, up to 16, with the adapter in the same launch."""
    ways: tuple[tuple[Join, int], ...]
    if M <= 8:
        ways = (("staged", 2), ("staged", 4), ("late", 4), ("extra", 4))
    else:
        ways = (("staged", 1), ("staged", 2), ("late", 2))
    for warps, row_tiles, ahead, resident, prefetch in _EIGHT if M <= 8 else _SIXTEEN:
        choice = Choice(
            path="narrow", warps=warps, row_tiles=row_tiles, ahead=ahead, resident=resident,
            prefetch=prefetch,
        )  # fmt: skip
        for join, parts in ways:
            yield choice, Joining(join=join, parts=parts)


# A candidate: with a `Joining` where an adapter shares the launch.
Way = tuple[Choice, Joining | None]
Build = tuple[tuple[str, ...], dict[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """One entry of a part of the table: y (M, N) = x (M, K) W^T, in `adapted` with an adapter."""

    part: str
    M: int
    N: int
    K: int
    ends: tuple[int, ...]

    def ways(self, processors: int) -> Iterator[Way]:
        """Yield the candidates."""
        if self.part == "adapted":
            yield from with_adapter(self.M)
        else:
            for choice in alone(self.N, self.K, self.M, processors):
                yield choice, None


def all_entries() -> list[TableEntry]:
    """Return the entries of a table, layer by layer."""
    return [
        TableEntry(part=part, M=M, N=N, K=K, ends=ENDS.get((block, name), ()))
        for block, layers in LAYERS.items()
        for name, (N, K) in layers.items()
        for part, counts in (("entries", ROWS), ("adapted", ADAPTED_ROWS))
        for M in counts
    ]


def builds(entry: TableEntry, processors: int) -> Iterator[Build]:
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


def compile_ahead(entries: Sequence[TableEntry], processors: int, architecture: str) -> int:
    """Compile all candidates of the entries into the cache; return the number of builds.

    Candidates that cannot be compiled are skipped; timing them reports the error.
    """
    unique = {
        (files, tuple(sorted(macros.items())))
        for entry in entries
        for files, macros in builds(entry, processors)
    }
    # The children compile on the host and never use the device, so they may be forked.
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
        return lambda: linear.dense_linear(x, weight, None, out)
    run = hopper.narrow if choice.path == "narrow" else hopper.wide
    return lambda: run(x, weight, None, out, choice)


@lru_cache(maxsize=1)
def _layer(N: int, K: int, ends: tuple[int, ...]) -> list[Arguments]:
    """Return copies of a layer's weight and adapter that together are larger than the L2 cache."""
    return rotated((random_packed(N, K, "nvfp4", 0), random_adapter(N, K, RANK, ends)))


def fastest(entry: TableEntry, processors: int, replays: int = 7) -> tuple[Way, float]:
    """Return the fastest candidate for an entry and its microseconds.

    Raises `RuntimeError` if no candidate runs.
    """
    x = torch.randn(entry.M, entry.K, device="cuda").bfloat16()
    out = torch.empty(entry.M, entry.N, dtype=torch.bfloat16, device="cuda")
    times: dict[Way, float] = {}
    for way in entry.ways(processors):
        layer = _layer(entry.N, entry.K, entry.ends)
        calls = [_call(x, weight, adapter, out, way) for weight, adapter in layer]
        try:
            times[way] = timing.time_calls(calls, replays)
        except (CompileError, RuntimeError) as error:
            sys.stderr.write(f"{way}: {str(error).splitlines()[0]}\n")
    if not times:
        raise RuntimeError(f"no candidate runs for {entry}")
    way = min(times, key=lambda one: times[one])
    return way, times[way]


def entry_of(entry: TableEntry, way: Way) -> dict[str, Any]:
    """Return a table entry: the values that differ from the defaults; always join and parts."""
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


def main(out: Path) -> None:
    """Time all entries and write the table."""
    import triton

    table: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": "python -m kernels.tune",
        "entries": [],
        "adapted": [],
    }
    entries = all_entries()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    count = compile_ahead(entries, processors, driver.architecture(0))
    sys.stdout.write(f"compiled {count} kernels\n")
    for number, entry in enumerate(entries, start=1):
        way, taken = fastest(entry, processors)
        found = entry_of(entry, way)
        table[entry.part].append(found)
        sys.stdout.write(f"{number}/{len(entries)} {entry.part}: {taken:.2f} us {found}\n")
    for part in ("entries", "adapted"):
        table[part].sort(key=lambda entry: (entry["N"] * entry["K"], entry["N"], entry["M"]))
    if out.is_file():  # what was chosen by timing whole steps, with a tool of 38b89bc
        table["in_steps"] = json.loads(out.read_text(encoding="utf-8")).get("in_steps", [])
    tuning.write(table, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m kernels.tune")
    parser.add_argument("out", metavar="OUT.json", type=Path, help="the table")
    main(parser.parse_args().out)
