"""The operations of a decode step and of a prefill, in plain torch: the engine's specification.

`TorchOps` runs anywhere, in the policy's compute dtype; `KernelOps` (kernel_ops.py) has the same
methods on a GPU. The forward pass is written once over either.

    norm         residual stream and its norm:  r <- r + x,   n = (gain + noise) * r / rms(r)
    attend_step  one new token a row: head norms, rotation, key and value into the cache, attention
    place        the same for many new tokens, without the attention: returns the queries
    attend_new   attention of many new tokens (prefill), each to what precedes it
    whole        a product with its adapter's share
    swiglu       silu(gate) * up
    logits       lm_head, float32
    choose       a token from each row's logits, and the rows' state moved on

Positions of -1 mark rows that do not run: they write nothing, and attend to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import dispatch
from repro.rollout.blocks import SCRAP
from repro.rollout.choose import choose
from repro.rollout.linears import Product
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig, require

# Tokens of one row that a program of the prefill's attention takes.
TILE = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heads:
    """The attention's shape.

    Attributes
    ----------
    scaling
        Factor on the scores.
    q_gain, k_gain : Tensor or None, (head_dim,)
        Of Qwen3's head norms.
    """

    query: int
    key: int
    dim: int
    scaling: float
    q_gain: Tensor | None
    k_gain: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """cos and sin of every position, (S, head_dim), both halves filled, in the compute dtype."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewTokens:
    """Tokens of a prefill chunk, rows one after another, then perhaps padding.

    Padding tokens are computed like others, and nobody reads them: no key of theirs is kept, and
    their tiles attend to nothing.

    Attributes
    ----------
    positions, slots : Tensor, (M,), int32
        Where each token stands in its sequence, and where its key goes in the cache, counted in
        positions of the cache; a slot of -1 marks padding.
    table : Tensor, (rows, max_blocks), int32
    tiles : Tensor, (tiles, 4), int32
        Runs of at most `TILE` tokens of one row: row, first token, tokens, first position. A row
        of -1 marks padding, or with 0 tokens a tile that is not needed. Every token is in one.
    """

    positions: Tensor
    slots: Tensor
    table: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCache:
    """One layer's keys and values, (blocks, block_size, key_heads, head_dim)."""

    keys: Tensor
    values: Tensor


class TorchOps:
    """The operations in plain torch."""

    def norm(
        self,
        residual: Tensor,
        update: Tensor | None,
        gain: Tensor,
        noise: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the stream with `update` added, and its norm, (M, H) both.

        Parameters
        ----------
        update : Tensor or None, (M, H)
        gain : Tensor, (H,)
        noise : Tensor or None, (H,), float32
        """
        if update is not None:
            residual = residual + update
        return residual, dispatch.rms_norm(residual, gain, eps, noise).to(residual.dtype)

    def attend_step(
        self,
        qkv: Tensor,
        positions: Tensor,
        table: Tensor,
        cache: LayerCache,
        heads: Heads,
        rotation: Rotation,
    ) -> Tensor:
        """Write one new token a row into the cache and attend from it.

        Parameters
        ----------
        qkv : Tensor, (M, (query + 2 key) * dim)
        positions : Tensor, (M,), int32
            -1 where no row runs.
        table : Tensor, (M, max_blocks), int32

        Returns
        -------
        Tensor, (M, query * dim)
            Zeros where no row runs.
        """
        block_size = cache.keys.shape[1]
        at = positions.clamp(min=0).long()
        blocks = table.gather(1, (at // block_size).unsqueeze(1)).squeeze(1).long()
        blocks = torch.where(positions >= 0, blocks, SCRAP)
        slots = blocks * block_size + at % block_size
        queries = self.place(qkv, at, slots, cache, heads, rotation)
        return dispatch.decode_attention(
            queries, cache.keys, cache.values, table, positions + 1, heads.scaling
        ).view(len(qkv), -1)

    def place(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: LayerCache,
        heads: Heads,
        rotation: Rotation,
    ) -> Tensor:
        """Write keys and values of new tokens into the cache; return the rotated queries.

        Parameters
        ----------
        qkv : Tensor, (M, (query + 2 key) * dim)
        positions, slots : Tensor, (M,), integer
            A negative slot keeps neither key nor value.

        Returns
        -------
        Tensor, (M, query, dim)
        """
        split = qkv.view(len(qkv), -1, heads.dim)
        queries, keys, values = split.split([heads.query, heads.key, heads.key], dim=1)
        if heads.q_gain is not None and heads.k_gain is not None:
            queries = dispatch.rms_norm(queries, heads.q_gain, heads.eps).to(qkv.dtype)
            keys = dispatch.rms_norm(keys, heads.k_gain, heads.eps).to(qkv.dtype)
        at = positions.long()
        queries, keys = dispatch.rotary(queries, keys, rotation.cos[at], rotation.sin[at])
        flat = (-1, heads.key, heads.dim)
        # Nobody reads the scrap block.
        kept = torch.where(slots >= 0, slots, SCRAP * cache.keys.shape[1]).long()
        cache.keys.view(flat)[kept] = keys.to(cache.keys.dtype)
        cache.values.view(flat)[kept] = values.to(cache.values.dtype)
        return queries

    def attend_new(
        self, queries: Tensor, new: NewTokens, cache: LayerCache, heads: Heads
    ) -> Tensor:
        """Attend from a chunk's tokens, each to all up to itself; return (M, query * dim).

        Zeros where there is padding.
        """
        block_size = cache.keys.shape[1]
        out = torch.zeros_like(queries)
        repeats = heads.query // heads.key
        for row, first, count, position in new.tiles.tolist():
            if row < 0:
                continue
            end = position + count
            blocks = new.table[row, : -(-end // block_size)].long()
            keys = cache.keys[blocks].view(-1, heads.key, heads.dim)[:end].to(queries.dtype)
            values = cache.values[blocks].view(-1, heads.key, heads.dim)[:end].to(queries.dtype)
            mask = torch.arange(end) <= torch.arange(position, end).unsqueeze(1)
            attended = functional.scaled_dot_product_attention(
                queries[first : first + count].transpose(0, 1),
                keys.repeat_interleave(repeats, dim=1).transpose(0, 1),
                values.repeat_interleave(repeats, dim=1).transpose(0, 1),
                attn_mask=mask.to(queries.device),
                scale=heads.scaling,
            )
            out[first : first + count] = attended.transpose(0, 1)
        return out.view(len(queries), -1)

    def whole(self, product: Product) -> Tensor:
        """Return a product with its adapter's share added, (M, N)."""
        require(product.z is None, "plain torch operations take products that are whole already")
        return product.base

    def swiglu(self, gate_up: Product) -> Tensor:
        """Return silu(gate) * up, (M, I), of (M, 2 I)."""
        return dispatch.swiglu(self.whole(gate_up))

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        """Return (M, V) float32 logits."""
        return functional.linear(hidden, lm_head).float()

    def choose(self, logits: Tensor, state: RowState, sampling: SamplingConfig) -> None:
        """Draw a token for each of the first M slots and move their state on."""
        choose(logits, state, sampling)
