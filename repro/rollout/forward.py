"""The policy's forward pass over a paged cache: one token per row, or a chunk of prompts.

    r = embedding(tokens);  n = norm(r)
    each block:  r, n = norm(r + o(attend(qkv(n))));  r, n = norm(r + down(swiglu(gate_up(n))))
    logits = lm_head(n)

The same lines serve CPU and GPU, every weight format and architecture; what differs is in the
projection groups and the operations they are given. Norm gains are the policy's own Parameters;
added noise lives in buffers that `read_noise` fills in place, so that a captured step sees it.
Noise of zero is bit-equal to none, since the gain is widened to float32 exactly.

Easy to get wrong: writing keys after attending (the token then misses itself), and computing logits
for a prefill, which needs none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.reference_step import Heads, LayerCache, Rotation, norm_heads
from repro.models.norms import PerturbableRMSNorm, block_norms, final_norm
from repro.models.policy import Policy
from repro.rollout.backend import TILE, Backend, NewTokens, Norm
from repro.rollout.linears import ProjectionGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """One decoder block."""

    input_norm: Norm
    post_norm: Norm
    qkv: ProjectionGroup
    o: ProjectionGroup
    gate_up: ProjectionGroup
    down: ProjectionGroup
    heads: Heads
    cache: LayerCache


class Forward:
    """The forward pass of a policy on a cache.

    Parameters
    ----------
    policy
        Qwen2, Qwen3 or Llama, in any weight format.
    keys, values : Tensor, (L, blocks, block_size, key_heads, head_dim)
        The cache.
    backend
        Makes the projection groups, and has the operations.
    max_positions
        Size of the rotary table.
    """

    def __init__(
        self, policy: Policy, keys: Tensor, values: Tensor, backend: Backend, *, max_positions: int
    ) -> None:
        decoder: Any = policy.decoder
        group, live_noise = backend.group, backend.live_noise
        self.backend = backend
        self.dtype = policy.compute_dtype
        self.embedding: Tensor = decoder.model.embed_tokens.weight
        self.lm_head: Tensor = decoder.lm_head.weight
        norms = block_norms(decoder)
        self.final_norm = _norm(final_norm(decoder), live_noise)
        self.rotation = _rotation(decoder, self.embedding, max_positions, self.dtype)
        self.blocks: list[Block] = []
        for number, layer in enumerate(decoder.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            name = f"model.layers.{number}"
            self.blocks.append(
                Block(
                    input_norm=_norm(norms[f"{name}.input_layernorm"], live_noise),
                    post_norm=_norm(norms[f"{name}.post_attention_layernorm"], live_noise),
                    qkv=group((attention.q_proj, attention.k_proj, attention.v_proj)),
                    o=group((attention.o_proj,)),
                    gate_up=group((mlp.gate_proj, mlp.up_proj)),
                    down=group((mlp.down_proj,)),
                    heads=_heads(decoder.config, attention),
                    cache=LayerCache(keys=keys[number], values=values[number]),
                )
            )

    def groups(self) -> list[ProjectionGroup]:
        """Return all projection groups."""
        return [g for b in self.blocks for g in (b.qkv, b.o, b.gate_up, b.down)]

    def read_noise(self) -> None:
        """Take up the norms' added noise as it is now, in place."""
        silent: list[Tensor] = []
        noisy: list[tuple[Tensor, Tensor]] = []
        of_blocks = (norm for b in self.blocks for norm in (b.input_norm, b.post_norm))
        for norm in (*of_blocks, self.final_norm):
            if norm.noise is None:
                continue
            if norm.module.noise is None:
                silent.append(norm.noise)
            else:
                noisy.append((norm.noise, norm.module.noise))
        # One call for all that are alike: one call per norm takes the host a millisecond.
        if silent:
            torch._foreach_zero_(silent)
        if noisy:
            torch._foreach_copy_([own for own, _ in noisy], [given for _, given in noisy])

    def decode(self, tokens: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Run one token per row forward; return (M, V) float32 logits.

        Parameters
        ----------
        tokens : Tensor, (M,), int64
        positions : Tensor, (M,), int32
            -1 where no row runs; the logits there mean nothing.
        table : Tensor, (M, max_blocks), int32
        """
        for residual, update in self._step(tokens, positions, table):  # noqa: B007
            pass  # the last block's count
        _, normed = self.backend.norm(residual, update, self.final_norm)
        return self.backend.logits(normed, self.lm_head)

    def prefill(self, tokens: Tensor, new: NewTokens) -> None:
        """Run a chunk of prompts' tokens forward, (M,) integer, filling the cache."""
        functions = self.backend.functions

        def attend(block: Block, qkv: Tensor) -> Tensor | None:
            cache, heads = block.cache, block.heads
            queries = functions.rotary_write(
                norm_heads(qkv, heads), new.positions, new.slots, cache, heads, self.rotation
            )
            if block is self.blocks[-1]:
                # Its keys and values are all that a later step reads of the last block.
                return None
            attended: Tensor = functions.prefill_attention(
                queries, cache, new.table, new.tiles, heads.scaling, tile=TILE
            )
            return attended

        # Goes through all of it and holds nothing of it.
        deque(self._stream(tokens, attend), maxlen=0)

    def name_fault(self, tokens: Tensor, positions: Tensor, table: Tensor, row: int) -> str:
        """Run a step again and return the first part whose output is not finite for `row`."""
        for number, (residual, update) in enumerate(self._step(tokens, positions, table)):
            stream = residual if update is None else residual + update
            if not torch.isfinite(stream[row]).all():
                return f"model.layers.{number - 1}" if number else "the embedding"
        return "the final norm or lm_head"

    def _step(
        self, tokens: Tensor, positions: Tensor, table: Tensor
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        by = self.backend

        def attend(block: Block, qkv: Tensor) -> Tensor:
            given = qkv, positions, table, block.cache, block.heads, self.rotation
            attended: Tensor = by.functions.attend_step(*given, by.workspace, overlap=by.overlap)
            return attended

        return self._stream(tokens, attend)

    def _stream(
        self, tokens: Tensor, attend: Callable[[Block, Tensor], Tensor | None]
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the residual stream, (M, H), and its update: once embedded, then by block.

        `attend` takes a block and its q, k, v; None ends the pass.
        """
        residual = torch.nn.functional.embedding(tokens, self.embedding)
        update: Tensor | None = None
        yield residual, update
        for block in self.blocks:
            residual, normed = self.backend.norm(residual, update, block.input_norm)
            attended = attend(block, self.backend.whole(block.qkv(normed)))
            if attended is None:
                return
            residual, normed = self.backend.norm(
                residual, self.backend.whole(block.o(attended)), block.post_norm
            )
            update = self.backend.whole(block.down(self.backend.swiglu(block.gate_up(normed))))
            yield residual, update


def _norm(module: PerturbableRMSNorm, live: bool) -> Norm:
    noise = None
    if live:
        noise = torch.zeros(module.weight.shape, dtype=torch.float32, device=module.weight.device)
    return Norm(module=module, noise=noise)


def _heads(config: Any, attention: Any) -> Heads:
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Heads(
        query=config.num_attention_heads,
        scaling=attention.scaling,
        q_gain=None if q_norm is None else q_norm.weight,
        k_gain=None if k_norm is None else k_norm.weight,
        eps=config.rms_norm_eps,
    )


def _rotation(decoder: Any, embedding: Tensor, positions: int, dtype: torch.dtype) -> Rotation:
    at = torch.arange(positions, device=embedding.device).unsqueeze(0)  # (1, positions)
    sample = torch.empty(1, 1, 1, dtype=dtype, device=embedding.device)
    cos, sin = decoder.model.rotary_emb(sample, at)  # (1, positions, D) each
    return Rotation(cos=cos[0].contiguous(), sin=sin[0].contiguous())
