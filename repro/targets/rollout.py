"""The rollout engine's own bars: tokens per second at 7B, 14B and 32B, alone and against 16 bits.

Not a table of the paper, whose batches end at 8: reinforcement learning samples hundreds of rows.
Random weights, 256 prompt tokens, 256 new ones (192 at 14B and 32B), LoRA of rank 32 on all seven
projections with non-zero factors, no prompt shared, prefill counted. The `must` of each cell is
the accepted interval, the `goal` stands beside it (`expected/bars/systems.toml`); the
claims ask how many times 16-bit LoRA on the same engine each cell reaches.

`rollout_scheduling` measures, at 7B, what sharing a group's prompt and continuous batching gain,
how far the engine's log-probabilities lie from the trainer's and both from exact ones, what a cache
of 8 bits changes, that noise is live under captured steps and leaves no trace, and that faults cost
no memory. `rollout_ranks` compares the adapter's ranks at batch 1.
"""

from __future__ import annotations

from repro.spec.claim import Better
from repro.spec.needs import Needs
from repro.spec.target import Claim, Metric, Target
from repro.spec.throughput import ThroughputPoint, ThroughputScale
from repro.spec.tier import GIB, Tier
from repro.targets.speed import at_rank, rate
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


_ARMS = (BF16_LORA, NVFP4_LORA)
_SCALE = ThroughputScale(points=POINTS)

ROLLOUT = Target(
    name="rollout",
    title="Rollout engine: tokens per second by model and batch, adapter on",
    statement="sampling from 4-bit weights with a live adapter is faster than from 16-bit ones at "
    "every batch that reinforcement learning uses",
    source="not in the paper; its rollouts are Tables 5 to 9",
    procedure="throughput",
    version=2,
    arms=_ARMS,
    scales={Tier.SYSTEMS: _SCALE},
    needs={Tier.SYSTEMS: Needs(memory_bytes=130 * GIB, disk_bytes=100_000)},
    metrics=(
        *(rate(point.name, batch) for point in POINTS for batch in BATCHES),
        *(
            Metric(
                name=f"host_share_{point.name}",
                unit="percent",
                title=f"{point.name}, batch 1: the device waits for the host",
                better="lower",
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


_SMALL = ThroughputPoint(name="7b", shape="qwen2.5-7b", new_tokens=256, batches=(1,))
_CHECKED = ThroughputScale(
    points=(_SMALL,),
    checks=(
        ("sharing", 5),
        ("trained_parity", 5),
        ("noise", 5),
        ("parity", 3),
        ("float8", 3),
        ("faults", 2),
        ("long_tail", 2),
    ),
)


def _distances(prefix: str, what: str, *, exact: bool) -> tuple[Metric, ...]:
    """Return the metrics of a comparison of log-probabilities."""
    rows: list[tuple[str, str, str, Better]] = [
        ("mean_exp_abs", "ratio", "mean exp |engine - trainer|", "lower"),
        ("mean_abs", "nats", "mean |engine - trainer|", "lower"),
        ("drift", "ratio", "second half of the positions over the first", "neither"),
    ]
    if exact:
        ratio = "the engine's distance from float32 over the trainer's"
        rows += [
            ("engine_error", "nats", "mean |engine - float32|", "lower"),
            ("trainer_error", "nats", "mean |trainer - float32|", "lower"),
            ("error_ratio", "ratio", ratio, "lower"),
        ]
    return tuple(
        Metric(name=f"{prefix}_{name}", unit=unit, title=f"{what}: {title}", better=better)
        for name, unit, title, better in rows
    )


SCHEDULING = Target(
    name="rollout_scheduling",
    version=2,
    title="Rollout engine: shared prompts, continuous batching, parity, noise, faults",
    statement="a group's prompt costs one prefill, a long tail does not idle the device, the "
    "engine's log-probabilities are as exact as the trainer's, and nothing is left behind",
    source="not in the paper",
    procedure="throughput",
    arms=(NVFP4_LORA,),
    scales={Tier.SYSTEMS: _CHECKED},
    needs={Tier.SYSTEMS: Needs(memory_bytes=90 * GIB, disk_bytes=100_000)},
    metrics=(
        rate("7b", 1),
        Metric(
            name="sharing_speedup",
            unit="ratio",
            title="prefill, groups of 8 x 1024 tokens",
            better="higher",
        ),
        Metric(
            name="long_tail_speedup",
            unit="ratio",
            title="continuous against static batches",
            better="higher",
        ),
        Metric(
            name="long_tail_tokens_per_second",
            unit="tokens per second",
            title="long-tailed completions, 64 slots",
        ),
        *_distances("parity", "7b, random weights", exact=True),
        *_distances("trained_parity", "trained policy", exact=True),
        *_distances("float8", "7b, FP8 cache, 512 tokens", exact=False),
        *_distances("float8_without", "7b, BF16 cache, 512 tokens", exact=False),
        Metric(
            name="repeat_rows_changed", unit="rows", title="the same rollout twice", better="lower"
        ),
        Metric(
            name="noise_off_rows_changed",
            unit="rows",
            title="after noise against before",
            better="lower",
        ),
        Metric(
            name="noise_rows_changed",
            unit="percent",
            title="rows that noise changes",
            better="higher",
        ),
        Metric(
            name="noise_norms",
            unit="ratio",
            title="norms that carried noise, of all",
            better="higher",
        ),
        Metric(
            name="noise_channels_changed",
            unit="percent",
            title="channels that noise moved",
            better="higher",
        ),
        Metric(
            name="noise_sigma_ratio",
            unit="ratio",
            title="sigma realised over asked",
            better="neither",
        ),
        Metric(
            name="faults_as_they_should",
            unit="percent",
            title="faults that end as they should",
            better="higher",
        ),
        Metric(
            name="faults_rows_changed",
            unit="rows",
            title="rows changed by a fault before",
            better="lower",
        ),
        Metric(name="faults_bytes_kept", unit="bytes", title="device memory kept after faults"),
    ),
    headline="sharing_speedup",
)

_RANKED = tuple(at_rank(NVFP4_LORA, rank) for rank in (16, 32, 64, 128))
_RANK_SCALE = ThroughputScale(points=(_SMALL,))

RANKED = Target(
    name="rollout_ranks",
    title="Rollout engine: LoRA ranks 16 to 128 at batch 1, 7B",
    statement="the adapter's rank hardly changes the speed of a rollout",
    source="not in the paper; its ranks end at 64 (Table 9)",
    procedure="throughput",
    arms=_RANKED,
    scales={Tier.SYSTEMS: _RANK_SCALE},
    needs={Tier.SYSTEMS: Needs(memory_bytes=40 * GIB, disk_bytes=100_000)},
    metrics=(rate("7b", 1),),
    claims=tuple(
        Claim(
            name=f"r{first.lora_rank}_within_10_percent_of_r{second.lora_rank}",
            statement=f"at 7B and batch 1, rank {first.lora_rank} samples at least 0.9 times as "
            f"fast as rank {second.lora_rank}",
            source="this suite's bar",
            kind="ratio",
            arms=(first.name, second.name),
            metric=rate("7b", 1).name,
            factor=("lora_rank", "lora_alpha"),
            margin=0.9,
            because="stated before; by what a step reads (5.4 GB at rank 128, 4.8 GB at rank 16, "
            "the head included) rank 128 would reach 0.896 of rank 16",
        )
        for first in _RANKED
        for second in _RANKED
        if first is not second
    ),
    headline=rate("7b", 1).name,
)
