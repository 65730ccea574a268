"""A lean forward pass of the policy over a static key-value cache, for sampling only.

Qwen2, Qwen3 and Llama in plain torch without autograd, from `repro.models.policy_weights`. What
makes it quick at small sizes is doing less: q, k, v are one product and gate, up another; the cache
is allocated once; the queries that share a key head stand as rows of one attention call; rotary
factors come from a table.

Prompts of different lengths are padded on the left, so that all rows write the same column of the
cache. A row's position is its column less its padding, which makes positions equal to the
trainer's.

Easy to get wrong:

* A query that stands in the padding sees nothing but itself; with nothing at all, softmax gives
  NaN, and NaN times a weight of zero is still NaN one layer up. The diagonal is always visible.
* Gains of the norms are read at each rollout, not when weights are merged: added noise comes and
  goes between the two. They are used in float32.
* The cache of a group: the prompt is computed once and copied G times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from repro.models.policy_weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cache:
    """Keys and values of all layers, each (L, B, key_heads, C, head_dim), and the padding.

    Attributes
    ----------
    keys, values : Tensor
    padding : Tensor, (B,), int64
        Columns on the left that hold nothing.
    mask : Tensor or None, (B, 1, 1, C), float32
        0 where a column may be seen, -inf in the padding; None without padding.
    """

    keys: Tensor
    values: Tensor
    padding: Tensor
    mask: Tensor | None

    def select(self, rows: Tensor) -> Cache:
        """Return the cache of some rows, given by (b,) int64 indices; repeats are allowed."""
        return Cache(
            keys=self.keys.index_select(1, rows),
            values=self.values.index_select(1, rows),
            padding=self.padding.index_select(0, rows),
            mask=None if self.mask is None else self.mask.index_select(0, rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fused:
    """A block's matrices as they are multiplied."""

    source: LayerWeights
    qkv: Tensor
    qkv_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None


