"""Find the fastest `Choice` for the linear layers of Qwen2.5.

    python -m kernels.tune OUT.json [ROWS,ROWS,...]

Times every candidate of both Hopper kernels and the dense path on random codes with cold caches
(`kernels.timing`), for the fused layers of the 7B and 32B blocks and a set of row counts, and
writes the winners as a table for `kernels/tuned/`. Needs a Hopper GPU and a few minutes. NVFP4 is
timed; the other formats read the same bytes in the same shapes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import hopper, linear, timing, tuning
from kernels.cuda.compiler import CompileError
from kernels.hopper import Choice
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
        kept={"encode_scale": torch.tensor(40000.0, device="cuda")},
    )


def candidates(N: int, K: int, M: int, processors: int) -> Iterator[Choice]:
    """Yield what is worth trying for a shape."""
    if M <= 32:
        for warps in (4, 5, 7, 8, 10, 14):
            for row_tiles in (1,) if M <= 8 or M > 16 else (1, 2):
                for ahead in (0, 1, 2, 4) if M <= 16 else (0, 1):
                    for prefetch in (False, True) if row_tiles == 1 else (False,):
                        yield Choice(
                            path="narrow", warps=warps, row_tiles=row_tiles, ahead=ahead,
                            prefetch=prefetch,
                        )  # fmt: skip
        # More warps at once by fewer registers each.
        for warps in (4, 5, 7, 8, 10, 14) if M <= 16 else ():
            for wanted in (32, 40, 48):
                for ahead in (0, 1):
                    yield Choice(path="narrow", warps=warps, ahead=ahead, resident=wanted // warps)
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


def _call(x: Tensor, weight: PackedWeight, out: Tensor, choice: Choice) -> Callable[[], None]:
    """Return a call of one choice."""
    if choice.path == "dense":
        return lambda: linear.dense_linear(x, weight, None, out, None)
    run = hopper.narrow if choice.path == "narrow" else hopper.wide
    return lambda: run(x, weight, None, out, choice)


def best(N: int, K: int, M: int, replays: int) -> tuple[Choice, float]:
    """Return the fastest choice for a shape and its microseconds."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    base = random_packed(N, K, "nvfp4", 0)
    weights = [
        dataclasses.replace(base, packs=base.packs.clone())
        for _ in range(timing.copies(base.packs.nbytes))
    ]
    x = torch.randn(M, K, device="cuda").bfloat16()
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    found: tuple[Choice, float] | None = None
    for choice in candidates(N, K, M, processors):
        try:
            taken = timing.time_calls([_call(x, w, out, choice) for w in weights], replays).median
        except (CompileError, RuntimeError) as error:
            sys.stderr.write(f"{choice}: {str(error).splitlines()[0]}\n")
            continue
        if found is None or taken < found[1]:
            found = (choice, taken)
    if found is None:
        raise RuntimeError(f"no candidate runs for N {N}, K {K}, M {M}")
    return found


def main(out: Path, rows: tuple[int, ...] = ROWS, replays: int = 5) -> None:
    """Write the table; rows that are not asked for keep their entries of the table there is."""
    import triton

    entries = [
        {"N": N, "K": K, "M": M, **dataclasses.asdict(choice)}
        for (N, K), by_rows in (_present() if rows != ROWS else {}).items()
        for M, choice in by_rows.items()
        if M not in rows
    ]
    for layers in LAYERS.values():
        for N, K in layers.values():
            for M in rows:
                choice, taken = best(N, K, M, replays)
                entries.append({"N": N, "K": K, "M": M, **dataclasses.asdict(choice)})
                sys.stdout.write(f"N {N} K {K} M {M} {taken:.2f} us {choice}\n")
            torch.cuda.empty_cache()
    head = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": "python -m kernels.tune",
    }
    entries.sort(key=lambda entry: (entry["N"] * entry["K"], entry["N"], entry["M"]))
    adapted = tuning.held(torch.cuda.current_device())["adapted"]
    tuning.write(head, [_told(entry) for entry in entries], adapted, out)


def _present() -> dict[tuple[int, int], dict[int, Choice]]:
    return tuning.table(torch.cuda.current_device())


def _told(entry: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is as by default."""
    defaults = Choice(path="narrow")
    return {
        key: value
        for key, value in entry.items()
        if key in ("N", "K", "M", "path") or value != getattr(defaults, key)
    }


if __name__ == "__main__":
    wanted = tuple(int(part) for part in sys.argv[2].split(",")) if len(sys.argv) > 2 else ROWS
    main(Path(sys.argv[1]), wanted)
