"""Time every row of `kernels.ops.OPS`: `pytest benchmarks/ --benchmark-only`.

On a GPU the kernel's device time comes from events over a CUDA graph or around the call
(`kernels.timing`), at Qwen2.5-7B's shapes, and stands beside the benchmark as `device_microseconds`
with the share of the measured copy and matmul rates; pytest-benchmark's own columns are wall time
with a synchronisation. On a CPU the reference is timed at small shapes.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from kernels import timing
from kernels.ops import OPS, Op

_COPY_BYTES = 1 << 30


@functools.lru_cache(maxsize=1)
def _rates() -> tuple[float, float]:
    """Return (bytes a second of a copy, FLOP a second of a bfloat16 product), measured here."""
    source = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = timing.time_eager(lambda: target.copy_(source)).median
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    multiplied = timing.time_eager(lambda: a @ b).median
    return 2 * _COPY_BYTES / copied * 1e6, 2 * 8192**3 / multiplied * 1e6


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_time_of_an_operation(op: Op, device: str, benchmark: Any) -> None:
    if device == "cpu":
        arguments = op.inputs(op.shapes[-1], torch.float32, "cpu", 0)
        benchmark(op.reference, *arguments)
        return
    if op.hopper and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"{op.name} needs a Hopper GPU (compute capability 9.0)")
    prepared = op.prepare(op.inputs(op.large, torch.bfloat16, "cuda", 0))
    kernel = op.load()

    def call() -> None:
        kernel(*prepared)
        torch.cuda.synchronize()

    call()
    taken = timing.time_eager(functools.partial(kernel, *prepared)).median
    copy_rate, matmul_rate = _rates()
    benchmark.extra_info["device_microseconds"] = taken
    benchmark.extra_info["percent_of_copy_rate"] = (
        100 * op.nbytes(op.large) / taken * 1e6 / copy_rate
    )
    benchmark.extra_info["percent_of_matmul_rate"] = (
        100 * op.flops(op.large) / taken * 1e6 / matmul_rate
    )
    benchmark(call)
