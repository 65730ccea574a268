"""The learning-rate sweep of the proxy tier: the same three rates for every arm, on tuning seeds.

No claim of the paper's: it decides at which rates the other targets' arms are compared. The rule is
in `repro.targets.chosen_rates`, the choice is made by `python -m repro choose`.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import Arm
from repro.spec.config import TrainScale
from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import proxy
from repro.targets.table1 import METRICS, TRAINED

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


LEARNING_RATES = Target(
    name="learning_rates",
    title="The learning rates at which the proxy tier's arms are compared",
    statement="of three rates, each format and way of training gets the one that serves it best",
    source="not in the paper; Table 4 gives 1e-5 to four-bit weights and 5e-6 to BF16 LoRA",
    arms=tuple(at_rate(arm, name) for arm in TRAINED for name in FACTORS),
    metrics=METRICS,
    scales={Tier.PROXY: proxy.PROXY_SWEEP},
    needs={Tier.PROXY: proxy.NEEDS},
    headline="heldout_last",
    why_not="a sweep at the proxy tier alone",
)


def lacking_rates(target: Target, tier: Tier) -> str | None:
    """Return why a target cannot be trained yet, where its rates are still to be chosen; or None.

    The sweep itself trains at the grid's rates; what only measures needs none, nor do arms that all
    have a rate of their own.
    """
    scale = target.scales.get(tier)
    if tier is not Tier.PROXY or not isinstance(scale, TrainScale):
        return None
    learns = target.procedure in ("train", "finetune") and target.name != LEARNING_RATES.name
    needs = any(arm.training != "none" and arm.learning_rate is None for arm in target.arms)
    if not learns or not needs or scale.optimizer.learning_rates.chosen:
        return None
    return (
        "no learning rates have been chosen at this scale; first: python -m repro run "
        f"{LEARNING_RATES.name} --tier proxy, then python -m repro choose"
    )
