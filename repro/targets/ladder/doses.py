"""The dose: how much noise it takes, from any source, until the take-off moves.

At equal relative error of the weights a policy of 30 million parameters gains 2 % of entropy where
the paper's gains 23 % (Fig. 5), so a format's own rounding is a small part of the paper's dose. On
the rung of 4 % its error is multiplied by 2, 3 and 4, coarser roundings are planted (three and two
bits), AQN begins at ten and thirty times the paper's sigma, and Gaussian noise on the weights is as
strong as NVFP4's rounding *on completions*: the tokens a policy samples, where rounding and noise
of equal strength on prompts differ several times over. Every other arm of the comparison is the
rung's own run.

`needle_sharing` is section 3.3's question: AQN adds one draw to a norm's gain, which reaches all of
the projections behind the norm as one multiplicative noise (Fig. 6, Eq. 10 to 12). Does that cost
anything against a draw for each projection? At the paper's sigma the noise is a fortieth of NVFP4's
own rounding on completions, so that neither way can do much; ten times the sigma asks more of it.
Its twelve seeds left open what they were to show, an equality within a tenth, so
`needle_sharing_fresh` asks ten times the sigma again, of seeds that no run has had.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import Arm, NoiseConfig, PlantedRounding, RoundingFormat, WeightNoise
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier
from repro.targets import paper_effects
from repro.targets.ladder.common import (
    FEWER_SEEDS,
    FRESH_SEEDS,
    METRICS_OF_LADDER,
    NOT_THE_PAPERS,
    TIERS,
    WHY_NOT,
    needs_of,
    take_off,
    takes_off,
)
from repro.targets.ladder.needle import BF16, NEEDLE_4, NVFP4, QERL

SCALE = dataclasses.replace(NEEDLE_4.scales[Tier.PROXY], seeds=FEWER_SEEDS)

_MULTIPLES = tuple(
    dataclasses.replace(
        BF16,
        name=f"nvfp4_x{factor}",
        label=f"{factor} times NVFP4's rounding, LoRA",
        rounding=PlantedRounding(format="nvfp4", factor=float(factor)),
    )
    for factor in (2, 3, 4)
)
_BITS: tuple[tuple[int, RoundingFormat], ...] = ((3, "int3"), (2, "int2"))
_COARSE = tuple(
    dataclasses.replace(
        BF16,
        name=f"int{bits}_lora",
        label=f"INT{bits} rounding, LoRA",
        rounding=PlantedRounding(format=kind),
    )
    for bits, kind in _BITS
)
# Falling to a twentieth of the start, as the paper's 1e-2 to 5e-4 (Table 4).
_STRONG = tuple(
    dataclasses.replace(
        NVFP4,
        name=f"aqn_{word}",
        label=f"NVFP4, LoRA + AQN from sigma {sigma:g}",
        noise=NoiseConfig(sigma_start=sigma, sigma_end=sigma / 20),
    )
    for word, sigma in (("01", 0.1), ("03", 0.3))
)
_MATCHED = dataclasses.replace(
    BF16,
    name="noise_as_nvfp4",
    label="BF16 + Gaussian noise as strong as NVFP4 on completions, LoRA",
    weight_noise=WeightNoise(matched_to="nvfp4", matched_on="completions"),
)


def _dose(arm: Arm, over: Arm, *factor: str) -> Claim:
    return take_off(
        f"{arm.name}_sooner",
        f"{arm.label}: takes off after fewer steps than {over.label}",
        NOT_THE_PAPERS,
        over,
        arm,
        *factor,
        effect=paper_effects.OPEN_TAKE_OFF,
    )


_SERIES = (BF16, NVFP4, *_MULTIPLES)
NEEDLE_DOSE = Target(
    name="needle_dose",
    title="The needle at 4 %: how much noise it takes",
    statement="the take-off comes forward as the dose of rounding or noise grows",
    source="not in the paper; its dose is Fig. 5's entropy",
    arms=(BF16, NVFP4, *_MULTIPLES, *_COARSE, *_STRONG, _MATCHED),
    metrics=METRICS_OF_LADDER,
    claims=(
        Claim(
            name="reward_rises_with_dose",
            statement="the training reward, mean over the steps, rises in the order BF16, NVFP4, "
            "and 2, 3 and 4 times its rounding",
            source=NOT_THE_PAPERS,
            kind="trend",
            arms=tuple(arm.name for arm in _SERIES),
            metric="train_reward_mean",
            factor=("weight_format", "rounding"),
            effect=paper_effects.OPEN_SPEED,
            assays=takes_off(BF16),
            tiers=TIERS,
        ),
        *(_dose(arm, BF16, "rounding") for arm in (*_MULTIPLES, *_COARSE)),
        *(_dose(arm, NVFP4, "noise") for arm in _STRONG),
        _dose(_MATCHED, BF16, "weight_noise"),
    ),
    scales={Tier.PROXY: SCALE},
    needs={Tier.PROXY: needs_of(SCALE)},
    headline="take_off_steps",
    shared={arm.name: (NEEDLE_4, arm.name) for arm in (BF16, NVFP4)},
    why_not=WHY_NOT,
)

_SHARED = {"": QERL, "_strong": _STRONG[0]}
_APART = {
    dose: dataclasses.replace(
        arm,
        name=f"{arm.name}_apart",
        label=f"{arm.label}, a draw per projection",
        noise=dataclasses.replace(arm.noise or NoiseConfig(), sharing="projection"),
    )
    for dose, arm in _SHARED.items()
}


def _sharing(dose: str, shared: Arm) -> Claim:
    sigma = (shared.noise or NoiseConfig()).sigma_start
    return take_off(
        f"sharing_costs_nothing{dose}",
        "QeRL takes off after as many steps with noise shared through the norms as with a "
        f"draw per projection, from a sigma of {sigma:g}",
        "section 3.3; Fig. 6",
        shared,
        _APART[dose],
        "noise",
        effect=paper_effects.OPEN_TAKE_OFF,
        equal=True,
    )


NEEDLE_SHARING = Target(
    name="needle_sharing",
    title="Noise shared through the norms, or drawn for each projection",
    statement="sharing the noise of a norm among the projections behind it costs nothing",
    source="section 3.3; Fig. 6, Eq. 10 to 12",
    arms=(*_SHARED.values(), *_APART.values()),
    metrics=METRICS_OF_LADDER,
    claims=tuple(_sharing(dose, shared) for dose, shared in _SHARED.items()),
    scales={Tier.PROXY: SCALE},
    needs={Tier.PROXY: needs_of(SCALE)},
    headline="take_off_steps",
    shared={QERL.name: (NEEDLE_4, QERL.name), _STRONG[0].name: (NEEDLE_DOSE, _STRONG[0].name)},
    why_not=WHY_NOT,
)
_SCALE_FRESH = dataclasses.replace(SCALE, seeds=FRESH_SEEDS)
NEEDLE_SHARING_FRESH = Target(
    name="needle_sharing_fresh",
    title="Strong noise shared through the norms, or drawn for each projection: fresh seeds",
    statement=NEEDLE_SHARING.statement,
    source=NEEDLE_SHARING.source,
    arms=(_SHARED["_strong"], _APART["_strong"]),
    metrics=METRICS_OF_LADDER,
    claims=(_sharing("_strong", _SHARED["_strong"]),),
    scales={Tier.PROXY: _SCALE_FRESH},
    needs={Tier.PROXY: needs_of(_SCALE_FRESH)},
    headline="take_off_steps",
    why_not=WHY_NOT,
)
