"""One batch of a throughput point, timed on an existing engine: whole, or by windows of steps.

A first rollout captures steps and compiles kernels: it is not timed, and what the allocator does
under it is not counted. Afterwards it must not have to give blocks back and ask again (a retry):
that waits for the device, and the time would be one of a device short of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from repro.evidence.procedure import Stopped
from repro.measure.device_state import retries
from repro.measure.rollout_parts import Repeat
from repro.measure.rollout_plan import cell_of
from repro.measure.rollout_timing import estimate, random_prompts, timed
from repro.measure.rollout_windows import compare_with_whole, roll_out_whole, time_cell, warm_up
from repro.rollout.engine import Engine
from repro.rollout.step_timing import time_steps
from repro.spec.throughput import ThroughputPoint

# Steps between two readings of a bare step's time.
_BARE_STEPS = 64


def time_host_share(point: ThroughputPoint, engine: Engine, repeats: Sequence[Repeat]) -> None:
    """Compare steps at the smallest batch, which is timed already, with bare ones."""
    batch = min(point.batches)
    position = point.prompt_tokens + point.new_tokens // 2
    count = max(2, min(_BARE_STEPS, point.new_tokens // 2 - 1))
    bare = time_steps(engine, batch, position, count)
    for repeat in repeats:
        step = repeat.metrics[f"step_seconds_{cell_of(point, batch)}"].value or 0.0
        share = 100 * max(0.0, 1 - bare / step)
        repeat.metrics[f"host_share_{point.name}"] = estimate(share, "percent")


def _repeats(
    point: ThroughputPoint,
    batch: int,
    engine: Engine,
    repeats: Sequence[Repeat],
    should_stop: Callable[[], bool],
) -> Iterator[tuple[bool, Repeat, list[list[int]]]]:
    """Yield each repeat with its prompts and whether it is the first; raise `Stopped` if asked."""
    decoder: Any = engine.policy.decoder
    vocabulary = decoder.config.vocab_size
    for number, repeat in enumerate(repeats):
        if should_stop():
            raise Stopped
        yield (
            number == 0,
            repeat,
            random_prompts(batch, point.prompt_tokens, vocabulary, repeat.seed),
        )


def time_by_windows(
    point: ThroughputPoint,
    batch: int,
    engine: Engine,
    repeats: Sequence[Repeat],
    should_stop: Callable[[], bool],
    *,
    also_whole: bool,
) -> int:
    """Time a batch by windows once per seed; also whole by seed 0 where asked.

    Returns
    -------
    int
        How often the allocator retried after the untimed start.

    Raises
    ------
    Stopped
        When asked to stop between two seeds.
    """
    before = 0
    for is_first, repeat, prompts in _repeats(point, batch, engine, repeats, should_stop):
        if is_first:
            warm_up(point, batch, engine, prompts)
            before = retries()
        estimated = time_cell(point, batch, engine, repeat, prompts)
        if also_whole and repeat.seed == 0:
            compare_with_whole(point, batch, engine, repeat, prompts, estimated)
    return retries() - before


def time_whole(
    point: ThroughputPoint,
    batch: int,
    engine: Engine,
    repeats: Sequence[Repeat],
    should_stop: Callable[[], bool],
) -> int:
    """Time a batch whole once per seed, and its prefill once for all seeds.

    Returns
    -------
    int
        How often the allocator retried after the untimed start.

    Raises
    ------
    Stopped
        When asked to stop between two seeds.
    """
    new, name = point.new_tokens, cell_of(point, batch)
    prefill, before = 0.0, 0
    for is_first, repeat, prompts in _repeats(point, batch, engine, repeats, should_stop):
        if is_first:
            # Short prompts are enough to capture the step; the prefill is warmed by a first one.
            timed(engine, [prompt[:16] for prompt in prompts], min(4, new))
            timed(engine, prompts, 1)
            before = retries()
            prefill = timed(engine, prompts, 1)
        whole = roll_out_whole(point, batch, engine, repeat, prompts)
        metrics = repeat.metrics
        metrics[f"tokens_per_second_{name}"] = estimate(batch * new / whole, "tokens per second")
        metrics[f"prefill_seconds_{name}"] = estimate(prefill, "seconds")
        if new > 1:
            step = (whole - prefill) / (new - 1)
            metrics[f"step_seconds_{name}"] = estimate(step, "seconds")
    return retries() - before
