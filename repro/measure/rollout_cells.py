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

Left out is the host's own work between rounds of steps, which the windows do not have; so some
cells are also rolled out whole, and `window_gain_<point>_<batch>` is the percent by which the
windows' rate exceeds the whole rollout's. Each seed has prompts, tokens and random numbers of its
own, over a cache that is filled with random values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from repro.evidence.procedure import Stopped
from repro.evidence.record import Estimate
from repro.measure.device_state import retries
from repro.measure.rollout_plan import cell_of
from repro.models.decoder import is_projection
from repro.models.lora import base_linear
from repro.rollout.engine import Engine
from repro.rollout.step_timing import fill_rows, time_steps
from repro.spec.config import SamplingConfig, derive_seed
from repro.spec.throughput_scale import ThroughputPoint

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
    engine: Engine, prompts: list[list[int]], new_tokens: int, *, first_seed: int = 0
) -> float:
    """Return the seconds of one rollout between two device events; rows' seeds are consecutive."""
    rows = len(prompts)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    completions = engine.sample(
        prompts,
        SamplingConfig(max_new_tokens=new_tokens),
        group_size=1,
        seeds=range(first_seed, first_seed + rows),
    )
    after.record()
    torch.cuda.synchronize()
    drawn = sum(len(completion.token_ids) for completion in completions)
    if drawn != rows * new_tokens:
        raise RuntimeError(f"{drawn} tokens were drawn; the protocol has {rows * new_tokens}")
    return float(before.elapsed_time(after)) * 1e-3


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of random tokens."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "prompts"))
    drawn: list[list[int]] = torch.randint(
        0, vocabulary, (count, length), generator=generator
    ).tolist()
    return drawn


