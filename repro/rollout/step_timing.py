"""The time of a bare decode step: on a GPU, what the device needs when the host does nothing.

Easy to get wrong: a row whose logits are not finite stops, and a step without running rows attends
to nothing and is quick. So the rows must still run at the end, and a cache that no rollout has
filled is filled first (`fill_cache`).
"""

from __future__ import annotations

import torch

from kernels import timing
from repro.rollout.engine import Engine
from repro.spec.checks import require
from repro.spec.config import SamplingConfig, derive_seed


@torch.no_grad()
def time_steps(engine: Engine, width: int, position: int, count: int) -> float:
    """Return the device's seconds per step, replayed back to back over made-up rows.

    The rows, `width` of them, are all at `position` and dropped afterwards: call it between
    rollouts. Of `count` steps the first, which may be captured then, is not timed.

    Raises `ValueError` when the engine was not built for so many rows, positions or tokens;
    `FloatingPointError` when a row stopped, because its logits were not finite.
    """
    state, pool = engine.state, engine.pool
    blocks = pool.blocks_for(position + count + 1)
    require(
        blocks <= state.table.shape[1] and 2 <= count <= engine.config.max_new_tokens,
        f"{count} steps from position {position} exceed what the engine was built for",
    )
    require(
        width * blocks <= pool.capacity,
        f"{width} rows at position {position} need {width * blocks} blocks of their own; the cache "
        f"has {pool.capacity}",
    )
    for slot in range(width):
        at = slot * blocks
        state.set_blocks(slot, range(1 + at, 1 + at + blocks))
    state.send_table()
    sampling = SamplingConfig(max_new_tokens=engine.config.max_new_tokens)
    state.counts[:width] = 0
    state.limits[:width] = 1 << 30
    state.positions[:width] = position
    engine.steps(width, sampling)
    state.counts[:width] = 0

    def steps() -> None:
        for _ in range(count - 1):
            engine.steps(width, sampling)

    seconds = timing.seconds_of(steps, engine.device)
    running = state.positions[:width] == position + count
    stopped = [row for row, runs in enumerate(running.tolist()) if not runs]
    engine.abandon()
    if stopped:
        raise FloatingPointError(
            f"rows {stopped} stopped within {count} timed steps from position {position}: their "
            "logits were not finite"
        )
    return seconds / (count - 1)


@torch.no_grad()
def fill_cache(engine: Engine, seed: int) -> None:
    """Fill all cache blocks with normal random values, as no rollout has.

    A cache of zeros draws less power and lets the device clock higher.
    """
    generator = torch.Generator(engine.device).manual_seed(derive_seed(seed, "cache"))
    for block in engine.forward.blocks:
        for cache in (block.cache.keys, block.cache.values):
            values = torch.empty(cache.shape, dtype=engine.forward.dtype, device=engine.device)
            cache.copy_(values.normal_(generator=generator))


@torch.no_grad()
def fill_rows(engine: Engine, width: int, seed: int) -> None:
    """Fill the first `width` slots with random tokens, and random numbers for sampling."""
    generator = torch.Generator(engine.device).manual_seed(derive_seed(seed, "rows"))
    state, vocabulary = engine.state, len(engine.forward.embedding)
    state.tokens[:width].random_(0, vocabulary, generator=generator)
    state.uniforms[:width].uniform_(0, 1, generator=generator)
