"""The grid of a learning-rate sweep: a third of an arm's rate, its rate, and three times it.

What a sweep chooses: `repro.targets.chosen_rates`.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import Arm

FACTORS = {"low": 1 / 3, "middle": 1.0, "high": 3.0}


def at_rate(arm: Arm, name: str) -> Arm:
    """Return an arm at one of the sweep's rates."""
    factor = FACTORS[name]
    return dataclasses.replace(
        arm,
        name=f"{arm.name}_{name}",
        label=f"{arm.label}, {name} rate",
        learning_rate_factor=factor,
    )
