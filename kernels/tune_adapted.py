"""Find how few rows and their adapter best share a launch, for the layers of Qwen2.5.

    python -m kernels.tune_adapted OUT.json

Times every candidate at rank 32 on random codes with cold caches (`kernels.timing`; layers and
adapters rotate together) and writes the present table with its part `adapted` replaced. Needs a
Hopper GPU and two minutes. Shapes that read best without an adapter are not the best with one: z
needs warps, and its words registers.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels import fused_adapter, timing, tuning
from kernels.cuda.compiler import CompileError
from kernels.fused_adapter import Join, Joining
from kernels.hopper import Adapter, Choice
from kernels.packing import PackedWeight
from kernels.tune import LAYERS, random_packed

RANK = 32
ROWS = (1, 8, 16)
# Projections that share a weight: columns after which the next begins.
ENDS = {
    ("7b", "qkv"): (3584, 4096),
    ("7b", "gate_up"): (18944,),
    ("32b", "qkv"): (5120, 6144),
    ("32b", "gate_up"): (27648,),
}
# warps, resident, prefetch
_EIGHT = (
    (14, 2, False), (10, 3, False), (10, 4, False), (5, 6, False), (8, 4, False), (4, 8, False),
    (7, 0, True), (5, 0, True),
)  # fmt: skip
# warps, row tiles, ahead, resident, prefetch
_SIXTEEN = (
    (14, 1, 4, 2, False), (14, 1, 0, 2, False), (8, 1, 4, 0, False), (10, 1, 0, 3, False),
    (14, 2, 0, 0, False), (5, 2, 0, 0, False), (8, 2, 0, 0, False), (4, 2, 0, 0, False),
    (5, 1, 0, 0, True), (8, 1, 0, 4, False),
)  # fmt: skip


def candidates(M: int) -> Iterator[tuple[Choice, Joining]]:
    """Yield what is worth trying for M rows, up to 16."""
    ways: tuple[tuple[Join, int], ...]
    if M <= 8:
        ways = (("staged", 2), ("staged", 4), ("late", 4), ("extra", 4))
        shapes = [(warps, 1, 0, resident, prefetch) for warps, resident, prefetch in _EIGHT]
    else:
        ways = (("staged", 1), ("staged", 2), ("late", 2))
        shapes = list(_SIXTEEN)
    for warps, row_tiles, ahead, resident, prefetch in shapes:
        choice = Choice(
            path="narrow", warps=warps, row_tiles=row_tiles, ahead=ahead, resident=resident,
            prefetch=prefetch,
        )  # fmt: skip
        for join, parts in ways:
            yield choice, Joining(join=join, parts=parts)


def _adapters(N: int, K: int, ends: tuple[int, ...], count: int) -> list[Adapter]:
    rows = RANK * (len(ends) + 1)
    return [
        Adapter(
            a=(torch.randn(rows, K, device="cuda") * 0.02).bfloat16(),
            b=(torch.randn(N, RANK, device="cuda") * 0.02).bfloat16(),
            ends=ends,
        )
        for _ in range(count)
    ]


def best(
    weights: list[PackedWeight], adapters: list[Adapter], M: int, replays: int
) -> tuple[Choice, Joining, float]:
    """Return the fastest way for a layer and its microseconds."""
    N, K = weights[0].shape
    x = torch.randn(M, K, device="cuda").bfloat16()
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    found: list[tuple[float, Choice, Joining]] = []
    for choice, joining in candidates(M):
        calls = [
            partial(fused_adapter.narrow, x, weight, None, out, choice, adapter, joining)
            for weight, adapter in zip(weights, adapters, strict=True)
        ]
        try:
            found.append((timing.time_calls(calls, replays).median, choice, joining))
        except (CompileError, RuntimeError) as error:
            sys.stderr.write(f"{choice} {joining}: {str(error).splitlines()[0]}\n")
    if not found:
        raise RuntimeError(f"no candidate runs for N {N}, K {K}, M {M}")
    taken, choice, joining = min(found, key=lambda entry: entry[0])
    return choice, joining, taken


def told(N: int, K: int, M: int, choice: Choice, joining: Joining) -> dict[str, Any]:
    """Return a table entry: what is not as by default, and always the join and the parts."""
    defaults = Choice(path="narrow")
    changed = {
        key: value
        for key, value in dataclasses.asdict(choice).items()
        if value != getattr(defaults, key)
    }
    return {"N": N, "K": K, "M": M, **changed, **dataclasses.asdict(joining)}


def main(out: Path, replays: int = 9) -> None:
    """Time and write."""
    entries = []
    for block, layers in LAYERS.items():
        for name, (N, K) in layers.items():
            base = random_packed(N, K, "nvfp4", 0)
            weights = [
                dataclasses.replace(base, packs=base.packs.clone())
                for _ in range(timing.copies(base.packs.nbytes))
            ]
            adapters = _adapters(N, K, ENDS.get((block, name), ()), len(weights))
            for M in ROWS:
                choice, joining, taken = best(weights, adapters, M, replays)
                entries.append(told(N, K, M, choice, joining))
                sys.stdout.write(f"N {N} K {K} M {M} {taken:.2f} us {choice} {joining}\n")
            del weights, adapters
            torch.cuda.empty_cache()
    entries.sort(key=lambda entry: (entry["N"] * entry["K"], entry["N"], entry["M"]))
    present = tuning.held(torch.cuda.current_device())
    tuning.write(present, present["entries"], entries, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
