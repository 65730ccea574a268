"""E1, the needle: formats and QeRL on three rungs, and the controls that show what could be seen.

Arms A are the paper's: BF16, NF4, MXFP4, NVFP4 and QeRL, all with LoRA, at one absolute learning
rate. Arms C are BF16 with rollouts drawn warmer or colder, the gradient that of the policy itself:
all tokens at 1.3 or 0.7 of the scale's temperature, or the decision alone at 1.3. The last is clean
(answers are not garbled by it) and is each rung's positive control.

`difficulty` asks whether the benefit grows as the prior falls. A claim compares arms of one target,
and a rung is a checkpoint, which belongs to a target's scale; so `difficulty` has no runs of its
own but *shares* arms of the two outer rungs, and declares that their scales differ in the
checkpoint (`Target.across`), which its claims name as a factor. The alternative, problem levels of
different difficulty within one environment, was not taken: levels share one policy that learns them
together, so that a benefit at one shows at all. A rung's seeds are the other rungs' seeds, with the
same problems in the same order and the same order of channels, so the quotient of quotients is
paired. Over three rungs that are evenly spaced in the logarithm of the prior (40, 4 and 0.5 %), the
slope's least-squares estimate is half the difference of the outer two: the middle rung would add
nothing to the test.
"""

from __future__ import annotations

import dataclasses

from repro.spec.config import Arm, Exploration, TrainScale
from repro.spec.effect import Assay, Effect
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier
from repro.targets import paper_effects
from repro.targets.chosen_rates import EVERY_ARM, choice_file, chosen_rates
from repro.targets.ladder.common import (
    LOOKS,
    METRICS_OF_LADDER,
    NEEDLE,
    NOT_THE_PAPERS,
    SWEEP_SEEDS,
    TIERS,
    WHY_NOT,
    cost_of,
    take_off,
    takes_off,
)
from repro.targets.table1 import BF16_LORA, MXFP4_LORA, NF4_LORA, NVFP4_LORA, NVFP4_LORA_AQN

_SWEEP_NAME = "learning_rates_needle"
# From 0.7 to 2.8 thousandths in four steps of about the root of two: collapse was seen at 3e-3 with
# all arms of the tier's first sweep, and with none at 1e-3.
RATES = {"7e4": 7e-4, "1e3": 1e-3, "14e4": 1.4e-3, "2e3": 2e-3, "28e4": 2.8e-3}


def at_rate(arm: Arm, rate: float) -> Arm:
    """Return an arm at an absolute peak rate."""
    return dataclasses.replace(arm, learning_rate=rate)


def named_rate(arm: Arm, name: str) -> Arm:
    """Return an arm at one of `RATES`, with the rate in its name."""
    rate = RATES[name]
    return at_rate(
        dataclasses.replace(arm, name=f"{arm.name}_{name}", label=f"{arm.label}, lr {rate:g}"), rate
    )


RATED = (BF16_LORA, NVFP4_LORA, NVFP4_LORA_AQN)
SWEEP = dataclasses.replace(NEEDLE, checkpoint="proxy-30m-needle4", seeds=SWEEP_SEEDS)


def _rate() -> float:
    """Return the one rate of all arms: as the sweep chose it.

    Until it has chosen, 1e-3: of the tier's first sweep the best by area for four formats of five.
    """
    chosen = dict(chosen_rates(SWEEP, choice_file(_SWEEP_NAME)))
    return chosen.get(EVERY_ARM, 1e-3)


RATE = _rate()
NEEDLE_SWEEP = Target(
    name=_SWEEP_NAME,
    title="The learning rate at which the ladder's arms are compared",
    statement="of five absolute rates, all arms get the one with the largest area under the "
    "training curve, inside the grid",
    source="not in the paper",
    arms=tuple(named_rate(arm, name) for arm in RATED for name in RATES),
    metrics=METRICS_OF_LADDER,
    scales={Tier.PROXY: SWEEP},
    costs={Tier.PROXY: cost_of(SWEEP)},
    headline="train_area",
    why_not="a sweep at the proxy tier alone",
)

