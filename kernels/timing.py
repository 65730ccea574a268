"""Device time of a call, by events over a CUDA graph, with cold caches.

The call is captured over several sets of arguments at different addresses, so that together they
are several times the L2 (60 MB on an H200): a repeated call over one set measures the cache. A
replay is timed by two events and divided by the calls in it. Replays for 15 ms before them warm up:
after an idle spell the clocks rise for a while, and kernels that are not bound by memory alone look
up to 10 % slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

# What the rotated sets of arguments should take together, bytes.
ROTATED_BYTES = 340_000_000

_WARM_SECONDS = 0.015
_COPY_BYTES = 2 << 30
_MATMUL_READINGS = 4
_REST_SECONDS = 0.25


def copies(nbytes: int) -> int:
    """Return the number of such sets of arguments that outgrow the caches, at least two."""
    return max(2, -(-ROTATED_BYTES // max(1, nbytes)))


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Return the calls captured one after another in one graph; the first two run before, alone."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    return graph


def warm_up(work: Callable[[], object]) -> None:
    """Repeat `work` until the clocks have risen."""
    until = time.perf_counter() + _WARM_SECONDS
    while time.perf_counter() < until:
        work()
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: torch.device | str) -> float:
    """Return the seconds of `work`: between two events on a GPU, by the host's clock elsewhere."""
    if torch.device(device).type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def time_calls(calls: Sequence[Callable[[], object]], replays: int) -> float:
    """Return the microseconds of a call, the median of a graph's replays.

    The calls, captured one after another, differ in their addresses only.
    """
    graph = capture(calls)
    warm_up(graph.replay)
    taken = sorted(seconds_of(graph.replay, "cuda") / len(calls) for _ in range(replays))
    return 1e6 * taken[replays // 2]


def time_eager(call: Callable[[], object], replays: int = 9, share: float = 0.5) -> float:
    """Return the microseconds of one call that outlasts a launch, by events round it.

    Two calls warm up; `share` of the replays are faster.
    """
    for _ in range(2):
        call()
    return 1e6 * sorted(seconds_of(call, "cuda") for _ in range(replays))[int(share * replays)]


def copy_rate() -> float:
    """Return bytes per second of a device copy, read and written both counted."""
    source = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / (time_eager(lambda: target.copy_(source), share=0.25) * 1e-6)


def matmul_rate() -> float:
    """Return FLOP per second of a large bfloat16 product on random data.

    The best of a few readings with rests between them: one that is taken while the card stands at
    its power limit is up to a fifth too low, and other work then looks faster than it can be.
    """
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    readings = []
    for _ in range(_MATMUL_READINGS):
        torch.cuda.synchronize()
        time.sleep(_REST_SECONDS)
        readings.append(time_eager(lambda: a @ b, share=0.25))
    return 2 * 8192**3 / (min(readings) * 1e-6)
