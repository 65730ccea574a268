"""Decode steps and small prefills captured once and replayed: the host's part becomes one call.

    step      everything from the embedding to the rows' next tokens; one capture per width
    prefill   a chunk of prompts, padded to one of a few sizes; one capture per size

Captured work is done on tensors that stay where they are. A prefill's own numbers (tokens,
positions, slots, tiles, table) are copied into such a place before each replay. What padding there
is writes no key and reads none.

Whatever is needed for the first time is run as it is, which compiles kernels and makes workspaces
(neither may happen under capture), and captured after that for the next time. Captures share one
memory pool; what they add is measured, and when it exceeds the budget, the captures used least
recently are dropped.

A captured prefill gives what an eager one gives on the same padded tokens, to the bit. Against an
eager one without padding it may differ by the rounding of 16-bit products, for which another number
of tokens may take another kernel.

Easy to get wrong: each stream has its own workspace, so the first run and the capture use the same
stream; and captures that share a pool overwrite one another's intermediate results, so they must be
replayed one after another, on one stream, and leave nothing behind but what they write in place.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from repro.rollout.eager import EagerPrefills, EagerSteps
from repro.rollout.forward import Forward
from repro.rollout.ops import NewTokens
from repro.rollout.prefill import ChunkShape, numbers_of, padded_shape, tokens_of
from repro.rollout.scheduler import Segment
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig


@dataclass(slots=True, eq=False)
class _Capture:
    graph: Any
    nbytes: int


class Replays(Protocol):
    """Does something again and again, under a name."""

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Do `work`, or again what was done when `key` was given first."""
        ...

    def clear(self) -> None:
        """Forget all work."""
        ...


class Captures:
    """Work captured as CUDA graphs, by key.

    Parameters
    ----------
    budget_bytes
        Most device memory that captures may add.

    Attributes
    ----------
    captured
        How many captures were made.
    """

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._captures: OrderedDict[Hashable, _Capture] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)
        self.captured = 0

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Replay what was captured under `key`; if nothing was, do `work` and capture it.

        `work` must do the same whenever it has the same key, on tensors that stay where they are.
        """
        capture = self._captures.get(key)
        if capture is None:
            self._captures[key] = self._capture(work)
            self._drop_beyond_budget()
            return
        self._captures.move_to_end(key)
        capture.graph.replay()

    def clear(self) -> None:
        """Drop all captures and the memory they hold."""
        self._captures.clear()
        # A pool that lost its last capture takes no new one while anything in it is still held.
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    def _capture(self, work: Callable[[], object]) -> _Capture:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        # A capture begins with this; done before, it is not taken for memory that was given back.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        self.captured += 1
        return _Capture(graph=graph, nbytes=max(0, torch.cuda.memory_reserved() - before))

    def _drop_beyond_budget(self) -> None:
        # The newest stays, whatever it takes: without it the step could not run.
        while len(self._captures) > 1 and self.nbytes > self._budget:
            self._captures.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """Device memory that the present captures added."""
        return sum(capture.nbytes for capture in self._captures.values())


class CapturedSteps:
    """Runs decode steps from captures, one per width and way of drawing."""

    def __init__(self, forward: Forward, state: RowState, captures: Replays) -> None:
        self._run = EagerSteps(forward, state)
        self._captures = captures

    def __call__(self, width: int, sampling: SamplingConfig) -> None:
        """Run the step over slots 0 to width - 1."""
        self._captures.run(_key(width, sampling), partial(self._run, width, sampling))

    def close(self) -> None:
        """Drop all captures, of prefills too, and the memory they hold."""
        self._captures.clear()


class CapturedPrefills:
    """Runs chunks of a prefill from captures, one per bucket; large ones as they come.

    Parameters
    ----------
    most_tokens
        Largest bucket.
    """

    def __init__(
        self, forward: Forward, state: RowState, captures: Replays, *, most_tokens: int
    ) -> None:
        self._forward, self._state, self._captures = forward, state, captures
        self._eagerly = EagerPrefills(forward, state)
        self._most_tokens = most_tokens
        self._inputs: dict[ChunkShape, tuple[Tensor, Tensor, NewTokens]] = {}

    def __call__(self, segments: Sequence[Segment]) -> int:
        """Run the forward pass; return the tokens of padding."""
        slots, max_blocks = self._state.table.shape
        shape = padded_shape(
            segments, most_tokens=self._most_tokens, slots=slots, max_blocks=max_blocks
        )
        if shape is None:
            return self._eagerly(segments)
        if shape not in self._inputs:
            buffer = torch.zeros(shape.numbers, dtype=torch.int32, device=self._state.device)
            self._inputs[shape] = (buffer, *shape.parts(buffer))
        numbers, tokens, new = self._inputs[shape]
        host = numbers_of(segments, shape, self._forward.block_size)
        numbers.copy_(self._state.push(host), non_blocking=True)
        self._captures.run(shape, partial(self._forward.prefill, tokens, new))
        return shape.tokens - tokens_of(segments)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream on which work is captured.

    Kernels and cuBLAS keep one workspace per stream: with a stream of its own, each engine would
    leave one behind.
    """
    return torch.cuda.Stream(device)


def _key(width: int, sampling: SamplingConfig) -> tuple[int, bool, int, float, float]:
    greedy = sampling.temperature == 0
    if greedy:
        return (width, True, 0, 1.0, 0.0)
    return (width, False, sampling.top_k, sampling.top_p, sampling.min_p)
