"""Claims of a form that several targets share, and what they are held against."""

from __future__ import annotations

from repro.spec.arm import Arm
from repro.spec.effect import Assay, Effect, Unit
from repro.spec.target import Claim
from repro.spec.tier import Tier

# What claims about a final accuracy need.
HEADROOM = Assay(
    kind="headroom", because="an effect of that size could not have appeared under that ceiling"
)


def difference(
    name: str,
    statement: str,
    source: str,
    first: Arm,
    second: Arm,
    *factor: str,
    effect: Effect,
    metric: str = "accuracy",
    assays: tuple[Assay, ...] = (),
    unit: Unit | None = None,
    draws: int | None = None,
    tiers: tuple[Tier, ...] = (),
) -> Claim:
    """Return the claim that a metric of the first arm lies above the second's.

    Parameters
    ----------
    factor
        The configuration fields in which the two arms may differ.
    effect
        The paper's effect, or the smallest that matters; of the final accuracy it needs headroom.
    unit, draws
        What the claim speaks of several of, where that is not a training seed per pair.
    tiers
        Where it is claimed; everywhere by default.
    """
    return Claim(
        name=name,
        statement=statement,
        source=source,
        kind="difference",
        arms=(first.name, second.name),
        metric=metric,
        factor=factor,
        effect=effect,
        assays=(*assays, HEADROOM) if metric == "accuracy" else assays,
        unit=unit,
        draws=draws,
        tiers=tiers,
    )
