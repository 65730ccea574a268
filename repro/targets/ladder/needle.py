"""E1, the needle: formats and QeRL on three rungs, and the controls that show what could be seen.

Arms A are the paper's: BF16, NF4, MXFP4, NVFP4 and QeRL, all with LoRA, at one absolute learning
rate. Arms C are BF16 with rollouts drawn warmer or colder, the gradient that of the policy itself:
the decision alone at 1.3 or 0.6 of the scale's temperature, or all tokens at 0.7. The first two are
clean (answers are not garbled by them). The colder one is each rung's positive control: where the
policy explores less, it takes off later, or exploration decides nothing there. The warmer one,
on the middle rung alone, says what more of it is worth; no statement waits for it, and the pilot,
in which it was the control, found little to gain (`docs/protocol_history.md`).

`difficulty` asks whether the benefit grows as the prior falls. A claim compares arms of one target,
and a rung is a checkpoint, which belongs to a target's scale; so `difficulty` has no runs of its
own but *shares* arms of the two outer rungs, and declares in what their scales differ
(`Target.across`): the checkpoint, and with it the steps that a run may take and the threshold,
which lies half-way from where its curve starts. Its claims name them as factors. The alternative,
problem levels of different difficulty within one environment, was not taken: levels share one
policy that learns them together, so that a benefit at one shows at all. A rung's seeds are the
other rungs' seeds, with the same problems in the same order and the same order of channels, so the
quotient of quotients is paired. Over three rungs that are evenly spaced in the logarithm of the
prior (40, 4 and 0.5 %), the slope's least-squares estimate is half the difference of the outer two:
the middle rung would add nothing to the test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from repro.spec.arm import Arm, Exploration
from repro.spec.config import TrainScale
from repro.spec.effect import Assay, Effect, Look
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier
from repro.targets import paper_effects
from repro.targets.chosen_rates import EVERY_ARM, choice_file, chosen_rates
from repro.targets.claims import difference
from repro.targets.ladder.common import (
    FRESH_SEEDS,
    LOOKS,
    METRICS_OF_LADDER,
    NEEDLE,
    NOT_THE_PAPERS,
    OUTER_SEEDS,
    SEEDS,
    STEPS,
    SWEEP_SEEDS,
    THRESHOLD,
    THRESHOLD_WHERE_COMMON,
    TIERS,
    WHY_NOT,
    needs_of,
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


def named_rate(arm: Arm, name: str, grid: Mapping[str, float] = RATES) -> Arm:
    """Return an arm at one of a grid's rates, with the rate in its name."""
    rate = grid[name]
    return at_rate(
        dataclasses.replace(arm, name=f"{arm.name}_{name}", label=f"{arm.label}, lr {rate:g}"), rate
    )


RATED = (BF16_LORA, NVFP4_LORA, NVFP4_LORA_AQN)
SWEEP = dataclasses.replace(NEEDLE, checkpoint="proxy-30m-needle4", seeds=SWEEP_SEEDS)


def _rate() -> float:
    """Return the one rate of all arms: as the sweep chose it, before that the grid's middle."""
    chosen = dict(chosen_rates(SWEEP, choice_file(_SWEEP_NAME)))
    return chosen.get(EVERY_ARM, RATES["14e4"])


RATE = _rate()
NEEDLE_SWEEP = Target(
    name=_SWEEP_NAME,
    title="The learning rate at which the ladder's arms are compared",
    statement="of five absolute rates, all arms get the one with the highest training reward, mean "
    "over the steps, inside the grid",
    source="not in the paper",
    arms=tuple(named_rate(arm, name) for arm in RATED for name in RATES),
    metrics=METRICS_OF_LADDER,
    scales={Tier.PROXY: SWEEP},
    needs={Tier.PROXY: needs_of(SWEEP)},
    headline="train_reward_mean",
    why_not="a sweep at the proxy tier alone",
)

