"""Tokens a second of a rollout on real shapes with random weights: Tables 5 to 9, Fig. 11.

Each point of the scale builds the arm's policy (adapter included, A and B random) and an engine on
it, and samples every batch once under device events: prompts of random tokens, every row to its
limit, no prompt shared, prefill counted. Captures and compilations are made before the clock.

    tokens_per_second_<point>_<batch>      new tokens of all rows over the whole rollout's time
    prefill_seconds_<point>_<batch>        the rollout of one token
    step_seconds_<point>_<batch>           (rollout - prefill) / (new tokens - 1)
    host_share_<point>                     percent of a step at the smallest batch in which the
                                           device waits for the host

With `parity_tokens`: log-probabilities of engine and trainer on the same tokens. With `scheduling`:
the prefill of groups of 8 with and without sharing, and completions of long-tailed lengths batched
continuously and statically.

Easy to get wrong: random weights draw random tokens, so an end token would end rows at random; here
none does. A first rollout captures steps and compiles kernels: it is not timed.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from repro.evidence.record import Estimate
from repro.models.decoder import is_projection
from repro.models.lora import adapter_layers, base_linear
from repro.models.policy import Policy
from repro.models.quantized_linear import QuantizedLinear
from repro.models.shapes import random_policy
from repro.procedures import Measured, Progress, Stopped
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.parity import sampler_trainer_parity
from repro.rollout.step_timing import time_steps
from repro.spec.config import RunConfig, SamplingConfig, derive_seed
from repro.spec.throughput import ThroughputPoint, ThroughputScale

# Group of the paper's GSM8K runs, and the prompt on which sharing is measured.
_GROUP, _SHARED_PROMPT, _SHARED_PROMPTS = 8, 1024, 16
# Lengths of the long tail: log-normal with median 300 and 99th percentile 4096.
_TAIL_MEDIAN, _TAIL_MOST, _TAIL_SLOTS, _TAIL_ROWS = 300, 4096, 64, 256
_NORMAL_99 = 2.3263
_COPY_BYTES = 2 << 30


def measure_throughput(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Sample every point and batch of the scale with the arm's policy.

    Raises
    ------
    RuntimeError
        Without a CUDA device of compute capability 8.0 or newer.
    Stopped
        When asked to stop; nothing is kept.
    """
    del folder, threads
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError(
            "throughput is measured on a CUDA device of compute capability 8.0 or newer; "
            "this machine has none"
        )
    scale: ThroughputScale = run.scale
    metrics: dict[str, Estimate] = {}
    effects: dict[str, Any] = {"linears": {}, "adapter_modules": 0, "replayed_steps": 0}
    work = {"seconds": 0.0, "bytes": 0.0, "flops": 0.0}
    for number, point in enumerate(scale.points):
        policy = random_policy(
            point.shape,
            weight_format=run.arm.weight_format,
            lora_rank=run.arm.lora_rank if run.arm.training == "lora" else 0,
            lora_alpha=run.arm.lora_alpha,
            seed=derive_seed(run.seed, "throughput", point.name),
            device="cuda",
        )
        _count(policy, effects)
        progress(f"{point.name}: {run.arm.label}", {"step": number, "steps": len(scale.points)})
        metrics |= _point(point, policy, run.seed, work, should_stop)
        if number == 0 and scale.parity_tokens:
            metrics |= _parity(policy, scale.parity_tokens, run.seed)
        if number == 0 and scale.scheduling:
            metrics |= _sharing(policy, run.seed) | _long_tail(policy, run.seed)
        del policy
        gc.collect()
        torch.cuda.empty_cache()
    effects["timing"] = {
        "method": "device_events",
        **work,
        "bytes_per_second": _copy_rate(),
        "flops_per_second": _matmul_rate(),
    }
    return Measured(metrics=metrics, effects=effects)


