"""What the ladder's targets share: scale, seeds, looks, needs and statements about take-off."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from repro.spec.arm import Arm
from repro.spec.config import TrainScale
from repro.spec.effect import Assay, Effect, Look
from repro.spec.needs import Needs
from repro.spec.target import Claim, Metric
from repro.spec.tier import Tier
from repro.targets import proxy
from repro.targets.table1 import METRICS

TIERS = (Tier.PROXY,)
WHY_NOT = "a question for the proxy tier alone"
NOT_THE_PAPERS = "not in the paper; a control"

# Runs before these had seeds 0 to 14, 100 and 101 for tuning, and 200 to 207 in the pilot.
SEEDS = tuple(range(216, 232))
# Where a tenth needs no more: the paired deviation of log take-off was .08 to .12 between formats
# in the pilot, which twelve pairs resolve to 10 % at 80 % power.
FEWER_SEEDS = SEEDS[:12]
# For what the first rung left open, at the deviations that it measured: .19 of NVFP4 against BF16,
# .10 of AQN against none, .18 of strong noise shared against drawn apart. Forty pairs show each of
# the last two to lie within a factor of 1.1, where it does, at 80 % power.
FRESH_SEEDS = tuple(range(232, 272))
# Of the outer rungs, whose difference between two differences varies more than either.
OUTER_SEEDS = tuple(range(216, 236))
SWEEP_SEEDS = (300, 301)
# An early look at half of the seeds costs a fifth of the level and can settle what is large. A
# third one at 30 seeds would nearly double the two rungs that are to run within half an hour.
LOOKS = (Look(seeds=8, alpha=0.01), Look(seeds=16, alpha=0.04))

# Half-way between the start, 10 % of right answers, and the plateau above 95 %, where the curve is
# steep: a crossing there depends least on the noise of 64 completions per step. At 75 %, the
# pilot's threshold, a run is past the jump and sharpens what it does already.
THRESHOLD = 50.0
# Half-way from where two completions in five show their working: 45 % of right answers.
THRESHOLD_WHERE_COMMON = 75.0
# The pilot was flat for 60 to 70 steps at 4 % and crossed after 92 at a rate of 1e-3.
STEPS = 130
LOOK_EVERY = STEPS // 2

METRICS_OF_LADDER: tuple[Metric, ...] = (*METRICS, *proxy.LADDER_METRICS)

# Held-out accuracy is looked at three times; what is compared is the training curve, which is free.
NEEDLE = dataclasses.replace(
    proxy.PROXY_SWEEP,
    data=dataclasses.replace(proxy.PROXY_SWEEP.data, test_problems=200),
    steps=STEPS,
    evaluation=dataclasses.replace(
        proxy.PROXY_SWEEP.evaluation,
        every=LOOK_EVERY,
        threshold=THRESHOLD,
        token_classes=True,
        kl_to_start=True,
    ),
    checkpoint_every=LOOK_EVERY,
    permuted=True,
    seeds=SEEDS,
)


def needs_of(*scales: TrainScale) -> Needs:
    """Return the needs of targets at scales whose policies may differ."""
    policies = dict.fromkeys(scale.checkpoint for scale in scales)
    return dataclasses.replace(proxy.NEEDS, policies=tuple(policies))


def takes_off(*arms: Arm) -> tuple[Assay, ...]:
    """Return the assays that at least half of each arm's runs reach the threshold."""
    return tuple(
        Assay(
            kind="range",
            arm=arm.name,
            metric="took_off",
            at_least=0.5,
            because="a run that does not reach the threshold counts with all of its steps; of more "
            "than half such runs no quotient is left",
        )
        for arm in arms
    )


def take_off(
    name: str,
    statement: str,
    source: str,
    slower: Arm,
    faster: Arm,
    *factor: str,
    effect: Effect,
    assays: Sequence[Assay] = (),
    equal: bool = False,
) -> Claim:
    """Return the claim that an arm takes off after fewer steps than another.

    Parameters
    ----------
    factor
        The configuration fields in which the two arms may differ.
    equal
        Claim instead that both take off after as many steps, within the smallest effect.

    Notes
    -----
    Of a control only the faster arm has to take off: its slower one is slowed on purpose, and a run
    that never takes off counts with fewer steps than it needs, so the quotient errs towards one.
    """
    because = "from one on the faster arm is faster; what matters is stated as a size"
    return Claim(
        name=name,
        statement=statement,
        source=source,
        kind="equivalent" if equal else "ratio",
        arms=(slower.name, faster.name),
        metric="take_off_steps",
        factor=factor,
        margin=effect.smallest if equal else 1.0,
        because=effect.because if equal else because,
        effect=effect,
        assays=(*takes_off(*(() if "exploration" in factor else (slower,)), faster), *assays),
        tiers=TIERS,
    )
