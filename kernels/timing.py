"""Device time of a call, by events over a CUDA graph, with cold caches.

The call is captured over several sets of arguments at different addresses, so that together they
are several times the L2 (60 MB on an H200): a repeated call over one set measures the cache. A
replay is timed by two events and divided by the calls in it; the median and the quartiles of the
replays are returned. Replays for 15 ms before them warm up: after an idle spell the clocks rise for
a while, and kernels that are not bound by memory alone look up to 10 % slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# What the rotated sets of arguments should take together, bytes.
ROTATED_BYTES = 340_000_000

_WARM_SECONDS = 0.015


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds of one call: median and quartiles over `replays` replays."""

    median: float
    low: float
    high: float
    replays: int


def copies(nbytes: int) -> int:
    """Return how many sets of arguments of that size outgrow the caches, at least two."""
    return max(2, -(-ROTATED_BYTES // max(1, nbytes)))


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 9) -> Timing:
    """Time calls that differ in their addresses only.

    Parameters
    ----------
    calls
        Captured one after another in one graph.
    replays
        Timed replays of the graph.
    """
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
    until = time.perf_counter() + _WARM_SECONDS
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    taken = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / len(calls))
    taken.sort()
    return Timing(
        median=taken[len(taken) // 2],
        low=taken[len(taken) // 4],
        high=taken[-1 - len(taken) // 4],
        replays=replays,
    )


def time_eager(call: Callable[[], object], replays: int = 9) -> Timing:
    """Time one long call by events round it, after two that warm up; for what outlasts a launch."""
    for _ in range(2):
        call()
    taken = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3)
    taken.sort()
    return Timing(
        median=taken[len(taken) // 2],
        low=taken[len(taken) // 4],
        high=taken[-1 - len(taken) // 4],
        replays=replays,
    )