def _point(
    point: ThroughputPoint,
    policy: Policy,
    seed: int,
    work: dict[str, float],
    should_stop: Callable[[], bool],
) -> dict[str, Estimate]:
    decoder: Any = policy.decoder
    engine = Engine(
        policy,
        EngineConfig(
            slots=max(point.batches),
            max_positions=point.prompt_tokens + point.new_tokens,
            max_new_tokens=point.new_tokens,
            share_prompts=False,
            ignore_end=True,
        ),
    )
    new = point.new_tokens
    weight_bytes = policy.effects["base_bytes"] - _embedding_bytes(decoder)
    parameters = _product_parameters(decoder)
    found = {}
    for batch in point.batches:
        if should_stop():
            raise Stopped
        prompts = _prompts(batch, point.prompt_tokens, decoder.config.vocab_size, seed)
        # Short prompts are enough to capture the step; the prefill is warmed by its own timing.
        _timed(engine, [prompt[:16] for prompt in prompts], min(4, new))
        prefill = _timed(engine, prompts, 1)
        whole = _timed(engine, prompts, new)
        name = f"{point.name}_{batch}"
        found[f"tokens_per_second_{name}"] = _estimate(batch * new / whole, "tokens per second")
        found[f"prefill_seconds_{name}"] = _estimate(prefill, "seconds")
        if new > 1:
            step = (whole - prefill) / (new - 1)
            found[f"step_seconds_{name}"] = _estimate(step, "seconds")
        work["seconds"] += whole
        work["bytes"] += (new + 1) * weight_bytes
        work["flops"] += 2.0 * batch * parameters * (point.prompt_tokens + new - 1)
    batch = min(point.batches)
    if new > 1:
        bare = time_steps(engine, batch, point.prompt_tokens + new // 2, 64)
        share = 100 * max(0.0, 1 - bare / _value(found[f"step_seconds_{point.name}_{batch}"]))
        found[f"host_share_{point.name}"] = _estimate(share, "percent")
    engine.close()
    return found


def _parity(policy: Policy, tokens: int, seed: int) -> dict[str, Estimate]:
    """Compare log-probabilities of engine and trainer on four completions."""
    engine = Engine(
        policy,
        EngineConfig(slots=4, max_positions=64 + tokens, max_new_tokens=tokens, ignore_end=True),
    )
    decoder: Any = policy.decoder
    prompts = _prompts(4, 64, decoder.config.vocab_size, seed)
    sampling = SamplingConfig(max_new_tokens=tokens)
    batch = engine.sample(prompts, sampling, group_size=1, seeds=range(4))
    engine.close()
    parity = sampler_trainer_parity(policy, batch, 1.0)
    method = f"{parity.tokens} tokens, engine against the trainer's forward pass, bfloat16"
    values = {
        "parity_mean_exp_abs": (parity.mean_exp_abs, "ratio"),
        "parity_mean_abs": (parity.mean_abs, "nats"),
        "parity_max_abs": (parity.max_abs, "nats"),
        "parity_drift": (parity.second_half / max(parity.first_half, 1e-12), "ratio"),
    }
    return {
        name: Estimate(value=value, unit=unit, n=parity.tokens, method=method)
        for name, (value, unit) in values.items()
    }


def _sharing(policy: Policy, seed: int) -> dict[str, Estimate]:
    """Time the prefill of groups of 8 with the prompt's blocks shared and not."""
    decoder: Any = policy.decoder
    prompts = _prompts(_SHARED_PROMPTS, _SHARED_PROMPT, decoder.config.vocab_size, seed)
    seconds = {}
    for shared in (True, False):
        engine = Engine(
            policy,
            EngineConfig(
                slots=_SHARED_PROMPTS * _GROUP,
                max_positions=_SHARED_PROMPT + 8,
                max_new_tokens=8,
                share_prompts=shared,
                ignore_end=True,
            ),
        )
        _timed(engine, prompts, 1, group_size=_GROUP)
        seconds[shared] = _timed(engine, prompts, 1, group_size=_GROUP)
        engine.close()
    return {"sharing_speedup": _estimate(seconds[False] / seconds[True], "ratio")}


def _long_tail(policy: Policy, seed: int) -> dict[str, Estimate]:
    """Time completions of long-tailed lengths, batched continuously and statically."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "long tail"))
    spread = math.log(_TAIL_MOST / _TAIL_MEDIAN) / _NORMAL_99
    drawn = torch.randn(_TAIL_ROWS, generator=generator).mul(spread).exp().mul(_TAIL_MEDIAN)
    limits = drawn.round().clamp(1, _TAIL_MOST).int().tolist()
    decoder: Any = policy.decoder
    prompts = _prompts(_TAIL_ROWS, 256, decoder.config.vocab_size, seed)
    rates = {}
    for static in (False, True):
        engine = Engine(
            policy,
            EngineConfig(
                slots=_TAIL_SLOTS,
                max_positions=256 + _TAIL_MOST,
                max_new_tokens=_TAIL_MOST,
                static_batches=static,
                ignore_end=True,
            ),
        )
        _timed(engine, prompts[:_TAIL_SLOTS], 4)
        taken = _timed(engine, prompts, _TAIL_MOST, limits=limits)
        rates[static] = sum(limits) / taken
        engine.close()
    return {
        "long_tail_tokens_per_second": _estimate(rates[False], "tokens per second"),
        "long_tail_speedup": _estimate(rates[False] / rates[True], "ratio"),
    }


def _timed(
    engine: Engine,
    prompts: list[list[int]],
    new_tokens: int,
    *,
    group_size: int = 1,
    limits: list[int] | None = None,
) -> float:
    """Return the seconds of one rollout between two device events."""
    rows = len(prompts) * group_size
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    sampling = SamplingConfig(max_new_tokens=new_tokens)
    batch = engine.sample(
        prompts, sampling, group_size=group_size, seeds=range(rows), limits=limits
    )
    after.record()
    torch.cuda.synchronize()
    wanted = sum(limits) if limits is not None else rows * new_tokens
    drawn = sum(len(completion.token_ids) for completion in batch.completions)
    if drawn != wanted:
        raise RuntimeError(f"{drawn} tokens were drawn; the protocol has {wanted}")
    return float(before.elapsed_time(after)) * 1e-3


def _prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(derive_seed(seed, "prompts"))
    drawn: list[list[int]] = torch.randint(
        0, vocabulary, (count, length), generator=generator
    ).tolist()
    return drawn


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


def _estimate(value: float, unit: str) -> Estimate:
    return Estimate(value=value, unit=unit, method="one rollout between device events")


def _value(estimate: Estimate) -> float:
    return float(estimate.value or 0.0)


def _copy_rate() -> float:
    """Return the bytes a second of a large copy, read and written bytes together."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best(lambda: target.copy_(source))


def _matmul_rate() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / _best(lambda: a @ b)


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(9):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        times.append(float(before.elapsed_time(after)) * 1e-3)
    return min(times)
