"""Decode steps captured once a width and replayed: the host's part of a step becomes one call.

A captured step is everything from the embedding to the rows' next tokens, on tensors that stay
where they are. Widths are captured when they are first needed. Captures share one memory pool;
what they add is measured, and when it exceeds the budget, the captures used least recently are
dropped.

Easy to get wrong: a warm-up run (which compiles kernels and makes workspaces, neither of which may
happen under capture) would move the rows on. While it runs, and while the capture runs, all rows
are marked as not running. Workspaces are kept a stream, so warm-up and capture use the same one.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from repro.rollout.backend import EagerSteps
from repro.rollout.forward import Forward
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig

Key = tuple[int, bool, int, float, float]


@dataclass(slots=True, eq=False)
class _Capture:
    graph: Any
    nbytes: int


class CapturedSteps:
    """Runs steps from captures.

    Parameters
    ----------
    budget_bytes
        Most device memory that captures may add.

    Attributes
    ----------
    captured
        How many captures were made.
    """

    def __init__(self, forward: Forward, state: RowState, budget_bytes: int) -> None:
        self._run = EagerSteps(forward, state)
        self._state = state
        self._budget = budget_bytes
        self._captures: OrderedDict[Key, _Capture] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(state.device)
        self.captured = 0

    def __call__(self, width: int, sampling: SamplingConfig) -> None:
        """Run the step over slots 0 to width - 1."""
        key = _key(width, sampling)
        capture = self._captures.get(key)
        if capture is None:
            capture = self._captures[key] = self._capture(width, sampling)
            self._drop_beyond_budget()
        self._captures.move_to_end(key)
        capture.graph.replay()

    def close(self) -> None:
        """Drop all captures and the memory they hold."""
        self._captures.clear()
        torch.cuda.empty_cache()

    def _capture(self, width: int, sampling: SamplingConfig) -> _Capture:
        positions = self._state.positions
        kept = positions.clone()
        positions.fill_(-1)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._run(width, sampling)
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            self._run(width, sampling)
        self.captured += 1
        positions.copy_(kept)
        return _Capture(graph=graph, nbytes=max(0, torch.cuda.memory_reserved() - before))

    def _drop_beyond_budget(self) -> None:
        # The newest stays, whatever it takes: without it the step could not run.
        while len(self._captures) > 1 and self.nbytes > self._budget:
            self._captures.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """Device memory that the present captures added."""
        return sum(capture.nbytes for capture in self._captures.values())


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream on which steps are captured.

    Kernels and cuBLAS keep a workspace a stream: with a stream of its own, each engine would leave
    one behind.
    """
    return torch.cuda.Stream(device)


def _key(width: int, sampling: SamplingConfig) -> Key:
    greedy = sampling.temperature == 0
    if greedy:
        return (width, True, 0, 1.0, 0.0)
    return (width, False, sampling.top_k, sampling.top_p, sampling.min_p)
