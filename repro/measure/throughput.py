"""Tokens per second of a rollout on real shapes with random weights: Tables 5 to 9, Fig. 11.

The runs of one loaded model are carried out together: the seeds of an arm, which are repeats, and
the arms that differ by their adapter's rank alone. Each shape is loaded once, the adapters are
exchanged, an arm's steps are captured once, and every seed then times each batch under device
events, with prompts and random numbers of its own. Weights are the same for all (their values do
not matter to time). The protocol: prompts of random tokens, the adapter on (A and B random), every
row to its limit, no prompt shared, prefill counted.

    tokens_per_second_<point>_<batch>      new tokens of all rows over the whole rollout's time
    prefill_seconds_<point>_<batch>        the rollout of one token
    step_seconds_<point>_<batch>           (rollout - prefill) / (new tokens - 1)
    host_share_<point>                     percent of a step at the smallest batch in which the
                                           device waits for the host

A point with windows is not rolled out whole; see `rollout_cells`.

Each model is loaded into a device whose memory is free. A batch that does not fit has no metrics;
`effects["not_run"]` says so, by the plan before (`repro.measure.rollout_plan`) or by the allocator
after; the other batches are measured all the same. Only finished runs are kept, as records; those
that were stopped are measured again from the beginning. `effects["timed_retries"]` counts how often
the allocator retried under the clock.

Easy to get wrong: random weights draw random tokens, so an end token would end rows at random; here
none does. A first rollout captures steps and compiles kernels: it is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from kernels.timing import copy_rate, matmul_rate
from repro.evidence.procedure import Measured, Progress
from repro.measure.device_state import is_out_of_memory, needs_by_allocator, release, require_clean
from repro.measure.rollout_cells import Repeat, time_batch, time_host_share
from repro.measure.rollout_plan import cell_of, not_fitting
from repro.measure.step_measure import linears_of
from repro.models.lora import adapter_layers
from repro.models.policy import Policy
from repro.models.shapes import exchange_adapter, random_policy
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig, Products
from repro.rollout.step_timing import fill_cache
from repro.spec.arm import require
from repro.spec.config import RunConfig, derive_seed
from repro.spec.throughput import ThroughputPoint, ThroughputScale


def measure_throughput(run: RunConfig, **how: Any) -> Measured:
    """Carry out one run by itself; see `measure_seeds`."""
    return measure_seeds([run], **how)[0]


def measure_seeds(
    runs: Sequence[RunConfig],
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> list[Measured]:
    """Sample every point and batch of the scale with each arm's policy, once per seed.

    Parameters
    ----------
    runs
        Of one loaded model (`repro.spec.throughput.loaded_base`); they differ by seed, and by the
        rank of the adapter.

    Returns
    -------
    list of Measured, one per run

    Raises
    ------
    RuntimeError
        Without a CUDA device of compute capability 8.0 or newer.
    Stopped
        When asked to stop; nothing is kept.
    DeviceBusyError
        When the device's memory is in use.
    """
    del folder, threads
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError(
            "throughput is measured on a CUDA device of compute capability 8.0 or newer; "
            "this machine has none"
        )
    arms = _arms(runs)
    _measure_arms(arms, progress, should_stop)
    for arm in arms:
        arm.name_points_left_out()
    rates = {"bytes_per_second": copy_rate(), "flops_per_second": matmul_rate()}
    measured = {
        (arm.run.arm.name, repeat.seed): Measured(
            metrics=repeat.metrics, effects=arm.effects | _receipt(repeat, rates)
        )
        for arm in arms
        for repeat in arm.repeats
    }
    return [measured[run.arm.name, run.seed] for run in runs]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ArmAtHand:
    """An arm, by the first of its runs, and what it has measured so far."""

    run: RunConfig
    products: Products
    repeats: list[Repeat]
    effects: dict[str, Any]

    @property
    def not_run(self) -> dict[str, str]:
        """Batches and points that are left out, each with why."""
        left_out: dict[str, str] = self.effects["not_run"]
        return left_out

    @contextmanager
    def fit_or_left_out(self, *names: str) -> Iterator[None]:
        """Note parts whose work runs out of memory, and go on."""
        sentence = None
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            sentence = needs_by_allocator(error)
        # Outside the handler: its exception holds the frames, and so the tensors, that failed.
        if sentence is not None:
            self.not_run.update(dict.fromkeys(names, sentence))
            release()

    def fitting(self, point: ThroughputPoint) -> list[int]:
        """Return the batches of a point that are not known not to fit."""
        return [batch for batch in point.batches if cell_of(point, batch) not in self.not_run]

    def name_points_left_out(self) -> None:
        """Say of points without a batch that fits why they were not run."""
        for point in self.run.scale.points:
            if not self.fitting(point):
                self.not_run[point.name] = self.not_run[cell_of(point, min(point.batches))]


def _measure_arms(
    arms: Sequence[_ArmAtHand], progress: Progress, should_stop: Callable[[], bool]
) -> None:
    """Measure all points, each shape loaded once."""
    scale: ThroughputScale = arms[0].run.scale
    for shape, group in groupby(scale.points, key=lambda point: point.shape):
        points = list(group)
        policy: Policy | None = None
        for arm in arms:
            left = [point for point in points if arm.fitting(point)]
            if not left:
                continue
            cells = [cell_of(point, batch) for point in left for batch in arm.fitting(point)]
            if policy is None:
                require_clean()
            loaded, policy = policy, None
            with arm.fit_or_left_out(*cells):
                policy = _exchanged(loaded, arm.run) if loaded else _policy(arm.run, shape)
            del loaded
            if policy is None:
                continue
            _count(policy, arm.run, arm.effects)
            for point in left:
                number = 1 + scale.points.index(point)
                numbers = {"step": float(number), "steps": float(len(scale.points))}
                progress(f"{point.name}: {arm.run.arm.label}", numbers)
                _point(point, policy, arm, should_stop)
        del policy
        release()


def _arms(runs: Sequence[RunConfig]) -> list[_ArmAtHand]:
    """Return the arms of the runs, in order, each with what is known not to fit."""
    seeds: dict[str, list[int]] = {}
    for run in runs:
        seeds.setdefault(run.arm.name, []).append(run.seed)
    arms, total = [], torch.cuda.mem_get_info()[1]
    for name, numbers in seeds.items():
        first = next(run for run in runs if run.arm.name == name)
        foreign = name in first.scale.bitsandbytes
        products: Products = "bitsandbytes" if foreign else "own"
        effects = {
            "linears": {},
            "adapter_modules": 0,
            "products": products,
            "repeats_together": len(runs),
            "not_run": not_fitting(first.scale, first.arm, total),
            "timed_retries": {},
        }
        repeats = [Repeat(seed=seed) for seed in numbers]
        arms.append(_ArmAtHand(run=first, products=products, repeats=repeats, effects=effects))
    return arms


def _policy(run: RunConfig, shape: str) -> Policy:
    return random_policy(
        shape,
        weight_format=run.arm.weight_format,
        lora_rank=run.arm.lora_rank if run.arm.training == "lora" else 0,
        lora_alpha=run.arm.lora_alpha,
        seed=derive_seed("throughput", shape),
        device="cuda",
    )


def _exchanged(policy: Policy, run: RunConfig) -> Policy:
    """Return the loaded model with the adapter of another run's arm."""
    exchanged = exchange_adapter(
        policy,
        lora_rank=run.arm.lora_rank,
        lora_alpha=run.arm.lora_alpha,
        seed=derive_seed("throughput", run.arm.lora_rank),
    )
    release()
    return exchanged


