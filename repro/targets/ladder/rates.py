"""Which rates are borne, and whether the rank matters when the step does not grow with it.

`needle_rates` (Figs. 16 and 17): BF16 LoRA, NVFP4 LoRA and QeRL at the same five absolute rates,
where the paper's own figures have one arm each, at multiples of its own rate. What is compared is
whether a run collapses (its last training accuracy below half of its best): at one rate by
McNemar's exact test, and over all five by the mean of the differences, which in steps of the grid
is the shift of the rate at which half of the runs collapse (Spearman and Kaerber's estimate). The
grid goes up from the rate at which the arms are compared: of the sweep's runs none collapsed at
that rate or below, one of six at 2e-3, and all at 2.8e-3, so the shift lies between.

`needle_ranks` (Fig. 10): ranks 16 and 128 with alpha fixed at 32, and with alpha equal to the rank
as the released code has it. Where alpha grows with the rank the step grows too, and a difference is
the rank's or the rate's; with alpha fixed it is the rank's. The paper says that the rank hardly
matters, so equality within a tenth of the steps is what is asked, of as many seeds as the first
rung's deviations call for. Ranks 32 and 64 lie between; 32 is the rung's own QeRL.
"""

from __future__ import annotations

import dataclasses

from repro.spec.config import Arm
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier
from repro.targets import paper_effects
from repro.targets.ladder.common import (
    FRESH_SEEDS,
    METRICS_OF_LADDER,
    TIERS,
    WHY_NOT,
    cost_of,
    take_off,
)
from repro.targets.ladder.doses import SCALE
from repro.targets.ladder.needle import NEEDLE_4_FRESH, QERL, RATE, RATED, named_rate
from repro.targets.table1 import BF16_LORA, NVFP4_LORA, NVFP4_LORA_AQN

_SCALE = dataclasses.replace(SCALE, seeds=FRESH_SEEDS[:14])
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
        # Of ten seeds each is a share of five; one run more or less is no normal error.
        test="sign_flip",
        tiers=TIERS,
    )


def _bears_at(rate: str) -> Claim:
    return Claim(
        name=f"qerl_bears_{rate}",
        statement=f"at a rate of {GRID[rate]:g}, fewer runs of QeRL collapse than of 16-bit LoRA",
        source="Figs. 16 and 17",
        kind="difference",
        arms=(_ARMS[BF16_LORA.name, rate].name, _ARMS[NVFP4_LORA_AQN.name, rate].name),
        metric="collapsed",
        factor=("weight_format", "noise"),
        effect=paper_effects.BORNE,
        test="mcnemar",
        tiers=TIERS,
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
        _bears_at("2e3"),
    ),
    scales={Tier.PROXY: _SCALE},
    costs={Tier.PROXY: cost_of(_SCALE)},
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


_RANKED = {(rank, alpha): _ranked(rank, alpha) for alpha in _ALPHA for rank in _RANKS}
_SCALE_OF_RANKS = dataclasses.replace(SCALE, seeds=FRESH_SEEDS[:20])
NEEDLE_RANKS = Target(
    name="needle_ranks",
    title="Fig. 10 with alpha fixed and with alpha growing: LoRA rank 16 and 128",
    statement="rank hardly matters",
    source="Fig. 10 and its text",
    arms=tuple(_RANKED.values()),
    metrics=METRICS_OF_LADDER,
    claims=tuple(
        take_off(
            f"rank_hardly_matters_{alpha}",
            "QeRL takes off after as many steps at rank 128 as at rank 16, "
            + ("alpha 32" if alpha == "fixed" else "alpha equal to the rank"),
            "Fig. 10 and its text",
            _RANKED[128, alpha],
            _RANKED[16, alpha],
            "lora_rank",
            *(() if alpha == "fixed" else ("lora_alpha",)),
            effect=paper_effects.OPEN_TAKE_OFF,
            equal=True,
        )
        for alpha in _ALPHA
    ),
    scales={Tier.PROXY: _SCALE_OF_RANKS},
    costs={Tier.PROXY: cost_of(_SCALE_OF_RANKS)},
    headline="take_off_steps",
    why_not=WHY_NOT,
)
