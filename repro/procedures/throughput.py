"""Tokens a second of a rollout on real shapes with random weights: Tables 5 to 9, Fig. 11.

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

A point with windows is not rolled out whole; see `rollout_windows`. What else the scale asks for
is measured on the first shape (`rollout_checks`, `rollout_faults`).

Easy to get wrong: random weights draw random tokens, so an end token would end rows at random; here
none does. A first rollout captures steps and compiles kernels: it is not timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from repro.models.decoder import is_projection
from repro.models.lora import adapter_layers, base_linear
from repro.models.policy import Policy
from repro.models.quantized_linear import QuantizedLinear
from repro.models.shapes import exchange_adapter, random_policy
from repro.procedures import Measured, Progress, Stopped
from repro.procedures.rollout_checks import CHECKS
from repro.procedures.rollout_parts import Parts, Repeat, open_parts
from repro.procedures.rollout_timing import (
    add_work,
    copy_rate,
    estimate,
    matmul_rate,
    random_prompts,
    timed,
)
from repro.procedures.rollout_windows import compare_with_whole, time_cell, warm_up
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig, Products
from repro.rollout.step_timing import fill_cache, time_steps
from repro.spec.config import RunConfig, derive_seed, require
from repro.spec.throughput import Check, ThroughputPoint, ThroughputScale

# Steps between two readings of a bare step's time.
_BARE_STEPS = 64


def measure_throughput(run: RunConfig, **how: Any) -> Measured:
    """Carry out one run by itself; see `measure_repeats`."""
    return measure_repeats([run], **how)[0]


def measure_repeats(
    runs: Sequence[RunConfig],
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> list[Measured]:
    """Sample every point and batch of the scale with each arm's policy, once a seed.

    Parameters
    ----------
    runs
        Of one loaded model (`repro.spec.throughput.loaded_base`); they differ by seed, and by the
        rank of the adapter.

    Returns
    -------
    list of Measured, one a run

    Raises
    ------
    RuntimeError
        Without a CUDA device of compute capability 8.0 or newer.
    Stopped
        When asked to stop; finished points and checks are kept in `folder`.
    """
    del threads
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError(
            "throughput is measured on a CUDA device of compute capability 8.0 or newer; "
            "this machine has none"
        )
    scale: ThroughputScale = runs[0].scale
    arms = _arms(runs, folder / "checkpoint")
    checks = scale.checks
    for shape, group in groupby(scale.points, key=lambda point: point.shape):
        points = list(group)
        policy: Policy | None = None
        for arm in arms:
            left = [point for point in points if point.name not in arm.parts.done]
            due = [(what, count) for what, count in checks if what not in arm.parts.done]
            if not left and not due:
                continue
            policy = _policy(arm.run, shape) if policy is None else _exchanged(policy, arm.run)
            _measure_shape(arm, shape, policy, left, due, progress, should_stop)
        checks = ()
        del policy
        release()
    rates = {"bytes_per_second": copy_rate(), "flops_per_second": matmul_rate()}
    found = {
        (arm.run.arm.name, repeat.seed): Measured(
            metrics=repeat.metrics, effects=arm.parts.effects | _receipt(repeat, rates)
        )
        for arm in arms
        for repeat in arm.parts.repeats
    }
    return [found[run.arm.name, run.seed] for run in runs]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ArmAtHand:
    """An arm, by the first of its runs, and what it has measured so far."""

    run: RunConfig
    products: Products
    parts: Parts


def _arms(runs: Sequence[RunConfig], folder: Path) -> list[_ArmAtHand]:
    """Return the arms of the runs, in order, each with its parts in a folder of its own."""
    seeds: dict[str, list[int]] = {}
    for run in runs:
        seeds.setdefault(run.arm.name, []).append(run.seed)
    arms = []
    for name, numbers in seeds.items():
        first = next(run for run in runs if run.arm.name == name)
        foreign = name in first.scale.bitsandbytes
        products: Products = "bitsandbytes" if foreign else "own"
        effects = {
            "linears": {},
            "adapter_modules": 0,
            "products": products,
            "repeats_together": len(runs),
        }
        parts = open_parts(folder / name, numbers, effects)
        arms.append(_ArmAtHand(run=first, products=products, parts=parts))
    return arms


def _measure_shape(
    arm: _ArmAtHand,
    shape: str,
    policy: Policy,
    left: Sequence[ThroughputPoint],
    due: Sequence[tuple[Check, int]],
    progress: Progress,
    should_stop: Callable[[], bool],
) -> None:
    """Measure the points of one shape that are left for an arm, and the checks that are due."""
    parts, scale = arm.parts, arm.run.scale
    if f"shape {shape}" not in parts.done:
        _count(policy, arm.run, parts.effects)
        parts.finish(f"shape {shape}")
    for point in left:
        number = 1 + scale.points.index(point)
        progress(f"{point.name}: {arm.run.arm.label}", {"step": number, "steps": len(scale.points)})
        _point(point, policy, arm, should_stop)
        parts.finish(point.name)
    _check(due, policy, parts, progress, should_stop)


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


def release() -> None:
    """Give back device memory that nothing refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()


