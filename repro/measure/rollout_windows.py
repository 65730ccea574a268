"""A rollout's time from parts of it: the prefill, and short windows of its decode steps.

Under captured steps all of a step's time but attention's is the same at every position, and
attention's grows smoothly with it. So a long rollout need not be decoded whole: its decode steps
are cut into equal stretches, the steps in the middle of each are timed, and each stretch is taken
to run as its middle does,

    seconds = prefill + sum over stretches of steps * (seconds per step in the middle).

What is linear in the position comes out exactly. Left out is the host's own work between rounds
of steps, which the windows do not have; so some cells are also rolled out whole, and

    window_gain_<point>_<batch>   percent by which the windows' rate exceeds the whole rollout's

stands in the record, with a bar in the expectations.

Each seed has a prefill of prompts of its own, and windows with tokens and random numbers of its
own, over a cache that is filled with random values.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from repro.measure.rollout_parts import Repeat
from repro.measure.rollout_plan import cell_of
from repro.measure.rollout_timing import add_work, estimate, timed
from repro.rollout.engine import Engine
from repro.rollout.step_timing import fill_rows, time_steps
from repro.spec.config import derive_seed
from repro.spec.throughput import ThroughputPoint


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
