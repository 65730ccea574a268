"""Tables 5 to 9, Fig. 11: rollout throughput and end-to-end speed of a GRPO step.

Measured in the paper on one H100-80GB: 256 prompt tokens, up to 2048 new ones, the first 30 steps
averaged (App. J). The comparisons mix: rollout figures are quoted against QLoRA, memory against
BF16, and Table 9's batch-1 figures equal Tables 5 to 7's at batch 2. The ratios here name both arms
and are taken in one process on one device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from repro.spec.config import Arm
from repro.spec.target import Claim, Cost, Metric, Target
from repro.spec.throughput import ThroughputPoint, ThroughputScale
from repro.spec.tier import GIB, Tier
from repro.targets.table1 import BF16_LORA, NF4_LORA, NVFP4_LORA

# "batch size in {2, 8}", 256 prompt tokens and up to 2048 new ones (App. J); 1 and 4 are added.
BATCHES = (1, 2, 4, 8)
SHAPES = {size: f"qwen2.5-{size}" for size in ("3b", "7b", "14b", "32b")}


def rate(point: str, batch: int) -> Metric:
    """Return the metric of one cell: new tokens a second at a batch."""
    return Metric(
        name=f"tokens_per_second_{point}_{batch}",
        unit="tokens per second",
        title=f"rollout, {point}, batch {batch}",
    )


def _scale(sizes: tuple[str, ...], batches: tuple[int, ...]) -> dict[str, Any]:
    """Return scale and cost of the paper's protocol on these sizes."""
    points = tuple(
        ThroughputPoint(name=size, shape=SHAPES[size], new_tokens=2048, batches=batches)
        for size in sizes
    )
    cost = Cost(
        train_seconds=None,
        evaluate_seconds=None,
        memory_bytes=(90 if "32b" in sizes else 45) * GIB,
        disk_bytes=100_000,
        basis="nobody has timed a run of this protocol yet",
    )
    return {
        "scales": {Tier.SYSTEMS: ThroughputScale(points=points)},
        "costs": {Tier.SYSTEMS: cost},
    }


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
    point = size.lower()
    return Target(
        name=f"table{number}",
        version=2,
        title=f"Table {number}: rollout throughput and end-to-end speed, {size}",
        statement=f"QeRL samples faster than 16-bit LoRA at {size}",
        source=f"Table {number}; App. J",
        procedure="throughput",
        arms=(BF16_LORA, NVFP4_LORA),
        metrics=tuple(rate(point, batch) for batch in BATCHES),
        claims=tuple(
            _faster(
                f"qerl_samples_faster_at_{batch}",
                f"QeRL's rollout is faster than 16-bit LoRA's at {size}, batch {batch}",
                f"Table {number}",
                (NVFP4_LORA, BF16_LORA),
                rate(point, batch),
            )
            for batch in (2, 8)
        ),
        headline=rate(point, 8).name,
        paper_file=f"table{number}",
        **_scale((point,), BATCHES),
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


def _ranked_claims(against: Arm, sizes: tuple[str, ...], source: str) -> tuple[Claim, ...]:
    return tuple(
        _faster(
            f"nvfp4_faster_than_{against.weight_format}_{size}_r{rank}",
            f"NVFP4 LoRA samples {size.upper()} faster than {against.weight_format.upper()} LoRA "
            f"at rank {rank}",
            source,
            (_at_rank(NVFP4_LORA, rank), _at_rank(against, rank)),
            rate(size, 1),
        )
        for size in sizes
        for rank in RANKS
    )


def _by_rank(
    sizes: tuple[str, ...], against: Arm, source: str, *, name: str, title: str, statement: str
) -> Target:
    return Target(
        name=name,
        version=2,
        title=title,
        statement=statement,
        source=source,
        procedure="throughput",
        arms=(*_RANKED[against.name], *_RANKED["nvfp4_lora"]),
        metrics=tuple(rate(size, 1) for size in sizes),
        claims=_ranked_claims(against, sizes, source),
        headline=rate(sizes[-1], 1).name,
        paper_file=name,
        **_scale(sizes, (1,)),
    )


TABLE9 = _by_rank(
    ("3b", "7b", "14b", "32b"),
    BF16_LORA,
    "Table 9",
    name="table9",
    title="Table 9: rollout throughput by LoRA rank, batch 1",
    statement="NVFP4 LoRA samples faster than BF16 LoRA at every rank",
)
FIGURE11 = _by_rank(
    ("14b", "32b"),
    NF4_LORA,
    "Fig. 11",
    name="figure11",
    title="Fig. 11: rollout throughput by LoRA rank against QLoRA, 14B and 32B",
    statement="QeRL samples about twice as fast as QLoRA",
)