def _check(
    due: Sequence[tuple[Check, int]],
    policy: Policy,
    parts: Parts,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> None:
    """Make the checks that are due on `policy`, each with the seeds that it asks for."""
    for what, count in due:
        wanted = [repeat for repeat in parts.repeats if repeat.seed < count]
        if not wanted:
            continue
        if should_stop():
            raise Stopped
        progress(what, {})
        found = CHECKS[what](policy, [repeat.seed for repeat in wanted])
        for repeat, metrics in zip(wanted, found, strict=True):
            repeat.metrics |= metrics
        parts.finish(what)
        release()


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
    wanted = [repeat for repeat in arm.parts.repeats if point.timed_by(repeat.seed)]
    if not wanted:
        return
    engine = Engine(
        policy,
        EngineConfig(
            slots=max(point.batches),
            max_positions=point.prompt_tokens + point.new_tokens,
            max_new_tokens=point.new_tokens,
            share_prompts=False,
            ignore_end=True,
            products=arm.products,
        ),
    )
    if point.windows:
        # The engine laid dense weights anew, A's rows below; what that freed, captures may need.
        release()
        fill_cache(engine, wanted[0].seed)
        whole = arm.run.scale.whole_batches(arm.run.arm.name, point.name)
        for batch in point.batches:
            _windowed(point, batch, engine, wanted, should_stop, also_whole=batch in whole)
    else:
        for batch in point.batches:
            _batch(point, batch, engine, wanted, should_stop)
        if point.new_tokens > 1:
            _host_share(point, engine, wanted)
    engine.close()
    release()


def _host_share(point: ThroughputPoint, engine: Engine, wanted: Sequence[Repeat]) -> None:
    """Compare steps at the smallest batch with bare ones."""
    batch = min(point.batches)
    position = point.prompt_tokens + point.new_tokens // 2
    count = max(2, min(_BARE_STEPS, point.new_tokens // 2 - 1))
    bare = time_steps(engine, batch, position, count)
    for repeat in wanted:
        step = repeat.metrics[f"step_seconds_{point.name}_{batch}"].value or 0.0
        share = 100 * max(0.0, 1 - bare / step)
        repeat.metrics[f"host_share_{point.name}"] = estimate(share, "percent")


def _prompts(point: ThroughputPoint, batch: int, engine: Engine, seed: int) -> list[list[int]]:
    decoder: Any = engine.policy.decoder
    return random_prompts(batch, point.prompt_tokens, decoder.config.vocab_size, seed)


def _windowed(
    point: ThroughputPoint,
    batch: int,
    engine: Engine,
    wanted: Sequence[Repeat],
    should_stop: Callable[[], bool],
    *,
    also_whole: bool,
) -> None:
    """Time one batch by windows once a seed, after an untimed start; and whole by seed 0."""
    for number, repeat in enumerate(wanted):
        if should_stop():
            raise Stopped
        prompts = _prompts(point, batch, engine, repeat.seed)
        if number == 0:
            warm_up(point, batch, engine, prompts)
        estimated = time_cell(point, batch, engine, repeat, prompts)
        if also_whole and repeat.seed == 0:
            compare_with_whole(point, batch, engine, repeat, prompts, estimated)


def _batch(
    point: ThroughputPoint,
    batch: int,
    engine: Engine,
    wanted: Sequence[Repeat],
    should_stop: Callable[[], bool],
) -> None:
    """Time one batch whole once a seed, after an untimed start; its prefill once for all seeds."""
    new, name = point.new_tokens, f"{point.name}_{batch}"
    prefill = 0.0
    for number, repeat in enumerate(wanted):
        if should_stop():
            raise Stopped
        prompts = _prompts(point, batch, engine, repeat.seed)
        seeds_from = derive_seed(repeat.seed, "rows") >> 1
        if number == 0:
            # Short prompts are enough to capture the step; the prefill is warmed by a first one.
            timed(engine, [prompt[:16] for prompt in prompts], min(4, new))
            timed(engine, prompts, 1)
            prefill = timed(engine, prompts, 1)
        whole = timed(engine, prompts, new, first_seed=seeds_from)
        metrics = repeat.metrics
        metrics[f"tokens_per_second_{name}"] = estimate(batch * new / whole, "tokens per second")
        metrics[f"prefill_seconds_{name}"] = estimate(prefill, "seconds")
        if new > 1:
            step = (whole - prefill) / (new - 1)
            metrics[f"step_seconds_{name}"] = estimate(step, "seconds")
        add_work(
            repeat,
            engine.policy,
            seconds=whole,
            rows=batch,
            prompt_tokens=point.prompt_tokens,
            steps=new,
        )


def _count(policy: Policy, run: RunConfig, effects: dict[str, Any]) -> None:
    """Count what stands in the model, and require the arm's adapter, and that it does something."""
    for name, module in policy.decoder.named_modules():
        if is_projection(name):
            base = base_linear(module)
            kind = base.weight_format if isinstance(base, QuantizedLinear) else "bf16"
            effects["linears"][kind] = effects["linears"].get(kind, 0) + 1
    for name, layer in adapter_layers(policy.model):
        A, B, _ = layer.adapter()
        require(
            len(A) == run.arm.lora_rank,
            f"the adapter of {name} has rank {len(A)}; arm {run.arm.name} has {run.arm.lora_rank}",
        )
        if not bool(B.any()):
            raise RuntimeError(f"B of {name} is zero: an adapter that does nothing is no adapter")
        effects["adapter_modules"] += 1
