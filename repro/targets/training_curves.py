"""Figures 4, 5, 7, 8, 12, 13 and 14: reward and entropy over training.

Figures 4, 5 and 8 draw the runs of Table 1, so they read its records. The paper's curves begin up
to 0.4 apart while the untrained accuracies differ by 6 points: what they show at the start is the
format of the answers. The claims here are on means over all steps, with the same problems in the
same order for every arm of a seed. Figures 7, 12 and 14 draw Table 2's runs, Figure 13 (32B, harder
problems) those of a larger model.
"""

from __future__ import annotations

import dataclasses

from repro.spec.arm import DAPO
from repro.spec.claim import Claim, Effect
from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import paper_effects, paper_tier, table1
from repro.targets.table2 import BENCHMARK_METRICS, TABLE2, TABLE2_14B
from repro.targets.table_rows import FORMAT_NOISE_RATE, FORMAT_RATE, Statement

_FORMATS = (table1.BF16_LORA, table1.NF4_LORA, table1.MXFP4_LORA, table1.NVFP4_LORA)
_BIGMATH_ARMS = tuple(
    arm for arm in TABLE2.arms if arm.name in ("bf16_full", "bf16_lora", "nvfp4_lora_aqn")
)
_REWARD = "train_reward_mean"
_QERL_AND_LORA = (table1.NVFP4_LORA_AQN, table1.BF16_LORA, FORMAT_NOISE_RATE)


def _reward_by_format(source: str) -> tuple[Claim, ...]:
    return (
        Statement(
            "reward_order",
            "the mean training reward rises in the order BF16, NF4, MXFP4, NVFP4",
            source,
        ).rises(_FORMATS, FORMAT_RATE, paper_effects.FORMAT_SPEED, _REWARD),
        Statement(
            "nvfp4_reward_faster",
            "NVFP4 LoRA has a higher mean training reward than 16-bit LoRA",
            source,
        ).above(
            table1.NVFP4_LORA, table1.BF16_LORA, FORMAT_RATE, paper_effects.FORMAT_SPEED, _REWARD
        ),
    )


FIGURE4 = table1.figure(
    4,
    "training reward by weight format (7B, GSM8K)",
    "rewards grow faster on quantised weights than with 16-bit LoRA",
    (table1.BF16_FULL, *_FORMATS),
    _reward_by_format("Fig. 4"),
    records_of=table1.TABLE1,
)
# The upper row of Fig. 4, where DAPO trains on BigMath; two of its arms are Table 2's.
FIGURE4_BIGMATH = Target(
    name="figure4_bigmath",
    title="Fig. 4, upper row: training reward by weight format with DAPO on BigMath, 7B",
    statement="rewards grow faster on quantised weights than with 16-bit LoRA, with DAPO, too",
    source="Fig. 4",
    arms=tuple(dataclasses.replace(arm, loss=DAPO) for arm in _FORMATS),
    metrics=TABLE2.metrics,
    claims=_reward_by_format("Fig. 4, upper row"),
    scales={Tier.PAPER: paper_tier.BIGMATH_7B},
    headline=_REWARD,
    shared={name: (TABLE2, name) for name in ("bf16_lora", "nvfp4_lora")},
)
FIGURE5 = table1.figure(
    5,
    "entropy over training by weight format (7B)",
    "quantised weights start with more entropy",
    _FORMATS,
    tuple(
        Statement(
            f"{arm.weight_format}_more_entropy",
            f"{arm.weight_format.upper()} weights have a higher entropy per sampled token than "
            "BF16 early in training, shorter answers included",
            "Fig. 5",
        ).above(
            arm,
            table1.BF16_LORA,
            FORMAT_RATE,
            paper_effects.ENTROPY[arm.weight_format],
            "entropy_first",
        )
        for arm in _FORMATS[1:]
    ),
    records_of=table1.TABLE1,
)
FIGURE8 = table1.figure(
    8,
    "reward with and without AQN (3B GSM8K, 7B BigMath)",
    "AQN raises the reward late in training",
    (table1.NVFP4_LORA, table1.NVFP4_LORA_AQN),
    (
        table1.AQN_RAISES_REWARD("Fig. 8").above(
            table1.NVFP4_LORA_AQN, table1.NVFP4_LORA, "noise", paper_effects.AQN_LATE, _REWARD
        ),
    ),
    records_of=table1.TABLE1,
)


def _faster(number: int, effect: Effect) -> tuple[Claim]:
    text = "QeRL has a higher mean training reward than 16-bit LoRA"
    stated = Statement("qerl_reward_faster", text, f"Fig. {number}")
    return (stated.above(*_QERL_AND_LORA, effect, _REWARD),)


FIGURE7 = table1.figure(
    7,
    "training reward on BigMath, 7B and 14B",
    "QeRL's reward jumps earlier than LoRA's",
    _BIGMATH_ARMS,
    _faster(7, paper_effects.QERL_SPEED_7B),
    records_of=TABLE2,
)
FIGURE12 = table1.figure(
    12,
    "training reward on BigMath levels 3 to 5, 7B",
    "QeRL's reward grows faster than LoRA's",
    _BIGMATH_ARMS[1:],
    _faster(12, paper_effects.QERL_SPEED),
    records_of=TABLE2,
)
FIGURE13 = table1.figure(
    13,
    "training reward on BigMath levels 4 and 5, 32B",
    "QeRL's reward grows faster than LoRA's",
    _BIGMATH_ARMS[1:],
    _faster(13, paper_effects.QERL_SPEED_32B),
    headline=_REWARD,
    scales={Tier.PAPER: paper_tier.BIGMATH_32B},
    metrics=(*table1.METRICS, *BENCHMARK_METRICS),
)
FIGURE14 = table1.figure(
    14,
    "entropy over training, 14B",
    "QeRL keeps a higher entropy than LoRA",
    _BIGMATH_ARMS[1:],
    (
        Statement(
            "qerl_more_entropy", "QeRL ends with a higher entropy than 16-bit LoRA", "Fig. 14"
        ).above(*_QERL_AND_LORA, paper_effects.ENTROPY_LATE, "entropy_last"),
    ),
    records_of=TABLE2_14B,
)
# Two of its arms are Fig. 13's runs.
TABLE2_32B = dataclasses.replace(
    TABLE2,
    name="table2_32b",
    title="Table 2: BigMath with DAPO on four benchmarks, 32B",
    scales={Tier.PAPER: paper_tier.BIGMATH_32B},
    paper_column="32B",
    shared={arm.name: (FIGURE13, arm.name) for arm in FIGURE13.arms},
)


def _at_size(target: Target, size: str, records_of: Target) -> Target:
    """Return a figure that reads the runs of another model's size, whatever the tier."""
    return dataclasses.replace(
        target,
        name=f"{target.name}_{size}",
        title=f"{target.title}; {size.upper()}",
        records_of=records_of,
        paper_file="",
    )


SIZED_FIGURES = (_at_size(FIGURE7, "14b", TABLE2_14B), _at_size(FIGURE8, "3b", table1.TABLE1_3B))