BF16, NF4, MXFP4, NVFP4, QERL = (
    at_rate(arm, RATE) for arm in (BF16_LORA, NF4_LORA, MXFP4_LORA, NVFP4_LORA, NVFP4_LORA_AQN)
)
# A completion opens with `<think>`; whether the working follows is decided by the token after it.
_OPENING_TOKENS = 2
OPENING_WARMER = dataclasses.replace(
    BF16,
    name="opening_warmer",
    label="BF16, LoRA, the decision drawn at T = 1.3",
    exploration=Exploration(temperature=1.3, opening_tokens=_OPENING_TOKENS),
)
WARMER, COLDER = (
    dataclasses.replace(
        BF16,
        name=f"rollout_{word}",
        label=f"BF16, LoRA, rollouts drawn at T = {temperature:g}",
        exploration=Exploration(temperature=temperature),
    )
    for word, temperature in (("warmer", 1.3), ("colder", 0.7))
)

_CONTROL = Assay(
    kind="control",
    claim="opening_warmer_sooner",
    because="where a warmer decision does not bring the take-off forward by 15 %, exploration does "
    "not bind, and no source of entropy can show",
)
# Of the tiny policy's groups of eight, 33 % were so in the first ten steps at a prior of 4 %, and
# 68 % of `proxy-30m`'s at 40 %.
_BINDS = Assay(
    kind="range",
    arm=BF16.name,
    metric="informative_first",
    at_most=50.0,
    because="where most groups have right and wrong answers from the first steps on, there is "
    "something to learn from without exploring",
)
_POSITIVE = take_off(
    "opening_warmer_sooner",
    "with the decision drawn warmer, BF16 LoRA takes off after fewer tokens",
    NOT_THE_PAPERS,
    BF16,
    OPENING_WARMER,
    "exploration",
    effect=paper_effects.CONTROL_TAKE_OFF,
)
_KEY = (
    take_off(
        "nvfp4_sooner",
        "NVFP4 LoRA takes off after fewer tokens than 16-bit LoRA",
        "Fig. 4, upper row",
        BF16,
        NVFP4,
        "weight_format",
        effect=paper_effects.FORMAT_TAKE_OFF["bf16"],
        assays=(_CONTROL,),
    ),
    take_off(
        "aqn_sooner",
        "with AQN, NVFP4 LoRA takes off after fewer tokens",
        "Fig. 8",
        NVFP4,
        QERL,
        "noise",
        effect=paper_effects.OPEN_TAKE_OFF,
        assays=(_CONTROL,),
    ),
    take_off(
        "qerl_sooner",
        "QeRL takes off after fewer tokens than 16-bit LoRA",
        "Fig. 12",
        BF16,
        QERL,
        "weight_format",
        "noise",
        effect=paper_effects.QERL_TAKE_OFF,
        assays=(_CONTROL,),
    ),
)
_FORMATS = (
    take_off(
        "nvfp4_sooner_than_nf4",
        "NVFP4 LoRA takes off after fewer tokens than NF4 LoRA",
        "Fig. 4, upper row",
        NF4,
        NVFP4,
        "weight_format",
        effect=paper_effects.FORMAT_TAKE_OFF["nf4"],
        assays=(_CONTROL,),
    ),
    take_off(
        "nvfp4_sooner_than_mxfp4",
        "NVFP4 LoRA takes off after fewer tokens than MXFP4 LoRA",
        "Fig. 4, lower row; in the upper row they cross a reward of .9 together",
        MXFP4,
        NVFP4,
        "weight_format",
        effect=paper_effects.OPEN_TAKE_OFF,
        assays=(_CONTROL,),
    ),
)
_TEMPERATURES = (
    take_off(
        "rollout_warmer_sooner",
        "with all tokens of a rollout drawn warmer, BF16 LoRA takes off after fewer tokens",
        NOT_THE_PAPERS,
        BF16,
        WARMER,
        "exploration",
        effect=paper_effects.CONTROL_TAKE_OFF,
    ),
    take_off(
        "rollout_colder_later",
        "with all tokens of a rollout drawn colder, BF16 LoRA takes off after more tokens",
        NOT_THE_PAPERS,
        COLDER,
        BF16,
        "exploration",
        effect=paper_effects.CONTROL_TAKE_OFF,
    ),
)


