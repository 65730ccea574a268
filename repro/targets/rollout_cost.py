"""What a throughput run is thought to take before any has been recorded, from shapes alone.

    step(B) = (bytes of weights + B * bytes of keys and values) / bandwidth + layers * launch
              + B * parameters * rate

with three constants fitted to the step times of one H200 at 7B (rank 32; batches 1, 8, 16, 32, 64:
1.88, 2.10, 2.62, 3.14, 3.67 ms with NVFP4; 1, 8, 16, 64: 4.49, 4.59, 4.76, 5.14 ms with BF16). Good
to a quarter; a plan needs no better. Keys and values are read up to the middle of the rollout. A
model's load, the exchange of an adapter and the first run of a step (it is compiled and captured)
are a constant each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from repro.spec.arm import Arm
from repro.spec.shapes import DecoderShape, shape_named
from repro.spec.target import Cost
from repro.spec.throughput import ThroughputPoint, ThroughputScale, loaded_base

_BYTES_PER_SECOND = 4.0e12
_SECONDS_PER_LAYER = {True: 25e-6, False: 34e-6}
_SECONDS_PER_PARAMETER_AND_ROW = {True: 4e-15, False: 1.5e-15}
_BITS = {"bf16": 16.0, "nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5}
# bitsandbytes' product of one row reads about half as fast, and it repeats it row by row.
_BITSANDBYTES = 2.0
_PREFILL_OPERATIONS_PER_SECOND = 3e14
_SECONDS_TO_LOAD = 4.0
_SECONDS_PER_PARAMETER_TO_LOAD = 0.4e-9
_SECONDS_TO_EXCHANGE = 2.0
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


def step_seconds(
    shape: str, arm: Arm, batch: int, *, positions: int = 0, bitsandbytes: bool = False
) -> float:
    """Return the estimated seconds of one decode step after `positions` tokens per row."""
    decoder = _decoder(shape)
    packed = arm.weight_format != "bf16"
    projections = decoder.projection_parameters()
    head = decoder.vocabulary * decoder.hidden
    weights = projections * _BITS[arm.weight_format] / 8 + 2 * head
    cache = batch * positions * 4 * decoder.layers * decoder.key_size
    nbytes = weights * (_BITSANDBYTES if bitsandbytes else 1.0) + cache
    rows = batch * (projections + head) * _SECONDS_PER_PARAMETER_AND_ROW[packed]
    return nbytes / _BYTES_PER_SECOND + decoder.layers * _SECONDS_PER_LAYER[packed] + rows


def scale_seconds(scale: ThroughputScale, arms: Sequence[Arm], seeds: Sequence[int]) -> float:
    """Return the estimated seconds of all runs of a scale; arms of one base share its models."""
    total = 0.0
    for _, group in groupby(arms, key=lambda arm: loaded_base(arm, scale)):
        together = list(group)
        for shape in dict.fromkeys(point.shape for point in scale.points):
            total += _load_seconds(shape) + (len(together) - 1) * _SECONDS_TO_EXCHANGE
        total += sum(_arm_seconds(scale, arm, seeds) for arm in together)
    return total


def _arm_seconds(scale: ThroughputScale, arm: Arm, seeds: Sequence[int]) -> float:
    total = sum(_CHECKS[what] * repeats for what, repeats in scale.checks)
    for point in scale.points:
        times = sum(point.timed_by(seed) for seed in seeds)
        whole = scale.whole_batches(arm.name, point.name) if 0 in seeds else ()
        for batch in point.batches:
            step = step_seconds(
                point.shape,
                arm,
                batch,
                positions=point.prompt_tokens + point.new_tokens // 2,
                bitsandbytes=arm.name in scale.bitsandbytes,
            )
            steps = point.windows * (point.window_steps + 1) or point.new_tokens
            steps = times * steps + (batch in whole) * point.new_tokens
            prefills = times + (batch in whole)
            total += _SECONDS_TO_CAPTURE + steps * step + prefills * _prefill_seconds(point, batch)
    return total


def _prefill_seconds(point: ThroughputPoint, batch: int) -> float:
    operations = 2 * batch * point.prompt_tokens * _decoder(point.shape).projection_parameters()
    return operations / _PREFILL_OPERATIONS_PER_SECOND


def _load_seconds(shape: str) -> float:
    parameters = _decoder(shape).projection_parameters()
    return _SECONDS_TO_LOAD + parameters * _SECONDS_PER_PARAMETER_TO_LOAD


def _decoder(shape: str) -> DecoderShape:
    return shape_named(shape.removeprefix("qwen2.5-"))


def rollout_cost(scale: ThroughputScale, arms: Sequence[Arm], memory_bytes: int) -> Cost:
    """Return the cost of one run: all runs' seconds, shared evenly."""
    return Cost(
        train_seconds=scale_seconds(scale, arms, scale.seeds) / (len(arms) * len(scale.seeds)),
        evaluate_seconds=None,
        memory_bytes=memory_bytes,
        disk_bytes=100_000,
        basis="estimated from shapes and the step times of one H200; the seeds of an arm, and arms "
        "that differ by rank alone, share their loaded models",
    )
