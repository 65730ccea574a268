"""The way of real weights at full size: a checkpoint written, quantised, loaded and stepped.

A checkpoint of a real shape with random weights is written to disk by transformers, quantised in a
stream, loaded, and one RL step is made on it. Time and bytes of each stage:

    build_seconds, source_bytes                         written by transformers
    quantise_seconds, quantised_bytes
    quantise_host_bytes, quantise_device_bytes          peaks of the quantising process
    load_seconds                                        to the first sampled token, second start
    first_load_seconds                                  the same when kernels are compiled, too
    load_host_bytes, load_device_bytes
    training_step_seconds                               a whole step on the loaded policy

Every stage runs in a process of its own, which makes a peak of the host's memory the stage's:
Python, torch and the driver's share are in it, earlier stages are not. The driver counts the memory
of all processes together: what was in use before a stage began is taken off its peak.

Easy to get wrong: files that were just written lie in the host's page cache, which is what "a warm
file cache" means here; pages that the system caches are not the process's memory.
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.measure.device_state import release
from repro.measure.memory_use import context_bytes, driver_bytes, host_peak_bytes, reset_peak
from repro.measure.step_measure import linears_of
from repro.measure.step_training import begin, parameter_image, timed_step, training_of, warm_up
from repro.models.checkpoint import write_quantized
from repro.models.policy import Policy, load_policy, trainable_parameters
from repro.models.random_policy import shape_config
from repro.reward.grader import GraderPool
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.spec.arm import Arm
from repro.spec.config import RunConfig, SamplingConfig, derive_seed
from repro.spec.step_scale import CheckpointScale, StepPoint, StepScale

Report = dict[str, Any]
RunStage = Callable[..., Report]
_METHOD = "one run of the stage in a process of its own, by the clock"
# As the published 7B checkpoint is cut; transformers' own default would write a single file.
_SHARD = "4GB"


def measure_checkpoint(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Carry a checkpoint of the scale's shape through every stage, on a CUDA device."""
    del threads
    if not torch.cuda.is_available():
        raise RuntimeError("checkpoint_path measures a GPU; this process has no CUDA device")
    scale: CheckpointScale = run.scale
    shape = shape_config(f"qwen2.5-{scale.model}")
    place = folder / "checkpoint"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)

    def stage(work: Callable[..., Report], **settings: Any) -> Report:
        if should_stop():
            raise Stopped
        progress(work.__name__, {})
        release()
        return in_own_process(work, held=driver_bytes(), **settings)

    try:
        return carry_through(stage, place, shape, scale, run.seed, "cuda")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def in_own_process(work: Callable[..., Report], **settings: Any) -> Report:
    """Return what a stage reports that runs in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, **settings).result()


def carry_through(
    stage: RunStage,
    place: Path,
    shape: dict[str, Any],
    scale: CheckpointScale,
    seed: int,
    device: str,
) -> Measured:
    """Run the stages in their order and return what they measured."""
    source, quantised = str(place / "source"), str(place / "quantised")
    built = stage(build, source=source, shape=shape, seed=seed, device=device)
    made = stage(quantise, source=source, quantised=quantised, device=device)
    shutil.rmtree(source)
    settings = {"quantised": quantised, "scale": scale, "seed": seed, "device": device}
    first = stage(load, **settings, step=False)
    loaded = stage(load, **settings, step=True)
    values = {
        "build_seconds": built["seconds"],
        "source_bytes": built["bytes"],
        "quantise_seconds": made["seconds"],
        "quantised_bytes": made["bytes"],
        "quantise_host_bytes": made["host_bytes"],
        "quantise_device_bytes": made["device_bytes"],
        "first_load_seconds": first["seconds"],
        "load_seconds": loaded["seconds"],
        "load_host_bytes": loaded["host_bytes"],
        "load_device_bytes": loaded["device_bytes"],
        "training_step_seconds": loaded["step"]["total"],
    }
    if not loaded["step"]["moved"] > 0:
        raise RuntimeError("the step moved no trained tensor")
    metrics = {
        name: Estimate(
            value=float(value),
            unit="seconds" if name.endswith("seconds") else "bytes",
            method=_METHOD,
        )
        for name, value in values.items()
    }
    facts = {
        "linears": loaded["linears"],
        "linears_quantised": made["linears"],
        "source_shards": built["shards"],
        "parameters_trainable": loaded["parameters_trainable"],
        "trained_change_l2": loaded["step"]["moved"],
        "stages": {"build": built, "quantise": made, "first_load": first, "load": loaded},
    }
    return Measured(metrics=metrics, facts=facts)


def build(*, source: str, shape: dict[str, Any], seed: int, device: str, held: int = 0) -> Report:
    """Write a 16-bit checkpoint of a shape with random weights into the folder `source`."""
    del held
    began = time.perf_counter()
    torch.manual_seed(derive_seed(seed, "checkpoint"))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**shape), dtype=torch.bfloat16
        )
    model.save_pretrained(source, max_shard_size=_SHARD)
    shards = sorted(Path(source).glob("*.safetensors"))
    return {
        "seconds": time.perf_counter() - began,
        "bytes": sum(shard.stat().st_size for shard in shards),
        "shards": len(shards),
    }


def quantise(*, source: str, quantised: str, device: str, held: int = 0) -> Report:
    """Quantise the folder `source` into `quantised`, as a user would.

    `held`: bytes of the device in use before, by other processes.
    """
    reset_peak()
    began = time.perf_counter()
    written = write_quantized(source, quantised, device=device)
    return {
        "seconds": time.perf_counter() - began,
        "bytes": written.bytes_written,
        "linears": written.linears,
        "host_bytes": host_peak_bytes(),
        "device_bytes": _device_bytes(held),
    }


def load(
    *, quantised: str, scale: CheckpointScale, seed: int, device: str, step: bool, held: int = 0
) -> Report:
    """Load a quantised folder, sample a token, and with `step` make one whole RL step."""
    reset_peak()
    began = time.perf_counter()
    policy = load_policy(
        quantised,
        weight_format="nvfp4",
        training="lora",
        lora_rank=32,
        lora_alpha=32.0,
        compute_dtype="bfloat16" if device == "cuda" else "float32",
        seed=seed,
        device=device,
    )
    loaded = time.perf_counter()
    config = EngineConfig(
        slots=scale.group,
        max_positions=scale.prompt_tokens + scale.completion_tokens,
        max_new_tokens=scale.completion_tokens,
        ignore_end=True,
    )
    engine = Engine(policy, config)
    prompt = [list(range(1, scale.prompt_tokens + 1))]
    engine.sample(prompt, SamplingConfig(max_new_tokens=1), group_size=1, seeds=[seed])
    report: Report = {
        "seconds": time.perf_counter() - began,
        "policy_seconds": loaded - began,
        "host_bytes": host_peak_bytes(),
        "linears": linears_of(policy),
        "parameters_trainable": sum(p.numel() for p in trainable_parameters(policy).values()),
    }
    if step:
        report["step"] = _step(policy, engine, scale, seed)
    report["device_bytes"] = _device_bytes(held)
    engine.close()
    return report


def _step(policy: Policy, engine: Engine, scale: CheckpointScale, seed: int) -> Report:
    """Warm up, make one step, and say how far it moved the adapter."""
    point = StepPoint(
        name="step", model="7b", group=scale.group, prompt_tokens=scale.prompt_tokens,
        completion_tokens=scale.completion_tokens,
    )  # fmt: skip
    steps = StepScale(points=(point,))
    arm = Arm(name="step", label="a loaded checkpoint", weight_format="nvfp4")
    with GraderPool(workers=1) as pool:
        t = training_of(
            policy, engine, pool, arm, point, steps, seed=seed, micro_tokens=4 * point.row_tokens
        )
        state = begin(t)
        before = parameter_image(policy)
        warm_up(t, state, steps.warm_up_tokens)
        seconds = timed_step(t, state)
        return seconds | {"moved": float((parameter_image(policy) - before).norm())}


def _device_bytes(held: int) -> int:
    """Return the most that the allocator reserved, and what else came into use on the device."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.max_memory_reserved()) + context_bytes() - held
