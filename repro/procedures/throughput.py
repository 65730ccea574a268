"""Tokens a second of a rollout on real shapes with random weights: Tables 5 to 9, Fig. 11.

The runs of one arm are carried out together, its seeds being repeats: each shape is loaded once,
its steps are captured once, and every seed then times each batch under device events, with prompts
and random numbers of its own. Weights are the same for all (their values do not matter to time).
The protocol: prompts of random tokens, the adapter on (A and B random), every row to its limit, no
prompt shared, prefill counted.

    tokens_per_second_<point>_<batch>      new tokens of all rows over the whole rollout's time
    prefill_seconds_<point>_<batch>        the rollout of one token, timed once for all seeds
    step_seconds_<point>_<batch>           (rollout - prefill) / (new tokens - 1)
    host_share_<point>                     percent of a step at the smallest batch in which the
                                           device waits for the host

What else the scale asks for is measured on the first shape (`rollout_checks`, `rollout_faults`).

Easy to get wrong: random weights draw random tokens, so an end token would end rows at random; here
none does. A first rollout captures steps and compiles kernels: it is not timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from repro.models.decoder import is_projection
from repro.models.lora import adapter_layers, base_linear
from repro.models.policy import Policy
from repro.models.quantized_linear import QuantizedLinear
from repro.models.shapes import random_policy
from repro.procedures import Measured, Progress, Stopped
from repro.procedures.rollout_checks import CHECKS
from repro.procedures.rollout_parts import Parts, Repeat, open_parts
from repro.procedures.rollout_timing import (
    copy_rate,
    estimate,
    matmul_rate,
    random_prompts,
    timed,
)
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig, Products
from repro.rollout.step_timing import time_steps
from repro.spec.config import RunConfig, derive_seed
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
    """Sample every point and batch of the scale with the arm's policy, once a seed.

    Parameters
    ----------
    runs
        Of one arm; they differ by seed alone.

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
    run = runs[0]
    scale: ThroughputScale = run.scale
    products: Products = "bitsandbytes" if run.arm.name in scale.bitsandbytes else "own"
    parts = open_parts(
        folder / "checkpoint",
        [run.seed for run in runs],
        {
            "linears": {},
            "adapter_modules": 0,
            "products": products,
            "repeats_together": len(runs),
        },
    )
    checks = scale.checks
    for shape, points in groupby(scale.points, key=lambda point: point.shape):
        left = [point for point in points if point.name not in parts.done]
        due = [(what, count) for what, count in checks if what not in parts.done]
        checks = ()
        if not left and not due:
            continue
        policy = _policy(run, shape)
        if f"shape {shape}" not in parts.done:
            _count(policy, parts.effects)
            parts.finish(f"shape {shape}")
        for point in left:
            number = 1 + scale.points.index(point)
            progress(f"{point.name}: {run.arm.label}", {"step": number, "steps": len(scale.points)})
            _point(point, policy, parts.repeats, products, should_stop)
            parts.finish(point.name)
        _check(due, policy, parts, progress, should_stop)
        del policy
        release()
    rates = {"bytes_per_second": copy_rate(), "flops_per_second": matmul_rate()}
    return [
        Measured(metrics=repeat.metrics, effects=parts.effects | _receipt(repeat, rates))
        for repeat in parts.repeats
    ]


def _policy(run: RunConfig, shape: str) -> Policy:
    return random_policy(
        shape,
        weight_format=run.arm.weight_format,
        lora_rank=run.arm.lora_rank if run.arm.training == "lora" else 0,
        lora_alpha=run.arm.lora_alpha,
        seed=derive_seed("throughput", shape),
        device="cuda",
    )


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
    repeats: Sequence[Repeat],
    products: Products,
    should_stop: Callable[[], bool],
) -> None:
    wanted = [repeat for repeat in repeats if point.timed_by(repeat.seed)]
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
            products=products,
        ),
    )
    for batch in point.batches:
        _batch(point, batch, engine, wanted, should_stop)
    batch = min(point.batches)
    if point.new_tokens > 1:
        position = point.prompt_tokens + point.new_tokens // 2
        count = max(2, min(_BARE_STEPS, point.new_tokens // 2 - 1))
        bare = time_steps(engine, batch, position, count)
        for repeat in wanted:
            step = repeat.metrics[f"step_seconds_{point.name}_{batch}"].value or 0.0
            share = 100 * max(0.0, 1 - bare / step)
            repeat.metrics[f"host_share_{point.name}"] = estimate(share, "percent")
    engine.close()
    release()


def _batch(
    point: ThroughputPoint,
    batch: int,
    engine: Engine,
    wanted: Sequence[Repeat],
    should_stop: Callable[[], bool],
) -> None:
    """Time one batch once a seed, after an untimed start."""
    decoder: Any = engine.policy.decoder
    vocabulary, new = decoder.config.vocab_size, point.new_tokens
    weight_bytes = engine.policy.effects["base_bytes"] - _embedding_bytes(decoder)
    parameters = _product_parameters(decoder)
    name = f"{point.name}_{batch}"
    prefill = 0.0
    for number, repeat in enumerate(wanted):
        if should_stop():
            raise Stopped
        prompts = random_prompts(batch, point.prompt_tokens, vocabulary, repeat.seed)
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
        repeat.seconds += whole
        repeat.nbytes += (new + 1) * weight_bytes
        repeat.flops += 2.0 * batch * parameters * (point.prompt_tokens + new - 1)


def _count(policy: Policy, effects: dict[str, Any]) -> None:
    """Count what stands in the model, and require the adapter to do something."""
    for name, module in policy.decoder.named_modules():
        if is_projection(name):
            base = base_linear(module)
            kind = base.weight_format if isinstance(base, QuantizedLinear) else "bf16"
            effects["linears"][kind] = effects["linears"].get(kind, 0) + 1
    for name, layer in adapter_layers(policy.model):
        if not bool(layer.adapter()[1].any()):
            raise RuntimeError(f"B of {name} is zero: an adapter that does nothing is no adapter")
        effects["adapter_modules"] += 1


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
