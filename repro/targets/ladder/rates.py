"""Which rates are borne, and whether the rank matters when the step does not grow with it.

`needle_rates` (Figs. 16 and 17): BF16 LoRA, NVFP4 LoRA and QeRL at the same five absolute rates,
where the paper's own figures have one arm each, at multiples of its own rate. What is compared is
whether a run collapses (its last training accuracy below half of its best), over all five
rates: the mean of the differences, which in steps of the grid
is the shift of the rate at which half of the runs collapse (Spearman and Kaerber's estimate). A
seed's value is a mean of five differences, so its interval is Student's: by sign flips the median
of such coarse values differs from nothing or is nothing. The grid goes up from the rate at which
the arms are compared: of the sweep's runs none collapsed at that rate or below, one of six at 2e-3,
and all at 2.8e-3, so the shift lies between, which two assays ask of these runs, too.

`needle_ranks` (Fig. 10): ranks 16 and 128 with alpha fixed at 32. The paper says that the rank
hardly matters, so equality within a tenth of the steps is what is asked: forty pairs show it with a
probability of .95 where the deviation of a pair is .15 (AQN against none had .10, sharing .13 to
.18). `needle_ranks_grown` has alpha equal to the rank, as the released code: there the step grows
with the rank, and a difference is the rank's or the rate's, so that it is reported and decides
nothing. Ranks 32 and 64 lie between; 32 is the rung's own QeRL.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import Arm
from repro.spec.effect import Assay
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier
from repro.targets import paper_effects
from repro.targets.ladder.common import (
    FRESH_SEEDS,
    METRICS_OF_LADDER,
    TIERS,
    WHY_NOT,
    needs_of,
    take_off,
)
from repro.targets.ladder.doses import SCALE
from repro.targets.ladder.needle import NEEDLE_4_FRESH, QERL, RATE, RATED, named_rate
from repro.targets.table1 import BF16_LORA, NVFP4_LORA, NVFP4_LORA_AQN

_SCALE = dataclasses.replace(SCALE, seeds=FRESH_SEEDS[:13])
# A factor of about 1.19 from each to the next.
GRID = {"14e4": 1.4e-3, "17e4": 1.7e-3, "2e3": 2e-3, "24e4": 2.4e-3, "28e4": 2.8e-3}
_ARMS = {(arm.name, rate): named_rate(arm, rate, GRID) for arm in RATED for rate in GRID}


def _bears(name: str, label: str, arm: Arm, *factor: str) -> Claim:
    pairs = [(_ARMS[BF16_LORA.name, rate], _ARMS[arm.name, rate]) for rate in GRID]
    return Claim(
        name=name,
        statement=f"over five absolute rates, fewer runs of {label} collapse than of 16-bit LoRA",
        source="Figs. 16 and 17",
        kind="pooled",
        arms=tuple(one.name for pair in pairs for one in pair),
        metric="collapsed",
        factor=("learning_rate", *factor),
        effect=paper_effects.BORNE_RATES,
        assays=(_collapses("28e4", at_least=0.5), _collapses("14e4", at_most=0.5)),
        tiers=TIERS,
    )


def _collapses(rate: str, *, at_least: float | None = None, at_most: float | None = None) -> Assay:
    return Assay(
        kind="range",
        arm=_ARMS[BF16_LORA.name, rate].name,
        metric="collapsed",
        at_least=at_least,
        at_most=at_most,
        because="how far the rate at which half of the runs collapse is shifted shows where that "
        "rate of 16-bit LoRA lies within the grid",
    )


NEEDLE_RATES = Target(
    name="needle_rates",
    title="Figs. 16 and 17 at the same rates: who collapses",
    statement="QeRL bears a higher rate than 16-bit LoRA",
    source="Figs. 16 and 17",
    arms=tuple(_ARMS.values()),
    metrics=METRICS_OF_LADDER,
    claims=(
        _bears("qerl_bears_more", "QeRL", NVFP4_LORA_AQN, "weight_format", "noise"),
        _bears("nvfp4_bears_more", "NVFP4 LoRA", NVFP4_LORA, "weight_format"),
    ),
    scales={Tier.PROXY: _SCALE},
    needs={Tier.PROXY: needs_of(_SCALE)},
    headline="collapsed",
    # At the rate of the needle's own arms the runs are theirs.
    shared={
        arm.name: (NEEDLE_4_FRESH, name)
        for (name, _), arm in _ARMS.items()
        if arm.learning_rate == RATE
    },
    why_not=WHY_NOT,
)

_RANKS = (16, 128)
_ALPHA = {"fixed": lambda rank: 32.0, "grown": float}


def _ranked(rank: int, alpha: str) -> Arm:
    value = _ALPHA[alpha](rank)
    return dataclasses.replace(
        QERL,
        name=f"rank_{rank}_{alpha}",
        label=f"QeRL, rank {rank}, alpha {value:g}",
        lora_rank=rank,
        lora_alpha=value,
    )


def _ranks(name: str, alpha: str, words: str, seeds: tuple[int, ...], *factor: str) -> Target:
    low, high = (_ranked(rank, alpha) for rank in _RANKS)
    scale = dataclasses.replace(SCALE, seeds=seeds)
    return Target(
        name=name,
        title=f"Fig. 10 with {words}: LoRA rank 16 and 128",
        statement="rank hardly matters",
        source="Fig. 10 and its text",
        arms=(low, high),
        metrics=METRICS_OF_LADDER,
        claims=(
            take_off(
                f"rank_hardly_matters_{alpha}",
                f"QeRL takes off after as many steps at rank 128 as at rank 16, {words}",
                "Fig. 10 and its text",
                high,
                low,
                "lora_rank",
                *factor,
                effect=paper_effects.OPEN_TAKE_OFF,
                equal=True,
            ),
        ),
        scales={Tier.PROXY: scale},
        needs={Tier.PROXY: needs_of(scale)},
        headline="take_off_steps",
        why_not=WHY_NOT,
    )


NEEDLE_RANKS = _ranks("needle_ranks", "fixed", "alpha 32", FRESH_SEEDS)
NEEDLE_RANKS_GROWN = _ranks(
    "needle_ranks_grown", "grown", "alpha equal to the rank", FRESH_SEEDS[:5], "lora_alpha"
)
