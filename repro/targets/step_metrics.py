"""The metrics of measured steps, point by point, and the claim that one arm's step is longer."""

from __future__ import annotations

from collections.abc import Sequence

from repro.spec.effect import Effect
from repro.spec.step_scale import StepArm, StepPoint, equal_twin
from repro.spec.target import Claim, Metric

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
# What needs every token of a completion to be sampled.
_WHOLE = ("step", "rollout", "speedup", "rollout_ratio")


def step_metrics(points: Sequence[StepPoint], *, ratios: bool) -> tuple[Metric, ...]:
    """Return the metrics of some points; with `ratios`, also those against the baseline."""
    metrics = []
    for point in points:
        where = point.name
        metrics += [
            Metric(
                name=f"{name}_seconds_{where}",
                unit="seconds",
                title=f"{title}, {where}",
                better="neither" if name in _JITTER else None,
            )
            for name, title in _SECONDS.items()
            if _is_measured(name, point)
        ]
        if point.whole:
            metrics.append(
                Metric(
                    name=f"tokens_per_second_{where}",
                    unit="tokens per second",
                    title=f"rollout throughput, {where}",
                )
            )
        metrics += [
            Metric(name=f"peak_bytes_{where}", unit="bytes", title=f"peak memory, {where}"),
            Metric(
                name=f"predicted_bytes_{where}",
                unit="bytes",
                title=f"planned, {where}",
                better="neither",
            ),
            Metric(
                name=f"prediction_error_{where}",
                unit="percent",
                title=f"plan off, {where}",
                better="lower",
            ),
        ]
        metrics += [
            Metric(name=f"{name}_{where}", unit="ratio", title=f"{title}, {where}", better="higher")
            for name, title in _RATIOS.items()
            if ratios and _is_measured(name, point)
        ]
        metrics += [
            Metric(
                name=f"{name}_over_equal_{where}",
                unit="ratio",
                title=f"{name}, over that of equal lengths, {where}",
                better="lower",
            )
            for name in _OVER_EQUAL
            if equal_twin(point, points)
        ]
    return tuple(metrics)


def _is_measured(name: str, point: StepPoint) -> bool:
    return point.whole or (name not in _WHOLE and not point.memory_only)


def longer(
    slow: StepArm,
    fast: StepArm,
    point: StepPoint,
    statement: str,
    *,
    phase: str = "step",
    margin: float = 1.0,
    source: str = "Table 3",
    because: str = "longer means a ratio above one",
    effect: Effect | None = None,
) -> Claim:
    """Return the claim that a phase takes `slow` more than `margin` times what it takes `fast`."""
    return Claim(
        name=f"{phase}_of_{slow.name}_longer_than_{fast.name}_{point.name}",
        statement=f"{statement} ({point.name})",
        source=source,
        kind="ratio",
        arms=(slow.name, fast.name),
        metric=f"{phase}_seconds_{point.name}",
        factor=("weight_format", "training", "linears", "learning_rate"),
        margin=margin,
        because=because,
        effect=effect,
        paired_by="repeat",
    )
