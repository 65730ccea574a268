"""How long measured steps are thought to take, before any record of them is blessed.

Per decode step the projections and the head are read once and each block costs a fixed time; many
rows add arithmetic. Per token of the update every weight is multiplied four times (old
log-probabilities, forward, forward again, gradient of the input):

    decode step   bytes / rate + blocks * fixed + rows * 2 * weights / flops
    update        tokens * 8 * weights / flops

The rates are those of one NVIDIA H200, rounded; the figures serve planning and nothing else.
"""

from __future__ import annotations

from repro.spec.shapes import shape_named
from repro.spec.step import StepArm, StepPoint, StepScale

_BYTES_PER_SECOND = 4.3e12
_FLOPS_PER_SECOND = 450e12
_SECONDS_A_BLOCK = 57e-6
# Building a model and letting it go; an engine with its captured steps and a warm-up.
_SECONDS_A_MODEL, _SECONDS_A_POINT = 10.0, 5.0
_BYTES_A_WEIGHT = {"bf16": 2.0, "nvfp4": 0.5625, "mxfp4": 0.5625, "nf4": 0.5625}
# How much longer a pass takes than by the kernels, as first estimates.
_SLOWER_UPDATE = {"kernels": 1.0, "dequantised": 2.0, "bitsandbytes": 1.5}
_SLOWER_DECODE = {"kernels": 1.0, "dequantised": 1.0, "bitsandbytes": 3.0}


def step_seconds(arm: StepArm, point: StepPoint) -> float:
    """Return the seconds of one step."""
    shape = shape_named(point.model)
    head = shape.vocabulary * shape.hidden
    weights = shape.projection_parameters() + head
    read = shape.projection_parameters() * _BYTES_A_WEIGHT[arm.weight_format] + 2 * head
    slots = min(point.slots or point.rows, 256)
    decode = read / _BYTES_PER_SECOND + shape.layers * _SECONDS_A_BLOCK
    decode += slots * 2 * weights / _FLOPS_PER_SECOND
    sampled = point.sampled_tokens or point.completion_tokens
    rounds = sampled * -(-point.rows // slots)
    tokens = point.rows * point.row_tokens
    update = tokens * 8 * weights / _FLOPS_PER_SECOND
    if arm.training == "full":
        update *= 1.5
    return rounds * decode * _SLOWER_DECODE[arm.linears] + update * _SLOWER_UPDATE[arm.linears]


def run_seconds(ways: list[StepArm], scale: StepScale) -> float:
    """Return the seconds of a run that measures `ways` at every point of a scale."""
    models = len({(point.model, point.lora_rank, point.budget_bytes) for point in scale.points})
    each = [
        _SECONDS_A_POINT + scale.steps * step_seconds(way, point)
        for way in ways
        for point in scale.points
    ]
    return models * len(ways) * _SECONDS_A_MODEL + sum(each)
