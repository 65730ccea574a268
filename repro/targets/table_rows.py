"""The rows that tables of claims and metrics are made of, a line or two each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro.spec.arm import Arm
from repro.spec.claim import Better, Claim, Effect, Metric, slope
from repro.spec.needs import Needs
from repro.spec.target import Target
from repro.spec.tier import Tier

# TRL and Unsloth fold a LoRA adapter into 16-bit weights before a rollout.
NOT_IN_PAPER = "not in the paper, which multiplies by the adapter apart"
# The factors of claims that compare formats at the paper's own rates, which differ by format.
FORMAT_RATE = "weight_format learning_rate"
FORMAT_NOISE_RATE = "weight_format noise learning_rate"


def metric(name: str, unit: str, title: str, better: Better | None = None, **more: Any) -> Metric:
    """Return a metric; `more` are further fields of `Metric`."""
    return Metric(name=name, unit=unit, title=title, better=better, **more)


def timed(
    procedure: str, scale: Any, memory_bytes: int, disk_bytes: int = 100_000
) -> dict[str, Any]:
    """Return fields of a target that times on a device: its procedure, scale and needs."""
    return {
        "procedure": procedure,
        "scales": {Tier.SYSTEMS: scale},
        "needs": {Tier.SYSTEMS: Needs(memory_bytes=memory_bytes, disk_bytes=disk_bytes)},
    }


def variant(arm: Arm, name: str, label: str, **changes: Any) -> Arm:
    """Return an arm with changes, and more at the end of its name and its label."""
    named = {"name": f"{arm.name}_{name}", "label": arm.label + label}
    return dataclasses.replace(arm, **(named | changes))


@dataclass(frozen=True, slots=True)
class Statement:
    """What a claim says, with its name, and where the paper says it.

    Its methods make the claim. `factor` names the configuration fields in which the arms may
    differ, separated by spaces; `more` are further fields of `Claim`.
    """

    name: str
    text: str
    source: str

    def above(
        self,
        first: Arm,
        second: Arm,
        factor: str,
        effect: Effect | None = None,
        metric: str = "accuracy",
        **more: Any,
    ) -> Claim:
        """Return the claim that a metric is higher in the first arm than in the second.

        The effect is the paper's, or the smallest that matters; of the final accuracy it needs
        headroom.
        """
        fields = {"headroom": metric == "accuracy", "effect": effect} | more
        contrast = {first.name: 1, second.name: -1}
        return self._claim(contrast, factor, metric, **fields)

    def times(
        self, first: Arm, second: Arm, factor: str, metric: str, bound: float = 1.0, **more: Any
    ) -> Claim:
        """Return the claim that a metric of the first arm is above `bound` times the second's."""
        return self.above(first, second, factor, metric=metric, bound=bound, log=True, **more)

    def rises(
        self, arms: Sequence[Arm], factor: str, effect: Effect, metric: str, **more: Any
    ) -> Claim:
        """Return the claim that a metric rises from each arm to the next, by Page's test."""
        contrast = slope(tuple(arm.name for arm in arms))
        return self._claim(contrast, factor, metric, effect=effect, test="page", **more)

    def _claim(self, contrast: Mapping[str, float], factor: str, metric: str, **more: Any) -> Claim:
        return Claim(
            name=self.name,
            statement=self.text,
            source=self.source,
            contrast=contrast,
            factor=tuple(factor.split()),
            metric=metric,
            **more,
        )


def with_folded(target: Target, arm: Arm, claims: tuple[Claim, ...], *others: Arm) -> Target:
    """Return a target that times an arm folded for rollouts beside `others`, arms of `target`.

    The claims of one target share a correction, so further ones would move those that are judged.
    """
    return dataclasses.replace(
        target,
        name=f"{target.name}_folded",
        version=1,
        title=f"{target.title}; beside 16-bit LoRA folded in",
        statement="QeRL is faster than 16-bit LoRA folded into the weights for rollouts, too",
        source=NOT_IN_PAPER,
        arms=(*others, arm),
        shared={other.name: (target, other.name) for other in others},
        claims=claims,
        paper_file="",
    )


def gains(*arms: Arm) -> tuple[Claim, ...]:
    """Return the claims that training lifts each arm above its own start."""
    return tuple(
        Claim(
            name=f"{arm.name}_gains",
            statement=f"training lifts the greedy accuracy of {arm.label} above its own start",
            source="Table 1",
            contrast={arm.name: 1},
            metric="gain_greedy",
            mechanism=True,
        )
        for arm in arms
    )
