"""The rates of a sweep: arms at the target's own rate, and at a third and three times of it."""

from __future__ import annotations

import dataclasses

from repro.spec.arm import Arm

# As factors of an arm's rate.
FACTORS = {"low": 1 / 3, "middle": 1.0, "high": 3.0}


def at_rate(arm: Arm, name: str) -> Arm:
    """Return an arm at one of the sweep's rates."""
    factor, label = FACTORS[name], f"{arm.label}, {name} rate"
    return dataclasses.replace(
        arm, name=f"{arm.name}_{name}", label=label, learning_rate_factor=factor
    )
