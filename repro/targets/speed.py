"""Tables 5 to 9, Fig. 11: rollout throughput and end-to-end speed of a GRPO step.

Measured in the paper on one H100-80GB: 256 prompt tokens, up to 2048 new ones, the first 30 steps
averaged (App. J). The comparisons mix: rollout figures are quoted against QLoRA, memory against
BF16, and Table 9's batch-1 figures equal Tables 5 to 7's at batch 2. The ratios here name both arms
and are taken in one process on one device.
"""

from __future__ import annotations

import dataclasses

from repro.spec.config import Arm
from repro.spec.target import Claim, Metric, Target
from repro.targets.table1 import BF16_LORA, NF4_LORA, NVFP4_LORA

ROLLOUT = Metric(
    name="rollout_tokens_per_second", unit="tokens per second", title="rollout throughput"
)
STEP = Metric(name="step_seconds", unit="seconds", title="time of a GRPO step")
_NO_SCALE = "no scale yet: it needs a GPU and the rollout engine, which this version lacks"
_ANY_GAIN = "faster means a ratio above one"


def _faster(name: str, statement: str, source: str, arms: tuple[Arm, Arm], metric: Metric) -> Claim:
    return Claim(
        name=name,
        statement=statement,
        source=source,
        kind="ratio",
        arms=(arms[0].name, arms[1].name),
        metric=metric.name,
        factor=("weight_format", "learning_rate"),
        margin=1.0,
        because=_ANY_GAIN,
    )


def _throughput(number: int, size: str) -> Target:
    return Target(
        name=f"table{number}",
        title=f"Table {number}: rollout throughput and end-to-end speed, {size}",
        statement=f"QeRL samples faster than 16-bit LoRA at {size}",
        source=f"Table {number}; App. J",
        procedure="throughput",
        arms=(BF16_LORA, NVFP4_LORA),
        metrics=(ROLLOUT, STEP),
        claims=(
            _faster(
                "qerl_samples_faster",
                f"QeRL's rollout is faster than 16-bit LoRA's at {size}",
                f"Table {number}",
                (NVFP4_LORA, BF16_LORA),
                ROLLOUT,
            ),
        ),
        why_not=_NO_SCALE,
        paper_file=f"table{number}",
    )


TABLES_5_TO_8 = (
    _throughput(5, "3B"),
    _throughput(6, "7B"),
    _throughput(7, "14B"),
    _throughput(8, "32B"),
)


def _at_rank(arm: Arm, rank: int) -> Arm:
    return dataclasses.replace(
        arm,
        name=f"{arm.name}_r{rank}",
        label=f"{arm.label}, rank {rank}",
        lora_rank=rank,
        lora_alpha=float(rank),
    )


RANKS = (16, 32, 64)
_RANKED = {
    arm.name: [_at_rank(arm, rank) for rank in RANKS] for arm in (BF16_LORA, NF4_LORA, NVFP4_LORA)
}


def _ranked_claims(against: Arm, source: str) -> tuple[Claim, ...]:
    return tuple(
        _faster(
            f"nvfp4_faster_than_{against.weight_format}_r{rank}",
            f"NVFP4 LoRA samples faster than {against.weight_format.upper()} LoRA at rank {rank}",
            source,
            (_at_rank(NVFP4_LORA, rank), _at_rank(against, rank)),
            ROLLOUT,
        )
        for rank in RANKS
    )


TABLE9 = Target(
    name="table9",
    title="Table 9: rollout throughput by LoRA rank, batch 1",
    statement="NVFP4 LoRA samples faster than BF16 LoRA at every rank",
    source="Table 9",
    procedure="throughput",
    arms=(*_RANKED["bf16_lora"], *_RANKED["nvfp4_lora"]),
    metrics=(ROLLOUT,),
    claims=_ranked_claims(BF16_LORA, "Table 9"),
    why_not=_NO_SCALE,
    paper_file="table9",
)
FIGURE11 = Target(
    name="figure11",
    title="Fig. 11: rollout throughput by LoRA rank against QLoRA, 14B and 32B",
    statement="QeRL samples about twice as fast as QLoRA",
    source="Fig. 11",
    procedure="throughput",
    arms=(*_RANKED["nf4_lora"], *_RANKED["nvfp4_lora"]),
    metrics=(ROLLOUT,),
    claims=_ranked_claims(NF4_LORA, "Fig. 11"),
    why_not=_NO_SCALE,
    paper_file="figure11",
)
