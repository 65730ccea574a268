"""What the ladder's targets share: scale, seeds, looks, cost, and the statements about take-off."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from repro.spec.config import Arm, TrainScale
from repro.spec.effect import Assay, Effect, Look
from repro.spec.target import Claim, Cost, Metric
from repro.spec.tier import Tier
from repro.targets import proxy
from repro.targets.table1 import METRICS

TIERS = (Tier.PROXY,)
WHY_NOT = "a question for the proxy tier alone"
NOT_THE_PAPERS = "not in the paper; a control"

# Runs before these had seeds 0 to 14, and 100 and 101 for tuning.
SEEDS = tuple(range(200, 216))
# Where a tenth in tokens needs no more: the paired deviation of log take-off was .11 in a probe on
# the tiny policy, which twelve pairs resolve to 10 % at 80 % power.
FEWER_SEEDS = SEEDS[:12]
SWEEP_SEEDS = (300, 301)
# An early look at half of the seeds costs a fifth of the level and can settle what is large. A
# third one at 30 seeds would nearly double the two rungs that are to run within half an hour.
LOOKS = (Look(seeds=8, alpha=0.01), Look(seeds=16, alpha=0.04))

# Between 10 % of right answers at the start (45 % on the highest rung) and the plateau above 95 %,
# where the curve is steep: a crossing there depends least on the noise of 64 completions per step.
THRESHOLD = 75.0
# Flat stretches of 30 to 40 steps at 4 % were seen on the tiny policy; at an eighth of that prior
# they are longer. A quarter more than the tier's 120 is what half an hour for two rungs leaves.
STEPS = 150

METRICS_OF_LADDER: tuple[Metric, ...] = (*METRICS, *proxy.LADDER_METRICS)

# Held-out accuracy is looked at three times; what is compared is the training curve, which is free.
NEEDLE = dataclasses.replace(
    proxy.PROXY_SWEEP,
    data=dataclasses.replace(proxy.PROXY_SWEEP.data, test_problems=200),
    steps=STEPS,
    evaluation=dataclasses.replace(
        proxy.PROXY_SWEEP.evaluation,
        every=75,
        threshold=THRESHOLD,
        token_classes=True,
        kl_to_start=True,
    ),
    checkpoint_every=75,
    permuted=True,
    seeds=SEEDS,
)


def cost_of(*scales: TrainScale) -> Cost:
    """Return the cost of targets at scales that differ in steps, rows and questions."""
    return dataclasses.replace(
        proxy.COST,
        policies=tuple(dict.fromkeys(scale.checkpoint for scale in scales)),
        basis="scaled by steps and questions from the fit to 13 ensembles of 5 to 32 runs, each on "
        "one H200; none of these has run",
    )


def takes_off(*arms: Arm) -> tuple[Assay, ...]:
    """Return the assays that at least half of each arm's runs reach the threshold."""
    return tuple(
        Assay(
            kind="range",
            arm=arm.name,
            metric="took_off",
            at_least=0.5,
            because="a run that does not reach the threshold counts with the tokens that it "
            "sampled; of more than half such runs no quotient is left",
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
    """Return the claim that an arm takes off after fewer tokens than another.

    Parameters
    ----------
    factor
        The configuration fields in which the two arms may differ.
    equal
        Claim instead that both take off after the same tokens, within the smallest effect.
    """
    because = "from one on the faster arm is faster; what matters is stated as a size"
    return Claim(
        name=name,
        statement=statement,
        source=source,
        kind="equivalent" if equal else "ratio",
        arms=(slower.name, faster.name),
        metric="take_off_tokens",
        factor=factor,
        margin=effect.smallest if equal else 1.0,
        because=effect.because if equal else because,
        effect=effect,
        assays=(*takes_off(slower, faster), *assays),
        tiers=TIERS,
    )
