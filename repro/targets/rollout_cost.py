"""What a throughput run is thought to take before any has been recorded, from shapes alone.

    step(B) = bytes read / bandwidth + layers * launch + B * parameters * rate

with three constants fitted to the step times of one H200: NVFP4 at 7B and 32B, batches 1, 8, 64
and 256. Good to a quarter; a plan needs no better. Attention's growth with the position is left
out, a model's load and its first captures are a constant each.
"""

from __future__ import annotations

from collections.abc import Sequence

from repro.spec.config import Arm
from repro.spec.shapes import shape_named
from repro.spec.target import Cost
from repro.spec.throughput import ThroughputPoint, ThroughputScale

_BYTES_PER_SECOND = 3.6e12
_SECONDS_A_LAYER = {True: 40e-6, False: 25e-6}
_SECONDS_A_PARAMETER_AND_ROW = 7e-15
_BITS = {"bf16": 16.0, "nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5}
# bitsandbytes' product of one row reads about half as fast, and it repeats it row by row.
_BITSANDBYTES = 2.0
_SECONDS_TO_LOAD = 4.0
_SECONDS_A_PARAMETER_TO_LOAD = 0.4e-9
_SECONDS_TO_CAPTURE = 1.5
# Of one check, all its parts, on the 7B shape.
_CHECKS = {
    "sharing": 3.5,
    "long_tail": 48.0,
    "parity": 11.0,
    "trained_parity": 2.0,
    "float8": 4.0,
    "noise": 2.0,
    "faults": 10.0,
}


def step_seconds(shape: str, arm: Arm, batch: int, *, bitsandbytes: bool = False) -> float:
    """Return the estimated seconds of one decode step."""
    decoder = shape_named(shape.removeprefix("qwen2.5-"))
    projections = decoder.layers * sum(N * K for N, K in decoder.projections().values())
    head = decoder.vocabulary * decoder.hidden
    nbytes = projections * _BITS[arm.weight_format] / 8 + 2 * head
    reads = nbytes / _BYTES_PER_SECOND * (_BITSANDBYTES if bitsandbytes else 1.0)
    launches = decoder.layers * _SECONDS_A_LAYER[arm.weight_format != "bf16"]
    return reads + launches + batch * (projections + head) * _SECONDS_A_PARAMETER_AND_ROW


def arm_seconds(scale: ThroughputScale, arm: Arm, seeds: Sequence[int]) -> float:
    """Return the estimated seconds of all repeats of one arm, which share their loaded models."""
    foreign = arm.name in scale.bitsandbytes
    total, loaded = 0.0, ""
    for point in scale.points:
        times = sum(point.timed_by(seed) for seed in seeds)
        if point.shape != loaded:
            total += _load_seconds(point)
            loaded = point.shape
        for batch in point.batches:
            step = step_seconds(point.shape, arm, batch, bitsandbytes=foreign)
            total += _SECONDS_TO_CAPTURE + times * (point.new_tokens * step + 0.02 * batch**0.75)
    total += sum(_CHECKS[what] * repeats for what, repeats in scale.checks)
    return total


def _load_seconds(point: ThroughputPoint) -> float:
    decoder = shape_named(point.shape.removeprefix("qwen2.5-"))
    parameters = decoder.layers * sum(N * K for N, K in decoder.projections().values())
    return _SECONDS_TO_LOAD + parameters * _SECONDS_A_PARAMETER_TO_LOAD


def rollout_cost(scale: ThroughputScale, arms: Sequence[Arm], memory_bytes: int) -> Cost:
    """Return the cost of one run: the mean over arms of all repeats' seconds, shared by seed."""
    whole = sum(arm_seconds(scale, arm, scale.seeds) for arm in arms)
    return Cost(
        train_seconds=whole / (len(arms) * len(scale.seeds)),
        evaluate_seconds=None,
        memory_bytes=memory_bytes,
        disk_bytes=100_000,
        basis="estimated from shapes and the step times of one H200; the seeds of an arm share "
        "their loaded models",
    )
