"""Figures 4, 5, 7, 8, 12, 13 and 14: reward and entropy over training.

Figures 4, 5 and 8 draw the runs of Table 1, so they read its records. The paper's curves begin up
to 0.4 apart while the untrained accuracies differ by 6 points: what they show at the start is the
format of the answers. The claims here are on means over all steps, with the same problems in the
same order for every arm of a seed. Figures 7, 12 and 14 draw Table 2's runs, Figure 13 (32B, harder
problems) those of a larger model.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import DAPO, Arm
from repro.spec.claim import slope
from repro.spec.effect import Effect
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier
from repro.targets import paper_effects, paper_tier
from repro.targets.table1 import (
    BF16_FULL,
    BF16_LORA,
    METRICS,
    MXFP4_LORA,
    NF4_LORA,
    NVFP4_LORA,
    NVFP4_LORA_AQN,
)
from repro.targets.table2 import BENCHMARK_METRICS, TABLE2
from repro.targets.table_rows import above

_FORMATS = (BF16_LORA, NF4_LORA, MXFP4_LORA, NVFP4_LORA)
_BIGMATH_ARMS = tuple(
    arm for arm in TABLE2.arms if arm.name in ("bf16_full", "bf16_lora", "nvfp4_lora_aqn")
)
_REWARD = "train_reward_mean"
_RATE = "weight_format learning_rate"


def _reward_by_format(source: str) -> tuple[Claim, ...]:
    """Return the claims on the training reward by format."""
    return (
        Claim(
            name="reward_order",
            statement="the mean training reward rises in the order BF16, NF4, MXFP4, NVFP4",
            source=source,
            contrast=slope(tuple(arm.name for arm in _FORMATS)),
            test="page",
            metric=_REWARD,
            factor=("weight_format", "learning_rate"),
            effect=paper_effects.FORMAT_SPEED,
        ),
        above("nvfp4_reward_faster",
              "NVFP4 LoRA has a higher mean training reward than 16-bit LoRA",
              source, NVFP4_LORA, BF16_LORA, _RATE, paper_effects.FORMAT_SPEED, _REWARD),
    )  # fmt: skip


FIGURE4 = Target(
    name="figure4",
    title="Fig. 4: training reward by weight format (7B, GSM8K)",
    statement="rewards grow faster on quantised weights than with 16-bit LoRA",
    source="Fig. 4",
    arms=(BF16_FULL, *_FORMATS),
    metrics=METRICS,
    claims=_reward_by_format("Fig. 4"),
    records_of="table1",
    paper_file="figure4",
)
# The upper row of Fig. 4, where DAPO trains on BigMath; two of its arms are Table 2's.
_DAPO_ARMS = tuple(dataclasses.replace(arm, loss=DAPO) for arm in _FORMATS)
FIGURE4_BIGMATH = Target(
    name="figure4_bigmath",
    title="Fig. 4, upper row: training reward by weight format with DAPO on BigMath, 7B",
    statement="rewards grow faster on quantised weights than with 16-bit LoRA, with DAPO, too",
    source="Fig. 4",
    arms=_DAPO_ARMS,
    metrics=TABLE2.metrics,
    claims=_reward_by_format("Fig. 4, upper row"),
    scales={Tier.PAPER: paper_tier.BIGMATH_7B},
    headline="train_reward_mean",
    shared={name: (TABLE2, name) for name in ("bf16_lora", "nvfp4_lora")},
)
FIGURE5 = Target(
    name="figure5",
    title="Fig. 5: entropy over training by weight format (7B)",
    statement="quantised weights start with more entropy",
    source="Fig. 5",
    arms=_FORMATS,
    metrics=METRICS,
    claims=tuple(
        above(f"{arm.weight_format}_more_entropy",
              f"{arm.weight_format.upper()} weights have a higher entropy per sampled token than "
              "BF16 early in training, shorter answers included", "Fig. 5", arm, BF16_LORA, _RATE,
              paper_effects.ENTROPY[arm.weight_format], "entropy_first")
        for arm in _FORMATS[1:]
    ),
    records_of="table1",
    paper_file="figure5",
)  # fmt: skip
FIGURE8 = Target(
    name="figure8",
    title="Fig. 8: reward with and without AQN (3B GSM8K, 7B BigMath)",
    statement="AQN raises the reward late in training",
    source="Fig. 8",
    arms=(NVFP4_LORA, NVFP4_LORA_AQN),
    metrics=METRICS,
    claims=(
        above("aqn_raises_reward", "AQN raises the mean training reward", "Fig. 8",
              NVFP4_LORA_AQN, NVFP4_LORA, "noise", paper_effects.AQN_LATE, _REWARD),
    ),
    records_of="table1",
    paper_file="figure8",
)  # fmt: skip


def _bigmath(
    number: int, title: str, statement: str, arms: tuple[Arm, ...], effect: Effect
) -> Target:
    source = f"Fig. {number}"
    return Target(
        name=f"figure{number}",
        title=f"{source}: {title}",
        statement=statement,
        source=source,
        arms=arms,
        metrics=METRICS,
        claims=(
            above("qerl_reward_faster",
                  "QeRL has a higher mean training reward than 16-bit LoRA", source,
                  NVFP4_LORA_AQN, BF16_LORA, "weight_format noise learning_rate", effect, _REWARD),
        ),
        records_of="table2",
        paper_file=f"figure{number}",
    )  # fmt: skip


FIGURE7 = _bigmath(
    7, "training reward on BigMath, 7B and 14B", "QeRL's reward jumps earlier than LoRA's",
    _BIGMATH_ARMS, paper_effects.QERL_SPEED_7B,
)  # fmt: skip
FIGURE12 = _bigmath(
    12, "training reward on BigMath levels 3 to 5, 7B", "QeRL's reward grows faster than LoRA's",
    _BIGMATH_ARMS[1:], paper_effects.QERL_SPEED,
)  # fmt: skip
FIGURE13 = dataclasses.replace(
    _bigmath(
        13, "training reward on BigMath levels 4 and 5, 32B",
        "QeRL's reward grows faster than LoRA's",
        _BIGMATH_ARMS[1:], paper_effects.QERL_SPEED_32B,
    ),
    records_of=None,
    scales={Tier.PAPER: paper_tier.BIGMATH_32B},
    metrics=(*METRICS, *BENCHMARK_METRICS),
    headline=_REWARD,
)  # fmt: skip
# Two of its arms are Fig. 13's runs.
TABLE2_32B = dataclasses.replace(
    TABLE2,
    name="table2_32b",
    title="Table 2: BigMath with DAPO on four benchmarks, 32B",
    scales={Tier.PAPER: paper_tier.BIGMATH_32B},
    paper_column="32B",
    shared={arm.name: (FIGURE13, arm.name) for arm in FIGURE13.arms},
)
FIGURE14 = dataclasses.replace(
    _bigmath(
        14, "entropy over training, 14B", "QeRL keeps a higher entropy than LoRA",
        _BIGMATH_ARMS[1:], paper_effects.QERL_SPEED,
    ),
    claims=(
        above("qerl_more_entropy", "QeRL ends with a higher entropy than 16-bit LoRA", "Fig. 14",
              NVFP4_LORA_AQN, BF16_LORA, "weight_format noise learning_rate",
              paper_effects.ENTROPY_LATE, "entropy_last"),
    ),
    records_of="table2_14b",
)  # fmt: skip


def _at_size(target: Target, size: str, records_of: str) -> Target:
    """Return a figure that reads the runs of another model's size, whatever the tier."""
    return dataclasses.replace(
        target,
        name=f"{target.name}_{size}",
        title=f"{target.title}; {size.upper()}",
        records_of=records_of,
        paper_file="",
    )


SIZED_FIGURES = (
    _at_size(FIGURE7, "14b", "table2_14b"),
    _at_size(FIGURE8, "3b", "table1_3b"),
)
