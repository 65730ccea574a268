"""Sizes of the engine: slots, positions, cache, and the widths at which a step is captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from repro.models.memory_plan import BLOCK_POSITIONS, GRAPH_WIDTHS, PREFILL_TOKENS
from repro.models.policy import Policy
from repro.spec.tier import usable_bytes

Products = Literal["own", "bitsandbytes"]

# Of the memory that is free, what a cache without a stated size takes at most.
_CACHE_SHARE = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built for.

    Attributes
    ----------
    slots
        Rows that run at once.
    max_positions
        Longest prompt and completion together.
    max_new_tokens
        Longest completion.
    cache_blocks, block_size
        Blocks of the cache, the scrap block included, and positions per block; 0 blocks gives every
        slot room for `max_positions`, as far as free memory goes.
    prefill_tokens
        Tokens of one prefill chunk.
    round_steps
        Decode steps between two looks at what has ended.
    products
        Whose kernels multiply by 4-bit weights on a GPU; `bitsandbytes`: its own, NF4 alone.
    ignore_end
        Rows end at their limit alone: for timing with random weights.
    keeps_cache
        Whether cache and captured steps stay between rollouts. If not, an update has their memory,
        and each rollout captures its steps anew.
    """

    slots: int = 256
    max_positions: int = 4096
    max_new_tokens: int = 2048
    cache_blocks: int = 0
    block_size: int = BLOCK_POSITIONS
    prefill_tokens: int = PREFILL_TOKENS
    round_steps: int = 16
    products: Products = "own"
    ignore_end: bool = False
    keeps_cache: bool = True


def width_for(rows: int, slots: int) -> int:
    """Return the narrowest width of a step that holds `rows` slots."""
    for width in GRAPH_WIDTHS:
        if width >= rows:
            return min(width, slots)
    return min(-(-rows // 64) * 64, slots)


def blocks_for(rows: int, config: EngineConfig) -> int:
    """Return the blocks that hold `rows` rows of `max_positions`, the scrap block included."""
    return rows * -(-config.max_positions // config.block_size) + 1


def cache_blocks(
    policy: Policy, config: EngineConfig, *, share: float = _CACHE_SHARE, reserved: int = 0
) -> int:
    """Return the blocks of the cache, the scrap block included.

    Without a stated size the cache takes at most `share` of the free memory's bytes that are not
    `reserved`.
    """
    if config.cache_blocks:
        return config.cache_blocks
    needed = blocks_for(config.slots, config)
    if policy.device.type != "cuda":
        return needed
    decoder: Any = policy.decoder
    heads = decoder.config.num_key_value_heads * decoder.model.layers[0].self_attn.head_dim
    block_bytes = 2 * len(decoder.model.layers) * config.block_size * heads
    block_bytes *= policy.compute_dtype.itemsize
    free, total = torch.cuda.mem_get_info(policy.device)
    # Of what the allocator may reserve, some is in use.
    free = min(free, usable_bytes(total) - torch.cuda.memory_reserved(policy.device))
    return min(needed, int((free - reserved) * share) // block_bytes)
