"""Time and memory of whole GRPO steps on real shapes: the rows of Table 3 and the memory claims.

Each point of the scale builds a policy with random weights, an engine on those same weights and an
optimiser, carries out steps, and lets go of everything. Per point `p` the metrics are

    step_seconds_p, rollout_seconds_p, logprob_seconds_p, update_seconds_p, optimizer_seconds_p,
    idle_seconds_p, reward_seconds_p, tokens_per_second_p,
    peak_bytes_p (reserved by the allocator, and the driver's context), predicted_bytes_p,
    prediction_error_p (percent of the measured peak),

and where the scale names a baseline format, `speedup_p` and `update_ratio_p`: the baseline's step
and update over the arm's. A point that does not fit has no metrics; `effects` says so.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from repro.evidence.record import Estimate
from repro.models.decoder import is_projection
from repro.models.lora import adapter_layers, base_linear
from repro.models.memory_plan import StepShape, fit_micro_tokens, plan_memory, weight_bytes
from repro.models.policy import Policy, trainable_parameters
from repro.models.quantized_linear import QuantizedLinear
from repro.models.shapes import random_policy
from repro.procedures import Measured, Progress, Stopped
from repro.procedures.step_phases import PHASES, Stepper, context_bytes, parameter_image
from repro.reward.grader import GraderPool
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.spec.arm import WeightFormat
from repro.spec.config import RunConfig, derive_seed
from repro.spec.shapes import shape_named
from repro.spec.step import StepPoint, StepScale

_TIMED = (*PHASES, "reward")


def measure_steps(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Measure every point of the run's scale.

    Raises
    ------
    RuntimeError
        Without a CUDA device.
    Stopped
        When asked to stop between points; nothing is kept.
    """
    del folder
    if not torch.cuda.is_available():
        raise RuntimeError("step_time measures a GPU; this process has no CUDA device")
    torch.set_num_threads(threads)
    scale: StepScale = run.scale
    metrics: dict[str, Estimate] = {}
    effects: dict[str, Any] = {"points": {}, "out_of_memory": []}
    with GraderPool(workers=2) as pool:
        for point in scale.points:
            if should_stop():
                raise Stopped
            formats = _formats(run, scale)
            found: dict[str, dict[str, Any]] = {}
            for weight_format in formats:
                progress(f"{point.name} {weight_format}", {})
                measured = _measure(run, point, weight_format, pool)
                if measured is None:
                    effects["out_of_memory"].append(f"{point.name} {weight_format}")
                else:
                    found[weight_format] = measured
            effects["points"][point.name] = found
            metrics |= _metrics(point, found, run.arm.weight_format, scale)
    effects |= _summary(effects["points"], run.arm.weight_format)
    return Measured(metrics=metrics, effects=effects)


def _formats(run: RunConfig, scale: StepScale) -> list[WeightFormat]:
    """Return the formats to measure, the baseline first."""
    own = run.arm.weight_format
    return [own] if scale.baseline in (None, own) else [scale.baseline, own]


def step_shape(
    point: StepPoint, weight_format: WeightFormat, rank: int, scale: StepScale, budget: int
) -> StepShape:
    """Return what the memory plan plans, with the micro-batch that it chose."""
    step = StepShape(
        shape=shape_named(point.model),
        weight_format=weight_format,
        rank=rank,
        prompts=point.prompts,
        group=point.group,
        prompt_tokens=point.prompt_tokens,
        completion_tokens=point.completion_tokens,
        slots=point.slots or point.rows,
        cache=point.cache,
        micro_tokens=point.micro_tokens or point.row_tokens,
        optimizer=scale.optimizer,
        checkpointing=point.checkpointing,
    )
    return step if point.micro_tokens else fit_micro_tokens(step, budget)


def _measure(
    run: RunConfig, point: StepPoint, weight_format: WeightFormat, pool: GraderPool
) -> dict[str, Any] | None:
    """Measure one point with one format; None when it does not fit its budget."""
    total = torch.cuda.get_device_properties(0).total_memory
    _let_go()
    context = context_bytes()
    budget = point.budget_bytes or total
    torch.cuda.set_per_process_memory_fraction(min(1.0, (budget - context) / total))
    torch.cuda.reset_peak_memory_stats()
    try:
        return _steps(run, point, weight_format, pool, budget)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        _let_go()


