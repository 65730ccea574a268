"""The rollout engine's own bars: tokens a second at 7B, 14B and 32B, alone and against 16 bits.

Not a table of the paper, whose batches end at 8: reinforcement learning samples hundreds of rows.
Random weights, 256 prompt tokens, 256 new ones (192 at 14B and 32B), LoRA of rank 32 on all seven
projections with non-zero factors, no prompt shared, prefill counted. The `must` of each cell is
the accepted interval, the `goal` stands beside it (`expected/systems/rollout.derived.json`); the
claims ask how many times 16-bit LoRA on the same engine each cell reaches.

`rollout_scheduling` measures, at 7B, what sharing a group's prompt and continuous batching gain,
how far the engine's log-probabilities lie from the trainer's over 2,048 tokens, and the ranks.
"""

from __future__ import annotations

import dataclasses

from repro.spec.config import Arm
from repro.spec.target import Claim, Cost, Metric, Target
from repro.spec.throughput import ThroughputPoint, ThroughputScale
from repro.spec.tier import GIB, Tier
from repro.targets.speed import rate
from repro.targets.table1 import BF16_LORA, NVFP4_LORA

BATCHES = (1, 8, 64, 256)
POINTS = (
    ThroughputPoint(name="7b", shape="qwen2.5-7b", new_tokens=256, batches=BATCHES),
    ThroughputPoint(name="14b", shape="qwen2.5-14b", new_tokens=192, batches=BATCHES),
    ThroughputPoint(name="32b", shape="qwen2.5-32b", new_tokens=192, batches=BATCHES),
)
# Times 16-bit LoRA in the same run, by point and batch.
RATIOS = {
    "7b": {1: 2.0, 8: 2.0, 64: 1.35, 256: 1.0},
    "14b": {1: 2.4, 8: 2.4, 64: 1.5, 256: 1.0},
    "32b": {1: 2.4, 8: 2.4, 64: 1.5, 256: 1.0},
}
_BECAUSE = "what reading a quarter of the bytes allows, less what is not weights; stated before"


def _cost(seconds: float, memory: int) -> Cost:
    return Cost(
        train_seconds=None,
        evaluate_seconds=seconds,
        memory_bytes=memory,
        disk_bytes=100_000,
        basis="one NVIDIA H200",
    )


ROLLOUT = Target(
    name="rollout",
    title="Rollout engine: tokens a second by model and batch, adapter on",
    statement="sampling from 4-bit weights with a live adapter is faster than from 16-bit ones at "
    "every batch that reinforcement learning uses",
    source="not in the paper; its rollouts are Tables 5 to 9",
    procedure="throughput",
    arms=(BF16_LORA, NVFP4_LORA),
    scales={Tier.SYSTEMS: ThroughputScale(points=POINTS)},
    costs={Tier.SYSTEMS: _cost(120.0, 130 * GIB)},
    metrics=(
        *(rate(point.name, batch) for point in POINTS for batch in BATCHES),
        *(
            Metric(
                name=f"host_share_{point.name}",
                unit="percent",
                title=f"{point.name}, batch 1: the device waits for the host",
            )
            for point in POINTS
        ),
    ),
    claims=tuple(
        Claim(
            name=f"faster_{point}_{batch}",
            statement=f"at {point} and batch {batch}, NVFP4 with LoRA samples at least {bar} times "
            "as fast as BF16 with LoRA on the same engine",
            source="this suite's bar",
            kind="ratio",
            arms=(NVFP4_LORA.name, BF16_LORA.name),
            metric=rate(point, batch).name,
            factor=("weight_format", "learning_rate"),
            margin=bar,
            because=_BECAUSE,
        )
        for point, bars in RATIOS.items()
        for batch, bar in bars.items()
    ),
    headline=rate("7b", 8).name,
)


def _at_rank(arm: Arm, rank: int) -> Arm:
    return dataclasses.replace(
        arm,
        name=f"{arm.name}_r{rank}",
        label=f"{arm.label}, rank {rank}",
        lora_rank=rank,
        lora_alpha=float(rank),
    )


_RANKED = tuple(_at_rank(NVFP4_LORA, rank) for rank in (16, 32, 64, 128))

SCHEDULING = Target(
    name="rollout_scheduling",
    title="Rollout engine: shared prompts, continuous batching, parity with the trainer, ranks",
    statement="a group's prompt costs one prefill, a long tail does not idle the device, and the "
    "engine's log-probabilities are the trainer's",
    source="not in the paper",
    procedure="throughput",
    arms=_RANKED,
    scales={
        Tier.SYSTEMS: ThroughputScale(
            points=(ThroughputPoint(name="7b", shape="qwen2.5-7b", new_tokens=256, batches=(1,)),),
            parity_tokens=2048,
            scheduling=True,
        )
    },
    costs={Tier.SYSTEMS: _cost(120.0, 60 * GIB)},
    metrics=(
        rate("7b", 1),
        Metric(name="sharing_speedup", unit="ratio", title="prefill, groups of 8 x 1024 tokens"),
        Metric(name="long_tail_speedup", unit="ratio", title="continuous against static batches"),
        Metric(
            name="long_tail_tokens_per_second",
            unit="tokens per second",
            title="long-tailed completions, 64 slots",
        ),
        Metric(name="parity_mean_exp_abs", unit="ratio", title="mean exp |difference|"),
        Metric(name="parity_mean_abs", unit="nats", title="mean |difference|"),
        Metric(name="parity_drift", unit="ratio", title="second half over first half"),
    ),
    headline="sharing_speedup",
)
