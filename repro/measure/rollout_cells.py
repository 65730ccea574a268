"""One batch of a throughput point, timed on an existing engine: whole, or by windows of steps.

A first rollout captures steps and compiles kernels: it is not timed, and what the allocator does
under it is not counted. Afterwards it must not have to give blocks back and ask again (a retry):
that waits for the device, and the time would be one of a device short of memory.

By windows
----------
Under captured steps all of a step's time but attention's is the same at every position, and
attention's grows smoothly with it. So a long rollout need not be decoded whole: its decode steps
are cut into equal stretches, the steps in the middle of each are timed, and each stretch is taken
to run as its middle does,

    seconds = prefill + sum over stretches of steps * (seconds per step in the middle).

What is linear in the position comes out exactly. Left out is the host's own work between rounds
of steps, which the windows do not have; so some cells are also rolled out whole, and

    window_gain_<point>_<batch>   percent by which the windows' rate exceeds the whole rollout's

is a metric of the record, with a bar in the expectations.

Each seed has a prefill of prompts of its own, and windows with tokens and random numbers of its
own, over a cache that is filled with random values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from repro.evidence.procedure import Stopped
from repro.evidence.record import Estimate
from repro.measure.device_state import retries
from repro.measure.rollout_plan import cell_of
from repro.models.decoder import is_projection
from repro.models.lora import base_linear
from repro.models.policy import Policy
from repro.rollout.engine import Engine
from repro.rollout.step_timing import fill_rows, time_steps
from repro.spec.config import SamplingConfig, derive_seed
from repro.spec.throughput import ThroughputPoint

_HOW = "one rollout between device events"
# Steps between two readings of a bare step's time.
_BARE_STEPS = 64


@dataclass(slots=True, eq=False)
class Repeat:
    """What one seed has measured so far: metrics, and the work behind them for the receipt."""

    seed: int
    metrics: dict[str, Estimate] = field(default_factory=dict)
    seconds: float = 0.0
    nbytes: float = 0.0
    flops: float = 0.0


def timed(
    engine: Engine,
    prompts: list[list[int]],
    new_tokens: int,
    *,
    group_size: int = 1,
    limits: Sequence[int] | None = None,
    first_seed: int = 0,
) -> float:
    """Return the seconds of one rollout between two device events.

    Parameters
    ----------
    limits
        Tokens of each row; None takes `new_tokens` for all.
    first_seed
        Of the rows' seeds, which follow one another.

    Raises
    ------
    RuntimeError
        When another number of tokens was drawn than the protocol has.
    """
    rows = len(prompts) * group_size
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    batch = engine.sample(
        prompts,
        SamplingConfig(max_new_tokens=new_tokens),
        group_size=group_size,
        seeds=range(first_seed, first_seed + rows),
        limits=limits,
    )
    after.record()
    torch.cuda.synchronize()
    expected = sum(limits) if limits is not None else rows * new_tokens
    drawn = sum(len(completion.token_ids) for completion in batch.completions)
    if drawn != expected:
        raise RuntimeError(f"{drawn} tokens were drawn; the protocol has {expected}")
    return float(before.elapsed_time(after)) * 1e-3


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of random tokens."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "prompts"))
    drawn: list[list[int]] = torch.randint(
        0, vocabulary, (count, length), generator=generator
    ).tolist()
    return drawn


def estimate(value: float, unit: str, method: str = _HOW, n: int = 1) -> Estimate:
    """Return an estimate without an interval."""
    return Estimate(value=value, unit=unit, method=method, n=n)


def add_work(
    repeat: Repeat, policy: Policy, *, seconds: float, rows: int, prompt_tokens: int, steps: int
) -> None:
    """Add a prefill and `steps` decode steps of `rows` rows to the work behind a seed's receipt.

    The weights are read once by the prefill and once per step; every token but the last is
    multiplied by all projections.
    """
    decoder: Any = policy.decoder
    weight_bytes = policy.effects["base_bytes"] - _embedding_bytes(decoder)
    repeat.seconds += seconds
    repeat.nbytes += (steps + 1) * weight_bytes
    repeat.flops += 2.0 * rows * _product_parameters(decoder) * (prompt_tokens + steps - 1)


def _embedding_bytes(decoder: Any) -> int:
    tied = decoder.lm_head.weight is decoder.model.embed_tokens.weight
    return 0 if tied else int(decoder.model.embed_tokens.weight.nbytes)


def _product_parameters(decoder: Any) -> int:
    """Return the parameters of all projections: what every token is multiplied by."""
    total = 0
    for name, module in decoder.named_modules():
        if is_projection(name):
            base = base_linear(module)
            total += base.in_features * base.out_features
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Timed steps in the middle of a stretch.

    Attributes
    ----------
    position
        Of the untimed step before the first timed one.
    stands_for
        Steps of the stretch.
    """

    position: int
    stands_for: int