def _receipt(repeat: Repeat, rates: dict[str, float]) -> dict[str, Any]:
    timing = {
        "method": "device_events",
        "seconds": repeat.seconds,
        "bytes": repeat.nbytes,
        "flops": repeat.flops,
        **rates,
    }
    return {"timing": timing} if repeat.seconds else {}


def _point(
    point: ThroughputPoint,
    policy: Policy,
    arm: _ArmAtHand,
    should_stop: Callable[[], bool],
) -> None:
    repeats = [repeat for repeat in arm.repeats if point.timed_by(repeat.seed)]
    batches = arm.fitting(point)
    engine: Engine | None = None
    while repeats and batches and engine is None:
        with arm.fit_or_left_out(cell_of(point, max(batches))):
            engine = _engine(point, max(batches), policy, arm.products)
            if point.windows:
                fill_cache(engine, repeats[0].seed)
        batches = arm.fitting(point)
    if engine is None:
        return
    whole = arm.run.scale.whole_batches(arm.run.arm.name, point.name) if point.windows else ()
    for batch in batches:
        cell = cell_of(point, batch)
        with arm.fit_or_left_out(cell):
            also_whole = batch in whole
            count = time_batch(point, batch, engine, repeats, should_stop, also_whole=also_whole)
            if count:
                arm.not_run[cell] = f"the allocator retried {count} times under the clock"
        if cell in arm.not_run:
            _forget(repeats, cell)
        else:
            arm.effects["timed_retries"][cell] = 0
    smallest = cell_of(point, min(point.batches))
    if smallest in arm.effects["timed_retries"] and not point.windows and point.new_tokens > 1:
        with arm.fit_or_left_out(f"host_share_{point.name}"):
            time_host_share(point, engine, repeats)
    engine.close()
    release()


def _forget(repeats: Sequence[Repeat], cell: str) -> None:
    """Take a batch's metrics out of what was measured."""
    for repeat in repeats:
        for name in [name for name in repeat.metrics if name.endswith(f"_{cell}")]:
            del repeat.metrics[name]


def _engine(point: ThroughputPoint, slots: int, policy: Policy, products: Products) -> Engine:
    """Return an engine with room for all rows at full length: rows that wait would be timed, too.

    Its layout of dense weights, A's rows below, frees memory that captures may need.
    """
    config = EngineConfig(
        slots=slots,
        max_positions=point.prompt_tokens + point.new_tokens,
        max_new_tokens=point.new_tokens,
        share_prompts=False,
        ignore_end=True,
        products=products,
    )
    blocks = slots * -(-config.max_positions // config.block_size) + 1
    engine = Engine(policy, replace(config, cache_blocks=blocks))
    release()
    return engine


def _count(policy: Policy, run: RunConfig, effects: dict[str, Any]) -> None:
    """Count the model's linear layers, and require the arm's adapter with a nonzero B."""
    for kind, count in linears_of(policy).items():
        effects["linears"][kind] = effects["linears"].get(kind, 0) + count
    for name, layer in adapter_layers(policy.model):
        A, B, _ = layer.adapter()
        require(
            len(A) == run.arm.lora_rank,
            f"the adapter of {name} has rank {len(A)}; arm {run.arm.name} has {run.arm.lora_rank}",
        )
        if not bool(B.any()):
            raise RuntimeError(f"B of {name} is zero: an adapter that does nothing is no adapter")
        effects["adapter_modules"] += 1
