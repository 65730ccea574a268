"""The second round on Qwen2.5-Coder: a baseline that learns, then the paper's contrasts on it.

The first round (`repro.targets.coder.first_round`) trained with 16 prompts x 8 completions at a
constant rate. Its 16-bit baseline gained four points, and seeds ended three to six points apart.
This round chooses its settings by 16-bit LoRA alone, on seeds that no table uses, and fixes its
plans before the runs of its tables:

* the gate (`baseline_coder_*`): batch, peak rate and schedule with which 16-bit LoRA learns;
* `learning_coder_*`: BF16, NVFP4 and NVFP4 + AQN. The claims are whether four bits learn faster
  from their own start, and whether QeRL ends higher or within half of the paper's gain. Tests late
  in a run are averaged, since one checkpoint is a draw of where a run drifts. An untrained arm
  samples the prompts of the first steps, so that start and prompts are no noise. Random rewards,
  the control, are the gate's;
* `learning_coder_*_details`: what is shown beside them, in a family of its own. The end of NVFP4
  without AQN is here: the paper's headline is QeRL's, and a further claim widens all intervals;
* `rates_coder_0_5b`: 16-bit LoRA at a half and a tenth of its rate. QeRL's scripts train four bits
  at twice LoRA's rate and its authors call ten times the best, so the rate alone may be faster.

The base of the 1.5B is roughened by its file by two thirds of NVFP4's KL. It is trained in this
round although that is above the first round's limit of one half: a declared deviation, as the 1.5B
has the paper's entropy and the paper's loss by NVFP4 before training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from repro.spec.arm import Arm
from repro.spec.claim import Claim, Effect
from repro.spec.config import TrainScale
from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import mini, paper_effects, table1
from repro.targets.coder.first_round import (
    AQN,
    BF16,
    METRICS,
    NVFP4,
    end_effect,
    finished,
    scale_of,
)
from repro.targets.table_rows import Statement, gains, metric, variant

# The rate with the highest mean of the tests from step 100 on is taken, of two within a point the
# lower. It must gain 8 points at T 0.6 and 5 greedily, and end within 2 points of its best test;
# random reward must gain less than 2.
_PEAK_RATE = 1e-4
_GATE_RATES = {"3e5": 0.3, "1e4": 1.0, "2e4": 2.0}
# Of the 1.5B, in fewer and smaller steps (a sitting of two cards is to hold a seed's arms), by the
# same rule from step 75 on, but gains of 4 and 2.5 points, as it starts at 57 %. Until they run,
# `learning_coder_1_5b` has the 0.5B's rate and `_FASTER`. The gate's own replace both before its
# first run, which fixes its plan. If neither rate passes, the claims on its ends leave the plan.
_GATE_RATES_1_5B, _SMALLER = {"5e5": 0.5, "1e4": 1.0}, {"prompts_per_rollout": 32}
# Steps whose mean says how fast an arm learns, from 1 on.
_FIRST = 100
# Right in training, in percent, from which on an arm has taken off; they start at 17 and 52.
_THRESHOLDS = {"0_5b": 30.0, "1_5b": 60.0}
# Half of the paper's gain at the end, in points.
_EQUAL = 1.35


def _rounds(
    size: str, steps: int, tests: Sequence[int], rate: float = _PEAK_RATE, **changes: object
) -> TrainScale:
    """Return the first round's scale with 64 prompts a step and a rate that falls to zero."""
    first = scale_of(size)
    rates = dataclasses.replace(first.optimizer.learning_rates, lora_16bit=rate, lora_4bit=rate)
    settings = {
        "steps": steps,
        "prompts_per_rollout": 64,
        "optimizer": dataclasses.replace(first.optimizer, schedule="cosine", learning_rates=rates),
        "evaluation": dataclasses.replace(
            first.evaluation, test_at=tuple(tests), threshold=_THRESHOLDS[size]
        ),
    }
    return dataclasses.replace(first, **(settings | changes))  # type: ignore[arg-type]


def _at_peak(name: str, factor: float) -> Arm:
    label = f", peak rate {factor * _PEAK_RATE:.0e}"
    return variant(BF16, name, label, learning_rate_factor=factor)


def _gate_arms(rates: Mapping[str, float]) -> tuple[Arm, ...]:
    return (*(_at_peak(*rate) for rate in rates.items()), table1.RANDOM_REWARD)


def _gate(size: str, suffix: str, arms: Sequence[Arm], scale: TrainScale) -> Target:
    falls = "cosine" if scale.optimizer.schedule == "cosine" else "constant rate"
    words = f"{scale.prompts_per_rollout} prompts x {scale.group_size}, {falls}"
    return Target(
        name=f"baseline_coder_{size}{suffix}",
        title=f"What 16-bit LoRA learns on Qwen2.5-Coder-{mini.spoken(size)}, {words}",
        statement="a larger batch and a falling rate make 16-bit LoRA a baseline that learns",
        source="not in the paper; the choice of settings for its contrasts on this model",
        arms=tuple(arms),
        metrics=METRICS,
        headline="accuracy",
        scales={Tier.MINI: dataclasses.replace(scale, seeds=mini.TUNING_SEEDS)},
    )