class LeanDecoder:
    """The policy's forward pass on merged float32 weights.

    Parameters
    ----------
    weights
        A snapshot of the policy; its norms are live.
    max_positions
        Size of the rotary table.
    """

    def __init__(self, weights: DecoderWeights, max_positions: int) -> None:
        self.weights = weights
        self.device = weights.embedding.device
        self.layers = [_fuse(layer) for layer in weights.layers]
        positions = torch.arange(max_positions, device=self.device).unsqueeze(0)  # (1, positions)
        # (1, positions, D) each
        cos, sin = weights.rotary(weights.embedding[:1].unsqueeze(0), positions)
        half = weights.head_dim // 2
        self.cos = cos[0].float()
        # The rotation's minus sign sits in the table: x * cos + swapped halves of x * sin.
        self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1).float()
        self.gains: list[tuple[Tensor, Tensor]] = []
        self.final_gain = weights.final_norm.gain()
        self.read_gains()

    def read_gains(self) -> None:
        """Take up the norms' gains and added noise as they are now."""
        layers = self.weights.layers
        self.gains = [(layer.input_norm.gain(), layer.post_norm.gain()) for layer in layers]
        self.final_gain = self.weights.final_norm.gain()

    def prefill(self, prompts: Sequence[Sequence[int]], capacity: int) -> tuple[Tensor, Cache]:
        """Run prompts forward.

        Parameters
        ----------
        prompts
            P sequences of token ids.
        capacity
            Columns of the cache beyond the longest prompt.

        Returns
        -------
        logits : Tensor, (P, V), float32
            After each prompt's last token.
        cache : Cache, of P rows
        """
        hidden, cache = self._prefilled(prompts, capacity)
        return self._logits(hidden[:, -1]), cache

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """Return what `lm_head` multiplies at each position of one sequence, (S, H), float32."""
        return self._normed(self._prefilled([tokens], 0)[0][0])

    def _prefilled(self, prompts: Sequence[Sequence[int]], capacity: int) -> tuple[Tensor, Cache]:
        """Return the residual stream after the last block, (P, S, H), and the cache."""
        P, width = len(prompts), max(map(len, prompts))
        token_ids = torch.zeros(P, width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            token_ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        padding = torch.tensor([width - len(prompt) for prompt in prompts], device=self.device)
        columns = torch.arange(width + capacity, device=self.device)
        hidden_columns = columns < padding.unsqueeze(1)  # (P, C)
        mask = torch.zeros(P, 1, 1, len(columns), device=self.device)
        mask = mask.masked_fill(hidden_columns[:, None, None], -torch.inf)  # (P, 1, 1, C)
        w = self.weights
        shape = (len(self.layers), P, w.key_heads, len(columns), w.head_dim)
        cache = Cache(
            keys=torch.zeros(shape, device=self.device),
            values=torch.zeros(shape, device=self.device),
            padding=padding,
            mask=mask if bool(padding.any()) else None,
        )
        causal = columns[:width] <= columns[:width].unsqueeze(1)  # (S, S)
        visible = causal & ~hidden_columns[:, None, :width]  # (P, S, S)
        visible |= torch.eye(width, dtype=torch.bool, device=self.device)
        positions = (columns[:width] - padding.unsqueeze(1)).clamp_(min=0)  # (P, S)
        hidden = self._blocks(token_ids.to(self.device), positions, cache, 0, visible.unsqueeze(1))
        return hidden, cache

    def step(self, token_ids: Tensor, column: int, cache: Cache) -> Tensor:
        """Run one token per row forward at a column of the cache; return (B, V) logits.

        `token_ids` is (B,) int64. The token's key and value are written into the cache; running a
        step again is harmless.
        """
        positions = (column - cache.padding).unsqueeze(1)  # (B, 1)
        mask = None if cache.mask is None else cache.mask[..., : column + 1]
        hidden = self._blocks(token_ids.unsqueeze(1), positions, cache, column, mask)
        return self._logits(hidden[:, 0])

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._normed(hidden), self.weights.lm_head)

    def _normed(self, hidden: Tensor) -> Tensor:
        eps = self.weights.final_norm.variance_epsilon
        return F.rms_norm(hidden, hidden.shape[-1:], self.final_gain, eps)

    def _blocks(
        self, token_ids: Tensor, positions: Tensor, cache: Cache, column: int, mask: Tensor | None
    ) -> Tensor:
        """Return the residual stream after the last block, (B, T, H)."""
        hidden = F.embedding(token_ids, self.weights.embedding)  # (B, T, H)
        # (B, T, 1, D) each: over heads
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        for number in range(len(self.layers)):
            hidden = self._block(number, hidden, cos, sin, cache, column, mask)
        return hidden

    def _block(
        self,
        number: int,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Cache,
        column: int,
        mask: Tensor | None,
    ) -> Tensor:
        w, layer = self.weights, self.layers[number]
        source = layer.source
        B, T, _ = hidden.shape
        eps = source.input_norm.variance_epsilon
        input_gain, post_gain = self.gains[number]
        widths = [source.q.weight.shape[0], source.k.weight.shape[0], source.v.weight.shape[0]]
        qkv = _read(hidden, input_gain, eps, layer.qkv, layer.qkv_bias, widths)
        qkv = qkv.view(B, T, -1, w.head_dim)  # (B, T, query + 2 key heads, D)
        rotated, values = qkv.split([w.query_heads + w.key_heads, w.key_heads], dim=2)
        if source.q_norm is not None and source.k_norm is not None:
            queries, keys = rotated.split([w.query_heads, w.key_heads], dim=2)
            size = (w.head_dim,)
            queries = F.rms_norm(queries, size, source.q_norm, w.head_norm_eps)
            keys = F.rms_norm(keys, size, source.k_norm, w.head_norm_eps)
            rotated = torch.cat([queries, keys], dim=2)
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat([second, first], dim=-1) * sin
        queries, keys = rotated.split([w.query_heads, w.key_heads], dim=2)
        stop = column + T
        cache.keys[number, :, :, column:stop] = keys.transpose(1, 2)  # (B, key heads, T, D)
        cache.values[number, :, :, column:stop] = values.transpose(1, 2)
        attended = self._attend(
            queries, cache.keys[number, :, :, :stop], cache.values[number, :, :, :stop], mask
        )
        hidden = hidden + F.linear(attended, source.o.weight, source.o.bias)
        eps = source.post_norm.variance_epsilon
        widths = [source.gate.weight.shape[0], source.up.weight.shape[0]]
        both = _read(hidden, post_gain, eps, layer.gate_up, layer.gate_up_bias, widths)
        gate, up = both.chunk(2, dim=-1)
        product = self.weights.activation(gate) * up
        return hidden + F.linear(product, source.down.weight, source.down.bias)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention's output before `o`, (B, T, query_heads * head_dim).

        queries (B, T, query_heads, head_dim); keys and values (B, key_heads, C, head_dim); mask
        boolean (B, 1, T, C) or additive (B, 1, 1, C).
        """
        w = self.weights
        B, T = queries.shape[:2]
        if T == 1:
            # The queries of one key head become rows of one product: nothing is repeated.
            grouped = queries.view(B, w.key_heads, -1, w.head_dim)  # (B, key heads, group, D)
            out = F.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=mask, scale=w.scaling
            )
            return out.reshape(B, 1, -1)
        repeats = w.query_heads // w.key_heads
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2),  # (B, query heads, T, D)
            keys.repeat_interleave(repeats, dim=1),
            values.repeat_interleave(repeats, dim=1),
            attn_mask=mask,
            scale=w.scaling,
        )
        return out.transpose(1, 2).reshape(B, T, -1)

    def name_fault(self, token_ids: Tensor, column: int, cache: Cache) -> str:
        """Run a step again and return the first part whose output is not finite."""
        hidden = F.embedding(token_ids.unsqueeze(1), self.weights.embedding)
        if not bool(torch.isfinite(hidden).all()):
            return "the embedding"
        positions = (column - cache.padding).unsqueeze(1)
        mask = None if cache.mask is None else cache.mask[..., : column + 1]
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        for number in range(len(self.layers)):
            hidden = self._block(number, hidden, cos, sin, cache, column, mask)
            if not bool(torch.isfinite(hidden).all()):
                return f"model.layers.{number}"
        return "the final norm or lm_head"


def _read(
    hidden: Tensor,
    gain: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    widths: Sequence[int],
) -> Tensor:
    """Return fused products of the normed residual stream, (B, T, N).

    Parameters
    ----------
    gain : Tensor, (H,) or (J, H)
        Of all J matrices, or one for each.
    weight : Tensor, (N, H)
        The matrices one under the other, with `widths` rows each.
    """
    size = hidden.shape[-1:]
    if gain.dim() == 1:
        return F.linear(F.rms_norm(hidden, size, gain, eps), weight, bias)
    biases = [None] * len(widths) if bias is None else bias.split(widths)
    parts = zip(gain, weight.split(widths), biases, strict=True)
    return torch.cat([F.linear(F.rms_norm(hidden, size, g, eps), w, b) for g, w, b in parts], -1)


def _fuse(layer: LayerWeights) -> _Fused:
    def stacked(*parts: Tensor | None) -> Tensor | None:
        present = [part for part in parts if part is not None]
        if not present:
            return None
        if len(present) != len(parts):
            raise ValueError("some of a block's fused projections have a bias and some have none")
        return torch.cat(present)

    return _Fused(
        source=layer,
        qkv=torch.cat([layer.q.weight, layer.k.weight, layer.v.weight]),
        qkv_bias=stacked(layer.q.bias, layer.k.bias, layer.v.bias),
        gate_up=torch.cat([layer.gate.weight, layer.up.weight]),
        gate_up_bias=stacked(layer.gate.bias, layer.up.bias),
    )