def _rung(
    name: str, prior: str, checkpoint: str, arms: tuple[Arm, ...], claims: tuple[Claim, ...]
) -> Target:
    scale: TrainScale = dataclasses.replace(NEEDLE, checkpoint=checkpoint)
    return Target(
        name=name,
        title=f"The needle at {prior}: who takes off first",
        statement=f"where the habit that earns the reward is shown in {prior} of completions, "
        "entropy from rounding or noise brings the take-off forward",
        source="Figs. 4, 7 and 12; section 3.2",
        arms=arms,
        looks=LOOKS,
        metrics=METRICS_OF_LADDER,
        claims=claims,
        scales={Tier.PROXY: scale},
        costs={Tier.PROXY: cost_of(scale)},
        headline="take_off_tokens",
        why_not=WHY_NOT,
    )


_ALL = (BF16, NF4, MXFP4, NVFP4, QERL, WARMER, COLDER, OPENING_WARMER)
_EVERY_CLAIM = (
    *(dataclasses.replace(claim, assays=(*claim.assays, _BINDS)) for claim in (*_KEY, *_FORMATS)),
    _POSITIVE,
    *_TEMPERATURES,
)
NEEDLE_40 = _rung(
    "needle_40", "40 %", "proxy-30m", (BF16, NVFP4, QERL, OPENING_WARMER), (*_KEY, _POSITIVE)
)
NEEDLE_4 = _rung("needle_4", "4 %", "proxy-30m-needle4", _ALL, _EVERY_CLAIM)
NEEDLE_05 = _rung("needle_05", "0.5 %", "proxy-30m-needle05", _ALL, _EVERY_CLAIM)

_OUTER = {"rare": NEEDLE_05, "common": NEEDLE_40}
_RUNGS = {
    (rung, arm.name): dataclasses.replace(
        arm, name=f"{arm.name}_{rung}", label=f"{arm.label}, {rung} habit"
    )
    for rung in _OUTER
    for arm in (BF16, NVFP4, QERL, OPENING_WARMER)
}


def _grows(name: str, statement: str, source: str, arm: Arm, *factor: str, effect: Effect) -> Claim:
    arms = [_RUNGS[rung, one.name] for rung in ("rare", "common") for one in (BF16, arm)]
    return Claim(
        name=name,
        statement=f"{statement} more where the habit is rare (0.5 %) than common (40 %)",
        source=source,
        kind="interaction",
        arms=tuple(one.name for one in arms),
        metric="take_off_tokens",
        factor=("checkpoint", *factor),
        effect=effect,
        assays=(*takes_off(*arms), *(() if arm is OPENING_WARMER else (_GROWING,))),
        tiers=TIERS,
    )


_GROWING = Assay(
    kind="control",
    claim="exploration_helps_more",
    because="where a warmer decision itself does not help more as the habit gets rarer, no source "
    "of entropy can",
)
DIFFICULTY = Target(
    name="difficulty",
    title="Whether the benefit grows with the difficulty: two rungs of the needle compared",
    statement="what a format or QeRL saves of the tokens to the take-off grows as the prior falls",
    source="Fig. 13, 32B on harder problems",
    arms=tuple(_RUNGS.values()),
    looks=LOOKS,
    metrics=METRICS_OF_LADDER,
    claims=(
        _grows(
            "nvfp4_helps_more",
            "NVFP4 brings the take-off forward",
            "Fig. 13",
            NVFP4,
            "weight_format",
            effect=paper_effects.OPEN_TAKE_OFF,
        ),
        _grows(
            "qerl_helps_more",
            "QeRL brings the take-off forward",
            "Fig. 13",
            QERL,
            "weight_format",
            "noise",
            effect=paper_effects.OPEN_TAKE_OFF,
        ),
        _grows(
            "exploration_helps_more",
            "a warmer decision brings the take-off forward",
            NOT_THE_PAPERS,
            OPENING_WARMER,
            "exploration",
            effect=paper_effects.CONTROL_TAKE_OFF,
        ),
    ),
    scales={Tier.PROXY: NEEDLE_05.scales[Tier.PROXY]},
    costs={
        Tier.PROXY: cost_of(NEEDLE_05.scales[Tier.PROXY], NEEDLE_40.scales[Tier.PROXY]),
    },
    headline="take_off_tokens",
    shared={arm.name: (_OUTER[rung], name) for (rung, name), arm in _RUNGS.items()},
    across=("checkpoint",),
    why_not=WHY_NOT,
)