_GATE = _rounds("0_5b", 150, (75, 100, 125))
_CHOSEN, _CONSTANT = [_at_peak("1e4", 1.0)], scale_of("0_5b").optimizer
_GATES = (
    _gate("0_5b", "", _gate_arms(_GATE_RATES), _GATE),
    _gate("0_5b", "_constant", _CHOSEN, dataclasses.replace(_GATE, optimizer=_CONSTANT)),
    _gate("0_5b", "_16", _CHOSEN, dataclasses.replace(_GATE, prompts_per_rollout=16)),
    _gate("1_5b", "", _gate_arms(_GATE_RATES_1_5B), _rounds("1_5b", 100, (50, 75), **_SMALLER)),
)
# What `train` begins from, for a model of a user's own (`repro.targets.presets`).
BASELINE: TrainScale = _GATES[0].scales[Tier.MINI]

_START, _NVFP4_START = map(finished, (table1.BF16, table1.NVFP4))
_EARLY = f"train_accuracy_sampled_to_{_FIRST}"
_TESTED = (
    *METRICS,
    metric("test_late", "percent", "mean of the late tests", "higher"),
    metric("test_late_greedy", "percent", "the same, greedy", "higher"),
    metric("test_area", "percent", "mean height of the tests", "higher"),
    metric(_EARLY, "share", f"right in training, steps 1 to {_FIRST}", "higher"),
    metric("informative_first", "percent", "groups that teach, first steps", "higher"),
)
_METRICS = (
    *_TESTED,
    metric("pass_at_1_explored", "percent", "pass@1 after training", "higher"),
    metric("pass_at_16_explored", "percent", "pass@16 after training", "higher"),
    metric("entropy_explored", "nats", "entropy after training", "neither"),
)
_OVER_STEPS = "Figs. 4 and 12, on a smaller checkpoint"
_FASTER = Effect(
    paper=0.056,
    smallest=0.015,
    measure="units",
    place="Fig. 4's 2.31 x, as what the gate's curve at the chosen rate gains in steps 1 to 100 "
    "where it is passed 2.31 times as fast",
    because="what the square root of 2.31 is worth on the first round's curve, 1.3 to 1.7 points; "
    "on the gate's it is 3.3",
)
# An arm of a pair whose seeds tell nothing of one another is compared by Welch's test.
_ENDS: dict[str, Any] = {"widest": 2.7, "unpaired_below": 0.3, "secondary": ("iqm", "improvement")}


def _faster(name: str, words: str, arms: Sequence[Arm]) -> Claim:
    """Return the claim that four-bit arms rise more above their own start than BF16 does."""
    contrast = {arm.name: 1 / len(arms) for arm in arms}
    contrast |= {_NVFP4_START.name: -1.0, BF16.name: -1.0, _START.name: 1.0}
    return Claim(
        name=name,
        statement=f"{words} learns faster from its own start than 16-bit LoRA: it is right more "
        f"often in steps 1 to {_FIRST}, each less its untrained policy on the same prompts",
        source=_OVER_STEPS,
        contrast=contrast,
        metric=_EARLY,
        factor=("weight_format", "noise", "training"),
        effect=_FASTER,
    )


def _ends_equal(name: str, words: str, arm: Arm) -> Claim:
    text = f"{words} ends within {_EQUAL} points of 16-bit LoRA"
    return Statement(name, text, mini.SOURCE).above(
        arm,
        BF16,
        "weight_format noise",
        metric="test_late",
        test="tost",
        side="within",
        bound=_EQUAL,
        because="half of what QeRL gains over 16-bit LoRA in the paper",
        unpaired_below=0.3,
    )


