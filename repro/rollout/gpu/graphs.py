"""Decode steps captured once and replayed: the host's part becomes one call.

A step is everything from the embedding to the rows' next tokens, on tensors that stay where they
are; there is one capture per width and way of drawing.

Whatever is needed for the first time is run as it is, which compiles kernels and makes workspaces
(neither may happen under capture), and captured after that for the next time. Captures share one
memory pool.

Easy to get wrong: each stream has its own workspace, so the first run and the capture use the same
stream; and captures that share a pool overwrite one another's intermediate results, so they must be
replayed one after another, on one stream, and leave nothing behind but what they write in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from functools import partial

import torch

from repro.rollout.backend import EagerSteps
from repro.rollout.forward import Forward
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig


class Captures:
    """Work captured as CUDA graphs, by key."""

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Replay what was captured under `key`; if nothing was, do `work` and capture it.

        `work` must do the same whenever it has the same key, on tensors that stay where they are.
        """
        if key in self._graphs:
            self._graphs[key].replay()
            return
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        self._graphs[key] = graph

    def clear(self) -> None:
        """Drop all captures and the memory they hold."""
        self._graphs.clear()
        # A pool that lost its last capture takes no new one while anything in it is still held.
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()


class CapturedSteps(EagerSteps):
    """Runs decode steps from captures, one per width and way of drawing."""

    def __init__(self, forward: Forward, state: RowState, captures: Captures) -> None:
        super().__init__(forward, state)
        self._captures = captures

    def __call__(self, width: int, sampling: SamplingConfig) -> None:
        """Run the step over slots 0 to width - 1."""
        self._captures.run(_key(width, sampling), partial(super().__call__, width, sampling))

    def close(self) -> None:
        """Drop all captures and the memory they hold."""
        self._captures.clear()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream on which work is captured.

    Kernels and cuBLAS keep one workspace per stream: with a stream of its own, each engine would
    leave one behind.
    """
    return torch.cuda.Stream(device)


def _key(width: int, sampling: SamplingConfig) -> tuple[int, bool, int, float, float]:
    if sampling.temperature == 0:
        return (width, True, 0, 1.0, 0.0)
    return (width, False, sampling.top_k, sampling.top_p, sampling.min_p)