def windows_of(point: ThroughputPoint) -> list[Window]:
    """Return the windows of a point: its decode steps after the first token's, cut evenly.

    The first token comes with the prefill, by a step at the last prompt position.
    """
    steps, count = point.new_tokens - 1, point.windows
    ends = [steps * i // count for i in range(count + 1)]
    return [
        Window(
            position=point.prompt_tokens + (low + high - point.window_steps) // 2 - 1,
            stands_for=high - low,
        )
        for low, high in pairwise(ends)
    ]


def warm_up(point: ThroughputPoint, batch: int, engine: Engine, prompts: list[list[int]]) -> None:
    """Compile, capture and run once what is timed next."""
    if not point.windows:
        # Short prompts are enough to capture the step; the prefill is warmed by a first one.
        timed(engine, [prompt[:16] for prompt in prompts], min(4, point.new_tokens))
        timed(engine, prompts, 1)
        return
    timed(engine, prompts, 1)
    fill_rows(engine, batch, 0)
    time_steps(engine, batch, windows_of(point)[0].position, 1 + point.window_steps)


def time_cell(
    point: ThroughputPoint,
    batch: int,
    engine: Engine,
    repeat: Repeat,
    prompts: list[list[int]],
) -> float:
    """Time one cell with the prompts and numbers of one seed; return the estimated seconds."""
    prefill = timed(engine, prompts, 1)
    fill_rows(engine, batch, repeat.seed)
    windows = windows_of(point)
    steps = [time_steps(engine, batch, w.position, 1 + point.window_steps) for w in windows]
    decode = sum(w.stands_for * step for w, step in zip(windows, steps, strict=True))
    taken = point.windows * point.window_steps
    seconds, new = prefill + decode, point.new_tokens
    name, metrics = cell_of(point, batch), repeat.metrics
    how = (
        f"estimated: the prefill, and {new - 1} decode steps, of which {taken} were timed without "
        f"the host's work between them, {point.window_steps} in the middle of each of "
        f"{point.windows} equal stretches; not rolled out whole"
    )
    rate = batch * new / seconds
    metrics[f"tokens_per_second_{name}"] = estimate(rate, "tokens per second", how, taken)
    metrics[f"prefill_seconds_{name}"] = estimate(prefill, "seconds")
    metrics[f"step_seconds_{name}"] = estimate(decode / (new - 1), "seconds", how, taken)
    add_work(
        repeat,
        engine.policy,
        seconds=prefill + point.window_steps * sum(steps),
        rows=batch,
        prompt_tokens=point.prompt_tokens,
        steps=1 + taken,
    )
    return seconds


def compare_with_whole(
    point: ThroughputPoint,
    batch: int,
    engine: Engine,
    repeat: Repeat,
    prompts: list[list[int]],
    estimated: float,
) -> None:
    """Roll the cell out whole, and note by how much the windows' rate exceeds the whole's."""
    whole = roll_out_whole(point, batch, engine, repeat, prompts)
    name, metrics = cell_of(point, batch), repeat.metrics
    rate = batch * point.new_tokens / whole
    metrics[f"tokens_per_second_whole_{name}"] = estimate(rate, "tokens per second")
    metrics[f"window_gain_{name}"] = estimate(
        100 * (whole / estimated - 1),
        "percent",
        "rate from windows over that of one whole rollout with the same prompts, less 1",
    )


def roll_out_whole(
    point: ThroughputPoint,
    batch: int,
    engine: Engine,
    repeat: Repeat,
    prompts: list[list[int]],
) -> float:
    """Roll the cell out whole, with the seeds of a repeat; return the seconds."""
    new, first_seed = point.new_tokens, derive_seed(repeat.seed, "rows") >> 1
    seconds = timed(engine, prompts, new, first_seed=first_seed)
    add_work(
        repeat,
        engine.policy,
        seconds=seconds,
        rows=batch,
        prompt_tokens=point.prompt_tokens,
        steps=new,
    )
    return seconds


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


def time_batch(
    point: ThroughputPoint,
    batch: int,
    engine: Engine,
    repeats: Sequence[Repeat],
    should_stop: Callable[[], bool],
    *,
    also_whole: bool,
) -> int:
    """Time a batch once per seed: by windows where the point has them, else whole.

    Parameters
    ----------
    also_whole
        Whether seed 0 rolls a batch that is timed by windows out whole as well.

    Returns
    -------
    int
        How often the allocator retried after the untimed start.

    Raises
    ------
    Stopped
        When asked to stop between two seeds.
    """
    decoder: Any = engine.policy.decoder
    prefill, before = 0.0, 0
    for repeat in repeats:
        if should_stop():
            raise Stopped
        tokens = point.prompt_tokens
        prompts = random_prompts(batch, tokens, decoder.config.vocab_size, repeat.seed)
        if repeat is repeats[0]:
            warm_up(point, batch, engine, prompts)
            before = retries()
            # Of a batch that is rolled out whole the prefill is timed once for all seeds.
            prefill = 0.0 if point.windows else timed(engine, prompts, 1)
        if not point.windows:
            _time_whole(point, batch, engine, repeat, prompts, prefill)
            continue
        estimated = time_cell(point, batch, engine, repeat, prompts)
        if also_whole and repeat.seed == 0:
            compare_with_whole(point, batch, engine, repeat, prompts, estimated)
    return retries() - before


def _time_whole(
    point: ThroughputPoint,
    batch: int,
    engine: Engine,
    repeat: Repeat,
    prompts: list[list[int]],
    prefill: float,
) -> None:
    """Roll a batch out whole with the prompts and numbers of one seed."""
    whole = roll_out_whole(point, batch, engine, repeat, prompts)
    new, name, metrics = point.new_tokens, cell_of(point, batch), repeat.metrics
    metrics[f"tokens_per_second_{name}"] = estimate(batch * new / whole, "tokens per second")
    metrics[f"prefill_seconds_{name}"] = estimate(prefill, "seconds")
    if new > 1:
        step = (whole - prefill) / (new - 1)
        metrics[f"step_seconds_{name}"] = estimate(step, "seconds")
