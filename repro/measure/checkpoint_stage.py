"""The stages of a checkpoint's way, each to be run in a process of its own.

    build      a model of random weights, written by transformers in sharded safetensors
    quantise   streamed into NVFP4, tensor by tensor
    load       from disk to the first sampled token, and then one whole RL step

    python -m repro.measure.checkpoint_stage STAGE '{"source": ..., ...}' HELD

prints what was measured as JSON on its last line; HELD are bytes of the device that were in use
before, by other processes. A process of its own is what makes a peak of the
host's memory the stage's: Python, torch and the driver's share are in it, earlier stages are not.

Easy to get wrong: files that were just written lie in the host's page cache, which is what "a warm
file cache" means here; pages that the system caches are not the process's memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from repro.measure.memory_use import context_bytes, host_peak_bytes, reset_peak
from repro.measure.step_measure import linears_of
from repro.measure.step_training import begin, parameter_image, timed_step, training_of, warm_up
from repro.models.checkpoint import write_quantized
from repro.models.policy import load_policy, trainable_parameters
from repro.reward.grader import GraderPool
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.spec.arm import Arm
from repro.spec.config import SamplingConfig, derive_seed
from repro.spec.step_scale import StepPoint, StepScale

# As the published 7B checkpoint is cut; transformers' own default would write a single file.
_SHARD = "4GB"

Report = dict[str, Any]


def build(*, source: str, shape: dict[str, Any], seed: int, device: str) -> Report:
    """Write a 16-bit checkpoint of a shape with random weights into the folder `source`."""
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


def quantise(*, source: str, quantised: str, device: str) -> Report:
    """Quantise the folder `source` into `quantised`, as a user would."""
    reset_peak()
    began = time.perf_counter()
    written = write_quantized(source, quantised, device=device)
    return {
        "seconds": time.perf_counter() - began,
        "bytes": written.bytes_written,
        "linears": written.linears,
        "host_bytes": host_peak_bytes(),
        "device_bytes": _device_bytes(),
    }


def load(
    *,
    quantised: str,
    seed: int,
    device: str,
    group: int,
    prompt_tokens: int,
    completion_tokens: int,
    step: bool,
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
        slots=group,
        max_positions=prompt_tokens + completion_tokens,
        max_new_tokens=completion_tokens,
        ignore_end=True,
    )
    engine = Engine(policy, config)
    prompt = [list(range(1, prompt_tokens + 1))]
    first = engine.sample(prompt, SamplingConfig(max_new_tokens=1), group_size=1, seeds=[seed])
    if len(first.completions[0].token_ids) != 1:
        raise RuntimeError(f"{len(first.completions[0].token_ids)} tokens came; 1 was asked for")
    report: Report = {
        "seconds": time.perf_counter() - began,
        "policy_seconds": loaded - began,
        "host_bytes": host_peak_bytes(),
        "linears": linears_of(policy),
        "parameters_trainable": sum(p.numel() for p in trainable_parameters(policy).values()),
    }
    if step:
        point = StepPoint(
            name="step", model="7b", group=group, prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )  # fmt: skip
        report["step"] = _step(policy, engine, point, seed)
    report["device_bytes"] = _device_bytes()
    engine.close()
    return report


def _step(policy: Any, engine: Engine, point: StepPoint, seed: int) -> Report:
    """Warm up, make one step, and say whether it moved the adapter."""
    scale = StepScale(points=(point,))
    arm = Arm(name="step", label="a loaded checkpoint", weight_format="nvfp4")
    with GraderPool(workers=1) as pool:
        t = training_of(
            policy, engine, pool, arm, point, scale, seed=seed, micro_tokens=4 * point.row_tokens
        )
        state = begin(t)
        before = parameter_image(policy)
        warm_up(t, state, scale.warm_up_tokens)
        seconds = timed_step(t, state)
        return seconds | {"moved": float((parameter_image(policy) - before).norm())}


def _device_bytes() -> int:
    """Return the most that the allocator reserved, and what else is in use on the device."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.max_memory_reserved()) + context_bytes()


STAGES: dict[str, Callable[..., Report]] = {"build": build, "quantise": quantise, "load": load}


def main(arguments: list[str]) -> int:
    """Run the stage that is named with the JSON that is given; print what it found."""
    stage, settings, driver_before = arguments
    report = STAGES[stage](**json.loads(settings))
    if report.get("device_bytes"):
        report["device_bytes"] -= int(driver_before)
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