class Window(NamedTuple):
    """Timed steps in the middle of a stretch of `stands_for` steps.

    An untimed step, at `position`, comes before them.
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


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """A batch of a point on an engine, with the prompts of one seed and what that has measured."""

    point: ThroughputPoint
    batch: int
    engine: Engine
    repeat: Repeat
    prompts: list[list[int]]

    def note(self, metric: str, value: float, unit: str, method: str = _HOW, n: int = 1) -> None:
        """Keep a metric of the cell."""
        name = f"{metric}_{cell_of(self.point, self.batch)}"
        self.repeat.metrics[name] = Estimate(value=value, unit=unit, method=method, n=n)

    def add_work(self, seconds: float, steps: int) -> None:
        """Add a prefill and `steps` decode steps to the work behind the seed's receipt.

        The weights are read once by the prefill and once per step; every token but the last is
        multiplied by all projections.
        """
        policy, decoder = self.engine.policy, cast(Any, self.engine.policy.decoder)
        embedding = decoder.model.embed_tokens.weight
        tied = decoder.lm_head.weight is embedding
        weight_bytes = policy.facts["base_bytes"] - (0 if tied else embedding.nbytes)
        named = decoder.named_modules()
        bases = [base_linear(module) for name, module in named if is_projection(name)]
        parameters = sum(base.in_features * base.out_features for base in bases)
        tokens = self.batch * (self.point.prompt_tokens + steps - 1)
        self.repeat.seconds += seconds
        self.repeat.nbytes += (steps + 1) * weight_bytes
        self.repeat.flops += 2.0 * tokens * parameters

    def warm_up(self) -> None:
        """Compile, capture and run once what is timed next."""
        if not self.point.windows:
            # Short prompts are enough to capture the step; the prefill is warmed by a first one.
            short = [prompt[:16] for prompt in self.prompts]
            timed(self.engine, short, min(4, self.point.new_tokens))
            timed(self.engine, self.prompts, 1)
            return
        timed(self.engine, self.prompts, 1)
        fill_rows(self.engine, self.batch, 0)
        self._steps(windows_of(self.point)[0])

    def _steps(self, window: Window) -> float:
        """Return the mean seconds of a window's steps."""
        return time_steps(self.engine, self.batch, window.position, 1 + self.point.window_steps)

    def time_windows(self) -> float:
        """Time the cell by windows; return the estimated seconds."""
        point = self.point
        prefill = timed(self.engine, self.prompts, 1)
        fill_rows(self.engine, self.batch, self.repeat.seed)
        windows = windows_of(point)
        steps = [self._steps(window) for window in windows]
        decode = sum(w.stands_for * step for w, step in zip(windows, steps, strict=True))
        taken, new = point.windows * point.window_steps, point.new_tokens
        how = (
            f"estimated: the prefill, and {new - 1} decode steps, of which {taken} were timed "
            f"without the host's work between them, {point.window_steps} in the middle of each of "
            f"{point.windows} equal stretches; not rolled out whole"
        )
        rate = self.batch * new / (prefill + decode)
        self.note("tokens_per_second", rate, "tokens per second", how, taken)
        self.note("prefill_seconds", prefill, "seconds")
        self.note("step_seconds", decode / (new - 1), "seconds", how, taken)
        self.add_work(prefill + point.window_steps * sum(steps), 1 + taken)
        return prefill + decode

    def roll_out(self) -> float:
        """Roll the cell out whole, with the seeds of its repeat; return the seconds."""
        new, first_seed = self.point.new_tokens, derive_seed(self.repeat.seed, "rows") >> 1
        seconds = timed(self.engine, self.prompts, new, first_seed=first_seed)
        self.add_work(seconds, new)
        return seconds

    def compare_with_whole(self, estimated: float) -> None:
        """Roll the cell out whole, and note by how much the windows' rate exceeds the whole's."""
        whole = self.roll_out()
        rate = self.batch * self.point.new_tokens / whole
        self.note("tokens_per_second_whole", rate, "tokens per second")
        how = "rate from windows over that of one whole rollout with the same prompts, less 1"
        self.note("window_gain", 100 * (whole / estimated - 1), "percent", how)

    def time_whole(self, prefill: float) -> None:
        """Roll the cell out whole; its prefill was timed before."""
        whole, new = self.roll_out(), self.point.new_tokens
        self.note("tokens_per_second", self.batch * new / whole, "tokens per second")
        self.note("prefill_seconds", prefill, "seconds")
        if new > 1:
            self.note("step_seconds", (whole - prefill) / (new - 1), "seconds")


def time_host_share(point: ThroughputPoint, engine: Engine, repeats: Sequence[Repeat]) -> None:
    """Compare steps at the smallest batch, which is timed already, with bare ones."""
    batch = min(point.batches)
    position = point.prompt_tokens + point.new_tokens // 2
    count = max(2, min(_BARE_STEPS, point.new_tokens // 2 - 1))
    bare = time_steps(engine, batch, position, count)
    for repeat in repeats:
        step = repeat.metrics[f"step_seconds_{cell_of(point, batch)}"].value or 0.0
        share = 100 * max(0.0, 1 - bare / step)
        host_share = Estimate(value=share, unit="percent", method=_HOW, n=1)
        repeat.metrics[f"host_share_{point.name}"] = host_share


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

    With `also_whole`, seed 0 rolls a batch that is timed by windows out whole as well. Returns how
    often the allocator retried after the untimed start.
    """
    decoder: Any = engine.policy.decoder
    prefill, before = 0.0, 0
    for repeat in repeats:
        if should_stop():
            raise Stopped
        tokens = point.prompt_tokens
        prompts = random_prompts(batch, tokens, decoder.config.vocab_size, repeat.seed)
        cell = Cell(point, batch, engine, repeat, prompts)
        if repeat is repeats[0]:
            cell.warm_up()
            before = retries()
            # Of a batch that is rolled out whole the prefill is timed once for all seeds.
            prefill = 0.0 if point.windows else timed(engine, prompts, 1)
        if not point.windows:
            cell.time_whole(prefill)
            continue
        estimated = cell.time_windows()
        if also_whole and repeat.seed == 0:
            cell.compare_with_whole(estimated)
    return retries() - before
