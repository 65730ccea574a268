"""A claim's sizes in the units of the records at hand, and whether it can be judged on them.

The paper's effect is a share (`repro.spec.claim`); what it would be here follows from the baseline
arm's own mean, gain or shortfall in the same records. Its uncertainty is left out: a mean gain of
51 points is known to half a point, and sizes decide between words, not by digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from repro.spec.claim import GAIN, Claim, Effect, Metric

# What values of arms are paired by: a seed, or a timed repeat as (seed, repeat).
Pair: TypeAlias = Any
Values = Mapping[str, Mapping[Pair, float]]

# Fewest independent draws of what a claim is about.
MINIMUM_DRAWS = 5
# A margin above this share of the room below the ceiling excludes nothing.
_LARGEST_MARGIN = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Effect sizes in the metric's unit: for a ratio their logarithms, for an order per place.

    The paper's effect and its `tenth` are None where it has none; `share` is its effect, or the
    smallest that matters, in words: `23 % of the gain of bf16_lora`.
    """

    paper: float | None
    tenth: float | None
    matters: float
    share: str


def sizes_of(
    claim: Claim, metrics: Mapping[str, Metric], values: Mapping[str, Values]
) -> Sizes | None:
    """Return the sizes of a claim here; None where it declares none.

    `values` is {metric: {arm: {pair: value}}}.
    """
    effect = claim.effect
    if effect is None:
        return None
    scale, share = _reference(claim, effect, metrics, values)

    def here(size: float) -> float:
        return math.log(size) if claim.log else size * (scale / claim.steps)

    return Sizes(
        paper=None if effect.paper is None else here(effect.paper),
        tenth=None if effect.tenth is None else here(effect.tenth),
        matters=here(effect.matters),
        share=share,
    )


def _reference(
    claim: Claim, effect: Effect, metrics: Mapping[str, Metric], values: Mapping[str, Values]
) -> tuple[float, str]:
    """Return the quantity that a size refers to, in the metric's unit, and the size in words."""
    size, baseline = effect.matters if effect.paper is None else effect.paper, claim.baseline
    share = f"{100 * size:.2g} % of"
    if effect.measure == "ratio":
        return 1.0, f"{size:.3g} x"
    if effect.measure == "units":
        return 1.0, ""
    if effect.measure == "of gain":
        gains = values.get(GAIN, {}).get(baseline)
        if not gains:
            raise ValueError(f"claim {claim.name}: {baseline} has no {GAIN} to take shares of")
        return fmean(gains.values()), f"{share} the gain of {baseline}"
    mean = fmean(values[claim.metric][baseline].values())
    if effect.measure == "of baseline":
        return mean, f"{share} {baseline}'s mean"
    left = _room(metrics[claim.metric], mean)
    return left, f"{share} what {baseline} leaves below the ceiling"


def _room(metric: Metric, mean: float) -> float:
    if metric.most is None:
        raise ValueError(f"metric {metric.name} has no ceiling")
    return metric.most - mean


def not_testable(
    claim: Claim, metrics: Mapping[str, Metric], compared: Values, sizes: Sizes | None
) -> str:
    """Return why a claim cannot be judged on these records; empty where it can."""
    reason = undecidable(claim)
    if reason or not claim.headroom:
        return reason
    # The effect needs room above the baseline arm.
    metric, mean = metrics[claim.metric], fmean(compared[claim.baseline].values())
    room = _room(metric, mean)
    why = "an effect of that size could not have appeared under that ceiling"
    above = f"{claim.baseline} at {mean:.3g} leaves {room:.3g} below {metric.most:g}"
    if sizes is None:
        margin = abs(claim.bound)
        fits = margin <= _LARGEST_MARGIN * room
        return "" if fits else f"{above}, and the margin is {margin:g}: {why}"
    needed = sizes.matters if sizes.paper is None else sizes.paper
    return "" if needed <= room else f"{above}, and the effect to be seen is {needed:.3g}: {why}"


def undecidable(claim: Claim) -> str:
    """Return why no records could decide a claim, by its design; empty where some could."""
    if claim.draws is not None and claim.draws < MINIMUM_DRAWS:
        return (
            f"its unit of replication is the rounding draw, of which there is {claim.draws}; a "
            f"verdict needs {MINIMUM_DRAWS}"
        )
    return f"by its design: {claim.confounded}" if claim.confounded else ""
