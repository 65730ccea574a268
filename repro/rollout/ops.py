"""The operations of a decode step and of a prefill, in plain torch: the engine's specification.

`TorchOps` runs anywhere, in the policy's compute dtype; `KernelOps` (kernel_ops.py) has the same
methods on a GPU. The forward pass is written once over either.

    norm         residual stream and its norm:  r <- r + x,   n = (gain + noise) * r / rms(r)
    attend_step  a new token per row: head norms, rotation, key and value into the cache, attention
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

from torch import Tensor
from torch.nn import functional

from kernels import reference_step
from repro.rollout.choose import choose
from repro.rollout.linears import Product
from repro.rollout.state import RowState
from repro.spec.arm import require
from repro.spec.config import SamplingConfig

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


def norm_heads(qkv: Tensor, heads: Heads) -> Tensor:
    """Return `qkv`, (M, (query + 2 key) * dim), with Qwen3's head norms applied, if it has them."""
    return reference_step.norm_heads(qkv, heads.query, heads.q_gain, heads.k_gain, heads.eps)


class TorchOps:
    """The operations in plain torch: `kernels.reference_step`, with the engine's arguments."""

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
        return reference_step.add_norm(residual, update, gain, noise, eps)

    def attend_step(
        self,
        qkv: Tensor,
        positions: Tensor,
        table: Tensor,
        cache: LayerCache,
        heads: Heads,
        rotation: Rotation,
    ) -> Tensor:
        """Write one new token per row into the cache and attend from it.

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
        return reference_step.attend_step(
            qkv,
            rotation.cos,
            rotation.sin,
            positions,
            table,
            cache.keys,
            cache.values,
            query_heads=heads.query,
            scale=heads.scaling,
            q_gain=heads.q_gain,
            k_gain=heads.k_gain,
            eps=heads.eps,
        )

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
        return reference_step.rotary_write(
            norm_heads(qkv, heads),
            rotation.cos,
            rotation.sin,
            positions,
            slots,
            cache.keys,
            cache.values,
            query_heads=heads.query,
        )

    def attend_new(
        self, queries: Tensor, new: NewTokens, cache: LayerCache, heads: Heads
    ) -> Tensor:
        """Attend from a chunk's tokens, each to all up to itself; return (M, query * dim).

        Zeros where there is padding.
        """
        return reference_step.prefill_attention(
            queries, cache.keys, cache.values, new.table, new.tiles, heads.scaling, tile=TILE
        )

    def whole(self, product: Product) -> Tensor:
        """Return a product with its adapter's share added, (M, N)."""
        require(product.z is None, "plain torch operations take products that are whole already")
        return product.base

    def swiglu(self, gate_up: Product) -> Tensor:
        """Return silu(gate) * up, (M, I), of (M, 2 I)."""
        return reference_step.swiglu(self.whole(gate_up))

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        """Return (M, V) float32 logits."""
        return functional.linear(hidden, lm_head).float()

    def choose(self, logits: Tensor, state: RowState, sampling: SamplingConfig) -> None:
        """Draw a token for each of the first M slots and move their state on."""
        choose(logits, state, sampling)
