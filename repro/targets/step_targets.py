"""The metrics of measured steps, point by point, and the claim that one arm's step is longer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from repro.spec.arm import Arm
from repro.spec.claim import Better, Claim, Metric
from repro.spec.step_scale import StepArm, StepPoint, StepScale, alone_twin, equal_twin
from repro.spec.target import Target
from repro.spec.tier import GIB
from repro.targets.table_rows import Statement, metric, timed

_SECONDS = {
    "step": "time of a GRPO step",
    "rollout": "rollout",
    "reward": "rewards",
    "update": "forward and backward",
    "optimizer": "optimiser",
    "idle": "device idle",
}
_RATIOS = {
    "speedup": "step against 16-bit LoRA",
    "update_ratio": "update against 16-bit LoRA",
    "rollout_ratio": "rollout against 16-bit LoRA",
}
_OVER_EQUAL = ("rollout", "update", "step")
# Milliseconds in which the host's jitter is as large as the value; they are part of the step.
_JITTER = ("optimizer", "idle", "reward")


def step_metrics(scale: StepScale) -> tuple[Metric, ...]:
    """Return the metrics of a scale's points; with a baseline, also those against it."""
    return tuple(item for point in scale.points for item in _of_point(point, scale))


def _of_point(point: StepPoint, scale: StepScale) -> Iterator[Metric]:
    def of(quantity: str, unit: str, title: str, better: Better | None = None) -> Metric:
        return metric(
            f"{quantity}_{point.name}",
            unit,
            f"{title}, {point.name}",
            better,
            quantity=quantity,
            model=point.model,
            point=point.place,
        )

    timed, points = not point.memory_only, scale.points
    for name, title in _SECONDS.items() if timed else ():
        yield of(f"{name}_seconds", "seconds", title, "neither" if name in _JITTER else None)
    if timed:
        yield of("tokens_per_second", "tokens per second", "rollout throughput")
    yield of("peak_bytes", "bytes", "peak memory")
    yield of("predicted_bytes", "bytes", "planned", "neither")
    yield of("prediction_error", "percent", "plan off", "lower")
    for name, title in _RATIOS.items() if scale.baseline and timed else ():
        yield of(name, "ratio", title, "higher")
    for name in _OVER_EQUAL if equal_twin(point, points) else ():
        yield of(f"{name}_over_equal", "ratio", f"{name}, over that of equal lengths", "lower")
    if point.ranks > 1:
        yield of("exchange_share", "share", "share of a step in exchanges", "lower")
    if alone_twin(point, points):
        title = f"tokens a second and GPU, {point.ranks} GPUs over one"
        yield of("efficiency", "ratio", title, "higher")


def step_target(
    name: str,
    title: str,
    statement: str,
    arms: tuple[Arm, ...],
    scale: StepScale,
    *,
    card: int = 80 * GIB,
    **more: Any,
) -> Target:
    """Return a target of measured steps on a card of that memory; `more` are fields of it.

    Its metrics are those of the scale, if no others are given.
    """
    return Target(
        name=name,
        title=title,
        statement=statement,
        timed_repeats=scale.steps,
        arms=arms,
        **timed("step_time", scale, card, 10_000_000),
        **({"metrics": step_metrics(scale)} | more),
    )


def longer(
    slow: StepArm,
    fast: StepArm,
    point: StepPoint,
    statement: str,
    *,
    phase: str = "step",
    source: str = "Table 3",
    **more: Any,
) -> Claim:
    """Return the claim that a phase takes `slow` more than `bound` times what it takes `fast`.

    `more` are further fields of `Claim`.
    """
    name = f"{phase}_of_{slow.name}_longer_than_{fast.name}_{point.name}"
    factor = "weight_format training linears rollout_adapter learning_rate"
    stated = Statement(name, f"{statement} ({point.name})", source)
    return stated.times(slow, fast, factor, f"{phase}_seconds_{point.name}", **more)
