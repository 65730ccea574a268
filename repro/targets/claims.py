"""Claims of a form that several targets share."""

from __future__ import annotations

from repro.spec.config import Arm
from repro.spec.target import Claim
from repro.spec.tier import Tier


def difference(
    name: str,
    statement: str,
    source: str,
    first: Arm,
    second: Arm,
    *factor: str,
    metric: str = "accuracy",
    tiers: tuple[Tier, ...] = (),
) -> Claim:
    """Return the claim that a metric of the first arm lies above the second's.

    Parameters
    ----------
    factor
        The configuration fields in which the two arms may differ.
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
        tiers=tiers,
    )
