"""Token by token for S runs at once: static buffers, one step, and its CUDA graphs.

All S * B rows write the same column of a static cache; a row's position is its column less its
padding. A step draws from the logits at hand, records, and runs the drawn tokens forward to the
next logits. On a GPU the step is a graph, one for each length of cache that attention may read, so
that the first steps do not read the last columns.

Easy to get wrong: nothing in a captured step may ask the host, so the column and the number of the
step are tensors; and a graph reads the very buffers that it was captured with, so weights are
copied into them, never replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from repro.rl.stacked.shape import Shape
from repro.rl.stacked.stack import Layer, Weights
from repro.rl.stacked.stacked_block import (
    Rotary,
    attend,
    embed,
    finish,
    norm,
    project,
    prompt_masks,
)
from repro.rollout.draw import draw
from repro.spec.config import SamplingConfig

# Columns by which the cache that a graph reads grows.
BUCKET = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buffers:
    """What a rollout of S runs with P prompts and G completions each lives in; N = S * P * G.

    Attributes
    ----------
    keys, values : Tensor, (L, N, key_heads, columns, head_dim)
    hide : Tensor, (N, columns)
        Added to the scores, in the compute dtype: 0 where a column may be seen, -inf on the
        prompts' padding and where nothing was written yet.
    padding : Tensor, (N,), int64
    logits : Tensor, (N, V), float32
    uniforms : Tensor, (T, N), float64
    tokens, logprobs : Tensor, (T, N)
        What was drawn.
    lengths : Tensor, (N,), int64
        Tokens drawn until the row had ended, its end included.
    done : Tensor, (N,), bool
    column, number : Tensor, (1,), int64
        Where the next token is written, and how many were drawn.
    """

    keys: Tensor
    values: Tensor
    hide: Tensor
    padding: Tensor
    logits: Tensor
    uniforms: Tensor
    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    done: Tensor
    column: Tensor
    number: Tensor

    def take(self, rows: Tensor) -> Buffers:
        """Return copies of rows (N',) int64 of all that has an axis of rows."""
        names = [each.name for each in fields(self) if each.name not in _OF_ALL_ROWS]
        parts = {n: getattr(self, n).index_select(_ROWS.get(n, 0), rows) for n in names}
        return Buffers(**parts, column=self.column, number=self.number)


# Where the axis of rows is not the first; and what has none.
_ROWS = {"keys": 1, "values": 1, "uniforms": 1, "tokens": 1, "logprobs": 1}
_OF_ALL_ROWS = ("column", "number")


def make_buffers(
    shape: Shape, *, rows: int, columns: int, new: int, dtype: torch.dtype, device: torch.device
) -> Buffers:
    """Return buffers for `rows` rows of `columns` columns and `new` new tokens."""
    cache = (shape.layers, rows, shape.key_heads, columns, shape.head_dim)
    # A captured step reads columns that nothing was written into, where zeros are masked.
    make = torch.zeros if device.type == "cuda" else torch.empty

    def zeros(*size: int, kind: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=kind, device=device)

    return Buffers(
        keys=make(cache, dtype=dtype, device=device),
        values=make(cache, dtype=dtype, device=device),
        hide=zeros(rows, columns, kind=dtype),
        padding=zeros(rows, kind=torch.long),
        logits=zeros(rows, shape.vocabulary, kind=torch.float32),
        uniforms=zeros(new, rows, kind=torch.float64),
        tokens=zeros(new, rows, kind=torch.long),
        logprobs=zeros(new, rows, kind=torch.float32),
        lengths=zeros(rows, kind=torch.long),
        done=zeros(rows, kind=torch.bool),
        column=zeros(1, kind=torch.long),
        number=zeros(1, kind=torch.long),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoder:
    """The weights of S runs, and the other inputs of a decode step.

    Attributes
    ----------
    ends : Tensor, (e,), int64
        Tokens that end a completion.
    stream, dtype
        Of the residual stream, and of products.
    """

    weights: Weights
    shape: Shape
    rotary: Rotary
    ends: Tensor
    stream: torch.dtype
    dtype: torch.dtype

    def prefill(self, buffers: Buffers, prompt_ids: Tensor, padding: Tensor, group: int) -> None:
        """Run prompts forward into the cache and the first logits.

        Parameters
        ----------
        prompt_ids : Tensor, (S, P, Tp), int64
            Padded on the left.
        padding : Tensor, (S, P), int64
        group
            G: the rows of a prompt, which share what was computed.
        """
        S, P, Tp = prompt_ids.shape
        # places (S P, Tp), mask (S P, 1, Tp * group, Tp)
        places, mask = prompt_masks(padding.flatten(), Tp, self.shape.group, self.dtype)
        cos, sin = self.rotary.at(places.view(S, P * Tp))  # (S, P Tp, 1, D)
        hidden = embed(self.weights, prompt_ids.view(S, -1), self.stream)  # (S, P Tp, H)
        for number, layer in enumerate(self.weights.layers):
            parts = project(layer, hidden, cos, sin, self.shape)
            # One sequence per prompt: (S P, Tp, heads, D)
            queries, keys, values = (x.reshape(S * P, Tp, *x.shape[2:]) for x in parts)
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # (S P, key heads, Tp, D)
            for cache, computed in ((buffers.keys, keys), (buffers.values, values)):
                # (S P, G, key heads, columns, D): a prompt's rows lie one after another
                room = cache[number].view(S * P, group, *cache.shape[2:])
                room[..., :Tp, :] = computed.unsqueeze(1)
            attended = attend(queries, keys, values, mask, self.shape)  # (S P, Tp, queries)
            hidden = finish(layer, hidden, attended.view(S, P * Tp, -1), self.shape)
        last = hidden.view(S, P, Tp, -1)[:, :, -1]  # (S, P, H)
        logits = self._logits(last).view(S * P, 1, -1)  # (S P, 1, V)
        buffers.logits.view(S * P, group, -1).copy_(logits.expand(-1, group, -1))
        columns = torch.arange(buffers.hide.shape[1], device=padding.device)
        per_row = padding.flatten().repeat_interleave(group)  # (N,)
        buffers.padding.copy_(per_row)
        prompt = (columns >= per_row.unsqueeze(1)) & (columns < Tp)  # (N, columns)
        buffers.hide.fill_(-torch.inf).masked_fill_(prompt, 0.0)
        buffers.column.fill_(Tp)
        buffers.number.zero_()
        buffers.lengths.zero_()

    def step(self, buffers: Buffers, columns: int, sampling: SamplingConfig) -> None:
        """Draw one token per row and run it forward, attention reading the first `columns`."""
        self.forward(buffers, self.draw(buffers, sampling), columns)

    def draw(self, buffers: Buffers, sampling: SamplingConfig) -> Tensor:
        """Draw and record one token per row; return them, (N,) int64."""
        b = buffers
        uniform = b.uniforms.index_select(0, b.number).squeeze(0)  # (N,)
        tokens, logprobs = draw(b.logits, uniform, sampling)
        b.tokens.index_copy_(0, b.number, tokens.unsqueeze(0))  # (N,) -> (1, N), a row of (T, N)
        b.logprobs.index_copy_(0, b.number, logprobs.unsqueeze(0))  # (1, N)
        b.lengths.add_(~b.done)
        b.done.logical_or_((tokens.unsqueeze(1) == self.ends).any(1))  # (N, e) -> (N,)
        b.number.add_(1)
        return tokens

    def forward(self, buffers: Buffers, tokens: Tensor, columns: int) -> None:
        """Run one token per row, (N,) int64, forward to the next logits."""
        for _, hidden in self._passing(buffers, tokens, columns):
            last = hidden
        buffers.logits.copy_(self._logits(last).flatten(0, 1))  # (N, V)
        buffers.column.add_(1)

    def fault(self, buffers: Buffers, tokens: Tensor) -> str:
        """Run tokens (N,) int64 of the last column again; name the first output not finite."""
        buffers.column.sub_(1)
        for name, hidden in self._passing(buffers, tokens, int(buffers.column) + 1):
            if not bool(torch.isfinite(hidden).all()):
                return name
        return "the final norm or lm_head"

    def _passing(self, b: Buffers, tokens: Tensor, columns: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the residual stream (S, N / S, H) after each part, by the part's name."""
        S = self.weights.final_gain.shape[0]
        cos, sin = self.rotary.at((b.column - b.padding).view(S, -1))  # (S, N / S, 1, D)
        b.hide.index_fill_(1, b.column, 0.0)  # from now on the column of these tokens is seen
        mask = b.hide[:, None, None, :columns]  # (N, 1, 1, columns)
        if mask.is_cuda:
            mask = mask.expand(-1, -1, self.shape.group, -1)
        hidden = embed(self.weights, tokens.view(S, -1), self.stream)  # (S, N / S, H)
        yield "the embedding", hidden
        for number, layer in enumerate(self.weights.layers):
            hidden = self._block(number, layer, hidden, cos, sin, b, mask)
            yield f"model.layers.{number}", hidden

    def _block(
        self,
        number: int,
        layer: Layer,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        b: Buffers,
        mask: Tensor,
    ) -> Tensor:
        S, rows, _ = hidden.shape
        columns, N = mask.shape[-1], S * rows
        # One token per row: (N, heads, D)
        queries, keys, values = (
            x.reshape(N, *x.shape[2:]) for x in project(layer, hidden, cos, sin, self.shape)
        )
        # (N, key heads, D): one column of the cache
        for cache, computed in ((b.keys, keys), (b.values, values)):
            if cache.is_cuda:
                cache[number].index_copy_(2, b.column, computed.unsqueeze(2))
            else:
                # What is not captured reads no column behind the one that it writes.
                cache[number, :, :, columns - 1] = computed
        attended = attend(  # (N, 1, queries)
            queries.unsqueeze(1),  # (N, 1, heads, D)
            b.keys[number, :, :, :columns],
            b.values[number, :, :, :columns],
            mask,
            self.shape,
        )
        return finish(layer, hidden, attended.view(S, rows, -1), self.shape)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return (S, M, V) float32 of the residual stream (S, M, H); not rounded to 16 bits."""
        hidden = norm(hidden, self.weights.final_gain, self.shape.epsilon)
        head = self.weights.head
        S, M, H = hidden.shape
        hidden = hidden.to(head.dtype)
        wide = hidden.dtype == torch.float32 or not hidden.is_cuda
        if head.shape[0] == 1:
            flat, table = hidden.view(S * M, H), head[0].t()  # (S M, H), (H, V)
            if wide:
                return (flat.float() @ table.float()).view(S, M, -1)  # (S, M, V)
            return torch.mm(flat, table, out_dtype=torch.float32).view(S, M, -1)  # (S, M, V)
        table = head.transpose(1, 2)  # (S, H, V)
        if wide:
            return torch.bmm(hidden.float(), table.float())
        return torch.bmm(hidden, table, out_dtype=torch.float32)


class GraphedSteps:
    """The steps of one decoder on one set of buffers, as CUDA graphs captured when first needed.

    Parameters
    ----------
    pool
        Of `torch.cuda.graph_pool_handle`. Graphs that are replayed one after another, and leave
        their results in buffers, can have the same.
    """

    def __init__(
        self, decoder: Decoder, buffers: Buffers, sampling: SamplingConfig, pool: Any
    ) -> None:
        self._decoder, self._buffers, self._sampling = decoder, buffers, sampling
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = pool
        # Kernels are compiled and libraries initialised outside of any capture. What this step
        # writes is written again by the prefill that comes before every rollout.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                buffers.column.zero_()
                buffers.number.zero_()
                decoder.step(buffers, BUCKET, sampling)
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self, columns: int) -> None:
        """Run one step, attention reading at least the first `columns`."""
        most = self._buffers.hide.shape[1]
        columns = min(-(-columns // BUCKET) * BUCKET, most)
        if columns not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._decoder.step(self._buffers, columns, self._sampling)
            self._graphs[columns] = graph
        self._graphs[columns].replay()
