"""The time of a bare decode step on a GPU: what the device needs when the host does nothing."""

from __future__ import annotations

import torch

from repro.rollout.engine import Engine
from repro.spec.config import SamplingConfig, require


@torch.no_grad()
def time_steps(engine: Engine, width: int, position: int, count: int) -> float:
    """Return the device's seconds a step, replayed back to back over made-up rows.

    Parameters
    ----------
    width
        Rows, all at `position`, which are dropped afterwards: call it between rollouts.
    count
        Steps, the first of which (it may be captured then) is not timed.

    Raises
    ------
    ValueError
        When the engine was not built for so many positions or tokens.
    """
    state, pool = engine.state, engine.pool
    blocks = pool.blocks_for(position + count + 1)
    require(
        blocks <= state.table.shape[1] and 2 <= count <= engine.config.max_new_tokens,
        f"{count} steps from position {position} exceed what the engine was built for",
    )
    for slot in range(width):
        at = slot * blocks
        state.set_blocks(slot, [1 + (at + i) % pool.capacity for i in range(blocks)])
    state.send_table()
    sampling = SamplingConfig(max_new_tokens=engine.config.max_new_tokens)
    state.counts[:width] = 0
    state.limits[:width] = 1 << 30
    state.positions[:width] = position
    engine.run_step(width, sampling)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    state.counts[:width] = 0
    begin.record()
    for _ in range(count - 1):
        engine.run_step(width, sampling)
    end.record()
    torch.cuda.synchronize()
    engine.abandon()
    return float(begin.elapsed_time(end)) * 1e-3 / (count - 1)