def _let_go() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _steps(
    run: RunConfig, point: StepPoint, weight_format: WeightFormat, pool: GraderPool, budget: int
) -> dict[str, Any]:
    scale: StepScale = run.scale
    rank = point.lora_rank or run.arm.lora_rank
    planned = step_shape(point, weight_format, rank, scale, budget)
    policy = random_policy(
        f"qwen2.5-{point.model}",
        weight_format=weight_format,
        lora_rank=rank,
        seed=derive_seed(run.seed, "weights"),
        device="cuda",
    )
    engine = Engine(policy, _engine_config(point, planned))
    _let_go()
    stepper = Stepper.build(
        policy, engine, pool, point, scale, seed=run.seed, micro_tokens=planned.micro_tokens
    )
    before = parameter_image(policy)
    steps = [stepper.step(number) for number in range(scale.warm_up + scale.steps)]
    moved = float((parameter_image(policy) - before).norm())
    timed = steps[scale.warm_up :]
    context = context_bytes()
    found = {
        "seconds": {name: median(step[name] for step in timed) for name in (*_TIMED, "total")},
        "grad_norm": [step["grad_norm"] for step in steps],
        "sampler_trainer_abs_diff_mean": timed[-1]["sampler_trainer_abs_diff_mean"],
        "moved": moved,
        "micro_tokens": stepper.micro_tokens,
        "fallbacks": stepper.fallbacks,
        "decode_steps": engine.statistics.decode_steps,
        "generated_tokens": engine.statistics.generated_tokens,
        "preemptions": engine.statistics.preemptions,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "context_bytes": context,
        "peak_bytes": torch.cuda.max_memory_reserved() + context,
        "plan": dataclasses.asdict(plan_memory(planned)) | {"step": point.name},
        "predicted_bytes": plan_memory(planned).peak,
        "weight_bytes": weight_bytes(planned),
        "linears": _linears(policy),
        "adapter_modules": len(dict(adapter_layers(policy.model))),
        "parameters_trainable": sum(p.numel() for p in trainable_parameters(policy).values()),
    }
    engine.close()
    return found


def _engine_config(point: StepPoint, planned: StepShape) -> EngineConfig:
    return EngineConfig(
        slots=planned.slots,
        cache_format=planned.cache,
        max_positions=point.row_tokens,
        max_new_tokens=point.completion_tokens,
        cache_blocks=planned.cache_blocks,
        ignore_end=True,
    )


def _linears(policy: Policy) -> dict[str, int]:
    """Return how many projections there really are of each format."""
    found: dict[str, int] = {}
    for name, layer in adapter_layers(policy.model):
        if not is_projection(name):
            raise ValueError(f"an adapter sits on {name}, which is no projection")
        base = base_linear(layer)
        kind = base.weight_format if isinstance(base, QuantizedLinear) else "bf16"
        found[kind] = found.get(kind, 0) + 1
    return found


def _metrics(
    point: StepPoint, found: dict[str, dict[str, Any]], own: str, scale: StepScale
) -> dict[str, Estimate]:
    if own not in found:
        return {}
    mine = found[own]
    how = f"median of {scale.steps} steps after {scale.warm_up}, device events"
    seconds = mine["seconds"]

    def estimate(value: float, unit: str, method: str = how) -> Estimate:
        return Estimate(value=value, unit=unit, n=scale.steps, method=method)

    metrics = {"step_seconds": estimate(seconds["total"], "seconds")}
    metrics |= {f"{name}_seconds": estimate(seconds[name], "seconds") for name in _TIMED}
    metrics["tokens_per_second"] = estimate(
        mine["generated_tokens"] / seconds["rollout"], "tokens per second"
    )
    peak, predicted = mine["peak_bytes"], mine["predicted_bytes"]
    metrics["peak_bytes"] = estimate(peak, "bytes", "most reserved by the allocator, and context")
    metrics["predicted_bytes"] = estimate(predicted, "bytes", "the memory plan's peak")
    metrics["prediction_error"] = estimate(
        100 * abs(predicted - peak) / peak, "percent", "|predicted - measured| of the measured peak"
    )
    other = found.get(scale.baseline or "")
    if other is not None and scale.baseline != own:
        base = other["seconds"]
        how = f"{scale.baseline} over {own}, one process, {how}"
        metrics["speedup"] = estimate(base["total"] / seconds["total"], "ratio", how)
        metrics["update_ratio"] = estimate(base["update"] / seconds["update"], "ratio", how)
        metrics["rollout_ratio"] = estimate(base["rollout"] / seconds["rollout"], "ratio", how)
    return {f"{name}_{point.name}": value for name, value in metrics.items()}


def _summary(points: dict[str, dict[str, dict[str, Any]]], own: str) -> dict[str, Any]:
    """Return the receipts of the whole run: formats, adapters, and a rate that must be possible."""
    mine = [found[own] for found in points.values() if own in found]
    if not mine:
        return {}
    rates = _device_rates()
    seconds = sum(item["seconds"]["rollout"] for item in mine)
    return {
        "linears": mine[0]["linears"],
        "adapter_modules": mine[0]["adapter_modules"],
        "parameters_trainable": mine[0]["parameters_trainable"],
        "timing": {
            "method": "device_events",
            "seconds": seconds,
            # Every decode step reads every projection once.
            "bytes": sum(item["decode_steps"] * item["weight_bytes"] for item in mine),
            "bytes_per_second": rates,
        },
    }


def _device_rates() -> float:
    """Return the bytes a second of a large copy, read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / min(times)
