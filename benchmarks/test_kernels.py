"""Time every row of `kernels.ops.OPS`: `pytest benchmarks/ --benchmark-only`.

A row's name says what is timed: `test_operation[linear_nvfp4-kernel-cuda]` is the kernel at the
row's large shape of Qwen2.5-7B, with cold caches (`kernels.op.rotated`), captured in a CUDA graph
where it can be; its columns are device time. `test_operation[linear_nvfp4-reference-cpu]` is the
reference in float32 at a small shape, by the host's clock.

Beside a kernel stand `device_microseconds`, its share of the measured copy and matmul rates,
`limit_percent` (the share of the rate that binds) and `ratio_to_bf16`: time of the same operation
in plain bfloat16 PyTorch, in the same session, over the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.device_time import CLOCK, Limits, device_slug, device_type, record_rounds
from kernels import timing
from kernels.op import Arguments, Op, rotated
from kernels.ops import OPS

_ROUNDS = 9
_KIND = "kernel-cuda" if device_type() == "cuda" else "reference-cpu"
ROWS = [pytest.param(op, id=f"{op.name}-{_KIND}") for op in OPS]
_GROUP = "Kernels at the shapes of 7B" if _KIND == "kernel-cuda" else "References at small shapes"
# On a CPU, where a reference takes microseconds to milliseconds, by the host's clock.
_SHORT = {"timer": CLOCK} if device_type() == "cuda" else {"max_time": 0.2, "min_rounds": 9}


def _seconds(op: Op, call: Callable[..., Any], arguments: Arguments) -> Callable[[], float]:
    """Return what makes one round over all sets of arguments and returns the seconds per call."""
    calls = [partial(call, *own) for own in rotated(arguments)]

    def eagerly() -> None:
        for one in calls:
            one()

    work = timing.capture(calls).replay if op.captured else eagerly
    timing.warm_up(work)
    return lambda: timing.seconds_of(work, "cuda") / len(calls)


def _bfloat16_seconds(op: Op, arguments: Arguments) -> float | None:
    """Return the median of plain bfloat16 PyTorch, or None where the operation has no such form."""
    if op.dense is None:
        return None
    function, dense = op.dense(arguments)
    seconds = _seconds(op, function, dense)
    return sorted(seconds() for _ in range(_ROUNDS))[_ROUNDS // 2]


def _kernel(op: Op) -> Callable[..., Any]:
    kernel = op.load()
    return lambda *arguments: op.call(kernel, arguments)


@pytest.mark.benchmark(**_SHORT, group=_GROUP)
@pytest.mark.parametrize("op", ROWS)
@torch.no_grad()
def test_operation(op: Op, limits: Limits | None, benchmark: Any) -> None:
    if limits is None:
        arguments = op.inputs(op.shapes[-1], torch.float32, "cpu", 0)
        benchmark.extra_info["device"] = device_slug()
        benchmark(op.call, op.reference, arguments)
        return
    if op.hopper and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"{op.name} needs a Hopper GPU (compute capability 9.0)")
    arguments = op.inputs(op.large, torch.bfloat16, "cuda", 0)
    plain = _bfloat16_seconds(op, arguments)
    torch.cuda.empty_cache()
    seconds = _seconds(op, _kernel(op), op.prepare(arguments))
    median = record_rounds(benchmark, seconds, rounds=_ROUNDS)
    benchmark.extra_info["device_microseconds"] = 1e6 * median
    benchmark.extra_info |= limits.shares(median, op.nbytes(op.large), op.flops(op.large))
    benchmark.extra_info["waits_for_host"] = not op.captured
    if plain is not None:
        benchmark.extra_info["ratio_to_bf16"] = benchmark.extra_info["ratio"] = plain / median