_QERL, _PLAIN = "QeRL (NVFP4, LoRA, AQN)", "NVFP4 LoRA without added noise"
_QERL_AND_LORA = (AQN, BF16, "weight_format noise")
_PRIMARY = (
    *gains(BF16, NVFP4, AQN),
    _faster("nvfp4_faster", "NVFP4 LoRA, with and without AQN together,", (NVFP4, AQN)),
    Statement(
        "qerl_ends_higher", f"{_QERL} ends more accurate than 16-bit LoRA", mini.SOURCE
    ).above(*_QERL_AND_LORA, end_effect(2.7, "90.8 - 88.1"), "test_late", **_ENDS),
    _ends_equal("qerl_ends_equal", _QERL, AQN),
)
_DETAILS = (
    _faster("plain_nvfp4_faster", _PLAIN, (NVFP4,)),
    _faster("qerl_faster", _QERL, (AQN,)),
    Statement(
        "nvfp4_ends_higher", f"{_PLAIN} ends more accurate than 16-bit LoRA", mini.SOURCE
    ).above(NVFP4, BF16, "weight_format", end_effect(0.4, "88.5 - 88.1"), "test_late", **_ENDS),
    _ends_equal("nvfp4_ends_equal", _PLAIN, NVFP4),
    table1.AQN_HELPS(mini.SOURCE).above(
        AQN, NVFP4, "noise", end_effect(2.3, "90.8 - 88.5"), "test_late", **_ENDS
    ),
    Statement(
        "qerl_higher_throughout", f"{_QERL} is more accurate over the tests of a run", _OVER_STEPS
    ).above(*_QERL_AND_LORA, end_effect(2.7, "90.8 - 88.1"), "test_area"),
    mini.NVFP4_MORE_ENTROPY.above(
        NVFP4, BF16, "weight_format", paper_effects.ENTROPY["nvfp4"], "entropy_first"
    ),
    Statement(
        "qerl_more_entropy_after",
        "after training, QeRL has a higher entropy than 16-bit LoRA",
        "Fig. 14, on a smaller checkpoint",
    ).above(*_QERL_AND_LORA, paper_effects.ENTROPY_LATE, "entropy_explored"),
    Statement(
        "qerl_finds_more_after",
        "after training, QeRL solves more problems than 16-bit LoRA by the best of 16 samples",
        "not in the paper; section 3.2 implies it",
    ).above(*_QERL_AND_LORA, paper_effects.OPEN_UNSOLVED, "pass_at_16_explored"),
)


def _learning(size: str, scale: TrainScale) -> tuple[Target, Target]:
    """Return the paper's contrasts of one size, and what is shown beside them."""
    evaluation = dataclasses.replace(
        scale.evaluation, explored_samples=16, explored_problems=200, prompts_of_steps=_FIRST
    )
    primary = Target(
        name=f"learning_coder_{size}",
        title=f"Table 1's contrast on Qwen2.5-Coder-{mini.spoken(size)}, on a baseline that learns",
        statement="NVFP4 weights with LoRA and AQN learn faster than 16-bit LoRA and end above it",
        source="Table 1; Figs. 4 and 12; the size and the settings are this suite's",
        arms=(_START, _NVFP4_START, BF16, NVFP4, AQN),
        metrics=_METRICS,
        claims=_PRIMARY,
        headline="test_late",
        scales={Tier.MINI: dataclasses.replace(scale, evaluation=evaluation)},
    )
    details = dataclasses.replace(
        primary,
        name=f"{primary.name}_details",
        title=f"{primary.title}: each arm, AQN, entropy and many samples",
        claims=_DETAILS,
        scales={},
        records_of=primary,
    )
    return primary, details


_HALF = variant(BF16, "half_rate", " at a half of its rate", learning_rate_factor=0.5)
_TENTH = variant(BF16, "tenth_rate", " at a tenth of its rate", learning_rate_factor=0.1)
_OF_RATES = "not in the paper; its scripts give four bits twice LoRA's rate, its authors name ten"
_RATES = Target(
    name="rates_coder_0_5b",
    title="What 16-bit LoRA's learning rate is worth on Qwen2.5-Coder-0.5B",
    statement="trained at a lower rate, 16-bit LoRA itself takes off as late as the paper's does",
    source=_OF_RATES,
    arms=(BF16, _HALF, _TENTH),
    metrics=_TESTED,
    claims=tuple(
        claim
        for arm, words in ((_HALF, "a half"), (_TENTH, "a tenth"))
        for claim in (
            Statement(
                f"{arm.name}_later",
                f"16-bit LoRA takes more steps to take off at {words} of its rate; a run that "
                "never does counts as all its steps",
                _OF_RATES,
            ).times(
                arm,
                BF16,
                "learning_rate_factor",
                "take_off_steps",
                effect=paper_effects.FORMAT_TAKE_OFF,
            ),
            Statement(
                f"{arm.name}_ends_lower",
                f"16-bit LoRA ends lower at {words} of its rate",
                _OF_RATES,
            ).above(
                BF16,
                arm,
                "learning_rate_factor",
                end_effect(2.7, "90.8 - 88.1, as if all of it"),
                "test_late",
                unpaired_below=0.3,
            ),
        )
    ),
    headline="take_off_steps",
    # As few steps as take-off needs, and late tests alone. The plan of seed 0 had four seeds; the
    # fifth was added after it was seen, as fewer give no verdict: verdicts are post hoc.
    scales={Tier.MINI: _rounds("0_5b", 100, (68, 84), seeds=(0, 1, 2, 3, 4))},
)

CODER_LEARNING = (
    *_GATES,
    *_learning("1_5b", _rounds("1_5b", 100, (40, 68, 76, 84, 92), rate=_PEAK_RATE, **_SMALLER)),
    _RATES,
    *_learning("0_5b", _rounds("0_5b", 150, (50, 102, 114, 126, 138))),
)
