"""How long measured steps are thought to take, before any record of them is blessed.

Per decode step the projections and the head are read once and each block costs a fixed time; many
rows add arithmetic. Per token of the update every weight is multiplied three times (forward,
forward again, gradient of the input), and twice where activations are kept:

    decode step   bytes / rate + blocks * fixed + rows * 2 * weights / flops
    update        tokens * 6 * weights / flops

The rates are those of one NVIDIA H200 unless another is named, rounded; the figures serve planning
and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from repro.spec.shapes import shape_named
from repro.spec.step_scale import StepArm, StepPoint, StepScale
from repro.spec.target import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reaches.

    Attributes
    ----------
    name
        The device, for the text of a plan.
    bytes_per_second, flops_per_second
        Of reading weights, and of 16-bit products.
    seconds_a_block
        Fixed time of a decoder block in a decode step.
    """

    name: str
    bytes_per_second: float
    flops_per_second: float
    seconds_a_block: float


H200 = Rates(
    name="one NVIDIA H200",
    bytes_per_second=4.3e12,
    flops_per_second=450e12,
    seconds_a_block=42e-6,
)
H100 = Rates(
    name="one NVIDIA H100",
    bytes_per_second=3.0e12,
    flops_per_second=380e12,
    seconds_a_block=42e-6,
)
# Longest of many spread completions, over their mean.
_LONGEST = 3
# By what a device's name holds.
_KNOWN = {"H100": H100, "H200": H200}
# Building a model and letting it go; an engine with its captured steps; a warm-up on top of that.
_SECONDS_PER_MODEL, _SECONDS_PER_ENGINE, _SECONDS_PER_WARM_UP = 5.0, 2.0, 1.5
# About what the memory plan chooses where it is free to.
_MICRO_TOKENS = 9216
_BYTES_PER_WEIGHT = {"bf16": 2.0, "nvfp4": 0.5625, "mxfp4": 0.5625, "nf4": 0.5625}
# How much longer a pass takes than by the kernels, as first estimates.
_SLOWER_UPDATE = {"kernels": 1.0, "dequantised": 2.0, "bitsandbytes": 1.5}
_SLOWER_DECODE = {"kernels": 1.0, "dequantised": 1.0, "bitsandbytes": 3.0}


def rates_of(device: str) -> Rates | None:
    """Return the rates of a device by its name, as the driver has it; None where none are known."""
    return next((rates for part, rates in _KNOWN.items() if part in device), None)


def decode_seconds(arm: StepArm, point: StepPoint, rates: Rates = H200) -> float:
    """Return the seconds of a point's rollout."""
    shape = shape_named(point.model)
    head = shape.vocabulary * shape.hidden
    weights = shape.projection_parameters() + head
    read = shape.projection_parameters() * _BYTES_PER_WEIGHT[arm.weight_format] + 2 * head
    slots = min(point.slots or point.rows, 256)
    step = read / rates.bytes_per_second + shape.layers * rates.seconds_a_block
    step += slots * 2 * weights / rates.flops_per_second
    steps = (point.sampled_tokens or point.expected_tokens) * -(-point.rows // slots)
    if point.lengths == "spread":
        steps += (_LONGEST - 1) * point.expected_tokens
    return steps * step * _SLOWER_DECODE[arm.linears]


def update_seconds(arm: StepArm, point: StepPoint, rates: Rates = H200) -> float:
    """Return the seconds of the forward and backward passes."""
    shape = shape_named(point.model)
    weights = shape.projection_parameters() + shape.vocabulary * shape.hidden
    rows = point.rows
    if point.memory_only:
        rows = min(rows, 2 * max(1, (point.micro_tokens or _MICRO_TOKENS) // point.row_tokens))
    flops = 6 if point.checkpointing else 4
    tokens = rows * (point.prompt_tokens + point.expected_tokens)
    seconds = tokens * flops * weights / rates.flops_per_second
    if arm.training == "full":
        seconds *= 1.5
    return seconds * _SLOWER_UPDATE[arm.linears]


def point_seconds(arm: StepArm, point: StepPoint, scale: StepScale) -> float:
    """Return the seconds of all that is done at one point."""
    update = update_seconds(arm, point)
    step = decode_seconds(arm, point) + update
    warm_up = 0.0 if point.memory_only else scale.warm_up * (_SECONDS_PER_WARM_UP + update / 4)
    return _SECONDS_PER_ENGINE + warm_up + scale.steps * step


def run_seconds(ways: list[StepArm], scale: StepScale) -> float:
    """Return the seconds of a run that measures `ways` at every point of a scale."""
    models = len({(point.model, point.lora_rank, point.budget_bytes) for point in scale.points})
    each = [point_seconds(way, point, scale) for way in ways for point in scale.points]
    return models * len(ways) * _SECONDS_PER_MODEL + sum(each)


def cost_of(seconds: Mapping[str, float], memory_bytes: int) -> Cost:
    """Return the cost of a target of steps, from the predicted seconds of each arm's run."""
    return Cost(
        train_seconds=max(seconds.values()),
        evaluate_seconds=None,
        memory_bytes=memory_bytes,
        disk_bytes=10_000_000,
        basis="predicted from the rates of one NVIDIA H200",
        seconds_of_arm=dict(seconds),
    )