BF16, NF4, MXFP4, NVFP4, QERL = (
    at_rate(arm, RATE) for arm in (BF16_LORA, NF4_LORA, MXFP4_LORA, NVFP4_LORA, NVFP4_LORA_AQN)
)
# A completion opens with `<think>`; whether the working follows is decided by the token after it.
_OPENING_TOKENS = 2
# Colder: 0.7 for all tokens took 24 % more steps in the pilot, which a sixth more would not show
# with certainty; at 0.6 one decision in 25 becomes one in 200.
OPENING_WARMER, OPENING_COLDER = (
    dataclasses.replace(
        BF16,
        name=f"opening_{word}",
        label=f"BF16, LoRA, the decision drawn at T = {temperature:g}",
        exploration=Exploration(temperature=temperature, opening_tokens=_OPENING_TOKENS),
    )
    for word, temperature in (("warmer", 1.3), ("colder", 0.6))
)
COLDER = dataclasses.replace(
    BF16,
    name="rollout_colder",
    label="BF16, LoRA, rollouts drawn at T = 0.7",
    exploration=Exploration(temperature=0.7),
)

_CONTROL = Assay(
    kind="control",
    claim="opening_colder_later",
    because="where a colder decision does not put the take-off off by 15 %, exploration does not "
    "bind, and no source of entropy can show",
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
_BINDING = take_off(
    "opening_colder_later",
    "with the decision drawn colder, BF16 LoRA takes off after more steps",
    NOT_THE_PAPERS,
    OPENING_COLDER,
    BF16,
    "exploration",
    effect=paper_effects.CONTROL_TAKE_OFF,
)
_WARMER = take_off(
    "opening_warmer_sooner",
    "with the decision drawn warmer, BF16 LoRA takes off after fewer steps",
    NOT_THE_PAPERS,
    BF16,
    OPENING_WARMER,
    "exploration",
    effect=paper_effects.OPEN_TAKE_OFF,
)


def _key(*assays: Assay) -> tuple[Claim, ...]:
    return (
        take_off(
            "nvfp4_sooner",
            "NVFP4 LoRA takes off after fewer steps than 16-bit LoRA",
            "Fig. 4, upper row",
            BF16,
            NVFP4,
            "weight_format",
            effect=paper_effects.FORMAT_TAKE_OFF["bf16"],
            assays=assays,
        ),
        take_off(
            "aqn_sooner",
            "with AQN, NVFP4 LoRA takes off after fewer steps",
            "Fig. 8",
            NVFP4,
            QERL,
            "noise",
            effect=paper_effects.OPEN_TAKE_OFF,
            assays=assays,
        ),
        take_off(
            "qerl_sooner",
            "QeRL takes off after fewer steps than 16-bit LoRA",
            "Fig. 12",
            BF16,
            QERL,
            "weight_format",
            "noise",
            effect=paper_effects.QERL_TAKE_OFF,
            assays=assays,
        ),
    )


_KEY = _key(_CONTROL)
_FORMATS = (
    take_off(
        "nvfp4_sooner_than_nf4",
        "NVFP4 LoRA takes off after fewer steps than NF4 LoRA",
        "Fig. 4, upper row",
        NF4,
        NVFP4,
        "weight_format",
        effect=paper_effects.FORMAT_TAKE_OFF["nf4"],
        assays=(_CONTROL,),
    ),
    take_off(
        "nvfp4_sooner_than_mxfp4",
        "NVFP4 LoRA takes off after fewer steps than MXFP4 LoRA",
        "Fig. 4, lower row; in the upper row they cross a reward of .9 together",
        MXFP4,
        NVFP4,
        "weight_format",
        effect=paper_effects.OPEN_TAKE_OFF,
        assays=(_CONTROL,),
    ),
)
_ROLLOUT_COLDER = take_off(
    "rollout_colder_later",
    "with all tokens of a rollout drawn colder, BF16 LoRA takes off after more steps",
    NOT_THE_PAPERS,
    COLDER,
    BF16,
    "exploration",
    effect=paper_effects.OPEN_TAKE_OFF,
)


def _rung(
    name: str,
    prior: str,
    checkpoint: str,
    arms: tuple[Arm, ...],
    claims: tuple[Claim, ...],
    steps: int = STEPS,
    threshold: float = THRESHOLD,
    seeds: Sequence[int] = OUTER_SEEDS,
    looks: Sequence[Look] = (),
) -> Target:
    scale: TrainScale = dataclasses.replace(
        NEEDLE,
        checkpoint=checkpoint,
        steps=steps,
        evaluation=dataclasses.replace(NEEDLE.evaluation, threshold=threshold),
        seeds=tuple(seeds),
    )
    return Target(
        name=name,
        title=f"The needle at {prior}: who takes off first",
        statement=f"where the habit that earns the reward is shown in {prior} of completions, "
        "entropy from rounding or noise brings the take-off forward",
        source="Figs. 4, 7 and 12; section 3.2",
        arms=arms,
        looks=tuple(looks),
        metrics=METRICS_OF_LADDER,
        claims=claims,
        scales={Tier.PROXY: scale},
        needs={Tier.PROXY: needs_of(scale)},
        headline="take_off_steps",
        why_not=WHY_NOT,
    )


def _where_rare(*claims: Claim) -> tuple[Claim, ...]:
    return tuple(dataclasses.replace(claim, assays=(*claim.assays, _BINDS)) for claim in claims)


_CORE = (BF16, NVFP4, QERL, OPENING_COLDER)
NEEDLE_40 = _rung(
    "needle_40",
    "40 %",
    "proxy-30m",
    _CORE,
    (*_KEY, _BINDING),
    threshold=THRESHOLD_WHERE_COMMON,
)
NEEDLE_4 = _rung(
    "needle_4",
    "4 %",
    "proxy-30m-needle4",
    (*_CORE, OPENING_WARMER, NF4, MXFP4, COLDER),
    (*_where_rare(*_KEY, *_FORMATS), _BINDING, _WARMER, _ROLLOUT_COLDER),
    seeds=SEEDS,
    looks=LOOKS,
)
# Both looks at the rung have spent their level, so what they left open is asked again, of seeds
# that no run has had. The control needs no second proof: it is the rung's, of the same policy.
NEEDLE_4_FRESH = Target(
    name="needle_4_fresh",
    title="The needle at 4 % again: the key contrasts, forty fresh seeds",
    statement="entropy from rounding or noise brings the take-off forward; asked to within a tenth",
    source="Figs. 4, 8 and 12; section 3.2",
    arms=(BF16, NVFP4, QERL),
    metrics=METRICS_OF_LADDER,
    claims=_where_rare(*_key()),
    scales={
        Tier.PROXY: dataclasses.replace(NEEDLE_4.scales[Tier.PROXY], seeds=FRESH_SEEDS),
    },
    needs=NEEDLE_4.needs,
    headline="take_off_steps",
    why_not=WHY_NOT,
)
# Flat for longer, the rarer the habit: nearly twice as long, which with its arms fewer leaves half
# an hour for the two rungs that decide.
_STEPS_WHERE_RAREST = 240
NEEDLE_05 = _rung(
    "needle_05",
    "0.5 %",
    "proxy-30m-needle05",
    _CORE,
    (*_where_rare(*_KEY), _BINDING),
    steps=_STEPS_WHERE_RAREST,
)

# Of twenty seeds at 0.5 % four take off with BF16, ten with NVFP4, six with QeRL and none with the
# decision colder (0236d39), so quotients of steps say nothing there, but which runs come across the
# habit at all may: what that first look at the counts suggests is asked of seeds that no run of the
# rung has had. The control draws the decision warmer: where few take off, a colder one has no room
# to show.
_FOUND_SEEDS = tuple(range(236, 284))


def _finds_more(*of: Any, assays: Sequence[Assay] = ()) -> Claim:
    """Return the claim that more runs of an arm take off; arguments as `difference` has them."""
    effect = paper_effects.FOUND
    claim = difference(*of, effect=effect, metric="took_off", assays=tuple(assays), tiers=TIERS)
    return dataclasses.replace(claim, test="mcnemar")


_ROOM = Assay(
    kind="range",
    arm=BF16.name,
    metric="took_off",
    at_most=0.8,
    because="where nearly every run takes off, no arm can do so in a fifth more of them",
)
_FINDS = Assay(
    kind="control",
    claim="opening_warmer_finds_more",
    because="where a warmer decision does not bring more runs across the habit, exploration does "
    "not bind, and no source of entropy can show",
)
NEEDLE_05_FRESH = Target(
    name="needle_05_fresh",
    title="The needle at 0.5 % again: which runs come across the habit, forty-eight fresh seeds",
    statement="where the habit that earns the reward is shown in 0.5 % of completions, more runs "
    "with entropy from rounding or noise come across it",
    source="Figs. 7, 12 and 13; section 3.2",
    arms=(BF16, NVFP4, QERL, OPENING_WARMER),
    metrics=METRICS_OF_LADDER,
    claims=(
        _finds_more(
            "nvfp4_finds_more",
            "more runs of NVFP4 LoRA take off than of 16-bit LoRA",
            "Fig. 4",
            NVFP4,
            BF16,
            "weight_format",
            assays=(_ROOM, _FINDS),
        ),
        _finds_more(
            "aqn_finds_more",
            "with AQN, more runs of NVFP4 LoRA take off",
            "Fig. 8",
            QERL,
            NVFP4,
            "noise",
            assays=(_FINDS,),
        ),
        _finds_more(
            "qerl_finds_more",
            "more runs of QeRL take off than of 16-bit LoRA",
            "Figs. 7, 12 and 13",
            QERL,
            BF16,
            "weight_format",
            "noise",
            assays=(_ROOM, _FINDS),
        ),
        _finds_more(
            "opening_warmer_finds_more",
            "with the decision drawn warmer, more runs of BF16 LoRA take off",
            NOT_THE_PAPERS,
            OPENING_WARMER,
            BF16,
            "exploration",
            assays=(_ROOM,),
        ),
    ),
    scales={
        Tier.PROXY: dataclasses.replace(NEEDLE_05.scales[Tier.PROXY], seeds=_FOUND_SEEDS),
    },
    needs=NEEDLE_05.needs,
    headline="took_off",
    why_not=WHY_NOT,
)

# Of the evaluation the threshold.
_ACROSS = ("checkpoint", "steps", "evaluation")
_OUTER = {"rare": NEEDLE_05, "common": NEEDLE_40}
_RUNGS = {
    (rung, arm.name): dataclasses.replace(
        arm, name=f"{arm.name}_{rung}", label=f"{arm.label}, {rung} habit"
    )
    for rung in _OUTER
    for arm in (BF16, NVFP4, QERL, OPENING_COLDER)
}


def _grows(
    name: str,
    statement: str,
    source: str,
    slower: Arm,
    faster: Arm,
    *factor: str,
    effect: Effect,
    assays: Sequence[Assay] = (),
) -> Claim:
    pairs = [[_RUNGS[rung, one.name] for one in (slower, faster)] for rung in _OUTER]
    watched = [one for pair in pairs for one in pair[slower is OPENING_COLDER :]]
    return Claim(
        name=name,
        statement=f"{statement} more where the habit is rare (0.5 %) than common (40 %)",
        source=source,
        kind="interaction",
        arms=tuple(one.name for pair in pairs for one in pair),
        metric="take_off_steps",
        factor=(*_ACROSS, *factor),
        effect=effect,
        assays=(*takes_off(*watched), *assays),
        tiers=TIERS,
    )


_GROWING = Assay(
    kind="control",
    claim="exploration_matters_more",
    because="where a colder decision itself does not cost more as the habit gets rarer, no source "
    "of entropy can save more",
)
DIFFICULTY = Target(
    name="difficulty",
    title="Whether the benefit grows with the difficulty: two rungs of the needle compared",
    statement="what a format or QeRL saves of the steps to the take-off grows as the prior falls",
    source="Fig. 13, 32B on harder problems",
    arms=tuple(_RUNGS.values()),
    metrics=METRICS_OF_LADDER,
    claims=(
        _grows(
            "nvfp4_helps_more",
            "NVFP4 brings the take-off forward",
            "Fig. 13",
            BF16,
            NVFP4,
            "weight_format",
            effect=paper_effects.GROWING_TAKE_OFF,
            assays=(_GROWING,),
        ),
        _grows(
            "qerl_helps_more",
            "QeRL brings the take-off forward",
            "Fig. 13",
            BF16,
            QERL,
            "weight_format",
            "noise",
            effect=paper_effects.GROWING_TAKE_OFF,
            assays=(_GROWING,),
        ),
        _grows(
            "exploration_matters_more",
            "a colder decision puts the take-off off",
            NOT_THE_PAPERS,
            OPENING_COLDER,
            BF16,
            "exploration",
            effect=paper_effects.CONTROL_TAKE_OFF,
        ),
    ),
    scales={Tier.PROXY: NEEDLE_05.scales[Tier.PROXY]},
    needs={
        Tier.PROXY: needs_of(NEEDLE_05.scales[Tier.PROXY], NEEDLE_40.scales[Tier.PROXY]),
    },
    headline="take_off_steps",
    shared={arm.name: (_OUTER[rung], name) for (rung, name), arm in _RUNGS.items()},
    across=_ACROSS,
    why_not=WHY_NOT,
)
