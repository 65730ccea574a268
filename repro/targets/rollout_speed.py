"""The rollout engine's own bars: tokens per second at 7B, 14B and 32B, alone and against 16 bits.

Not a table of the paper, whose batches end at 8: reinforcement learning samples hundreds of rows.
Random weights, 256 prompt tokens, 256 new ones (192 at 14B and 32B), LoRA of rank 32 on all seven
projections with non-zero factors, no prompt shared, prefill counted. The `must` of each cell is
the accepted interval, the `goal` stands beside it (`expected/bars/systems.toml`); the
claims ask how many times 16-bit LoRA on the same engine each cell reaches.

`rollout_ranks` compares the adapter's ranks at batch 1, and `rollout_vllm` this project's engine
with vLLM's, the paper's, on the same weights and adapter (`repro.measure.vllm_rollout`). Beside it,
`rollout_vllm_16bit` and `rollout_vllm_fp8` have what else is run in vLLM: BF16, folded in, FP8.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from repro.spec.arm import Arm
from repro.spec.claim import OWN_BAR
from repro.spec.target import Target
from repro.spec.throughput_scale import ThroughputPoint, ThroughputScale
from repro.spec.tier import GIB
from repro.targets.speed import at_rank, beside_folded, faster_than, rate
from repro.targets.table1 import BF16_LORA, BF16_LORA_FOLDED, NVFP4_LORA
from repro.targets.table_rows import FORMAT_RATE, Statement, metric, timed, variant

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

ROLLOUT = Target(
    name="rollout",
    title="Rollout engine: tokens per second by model and batch, adapter on",
    statement="sampling from 4-bit weights with a live adapter is faster than from 16-bit ones at "
    "every batch that reinforcement learning uses",
    source="not in the paper; its rollouts are Tables 5 to 9",
    version=2,
    arms=(BF16_LORA, NVFP4_LORA),
    **timed("throughput", ThroughputScale(points=POINTS), 130 * GIB),
    metrics=(
        *(rate(point.name, batch) for point in POINTS for batch in BATCHES),
        *(
            metric(
                f"host_share_{size}",
                "percent",
                f"{size}, batch 1: the device waits for the host",
                "lower",
                model=size,
            )
            for size in RATIOS
        ),
    ),
    claims=tuple(
        Statement(
            f"faster_{point}_{batch}",
            f"at {point} and batch {batch}, NVFP4 with LoRA samples at least {bar} times as fast "
            "as BF16 with LoRA on the same engine",
            OWN_BAR,
        ).times(
            NVFP4_LORA,
            BF16_LORA,
            FORMAT_RATE,
            rate(point, batch).name,
            bound=bar,
            because="what reading a quarter of the bytes allows, less what is not weights; "
            "stated before",
        )
        for point, bars in RATIOS.items()
        for batch, bar in bars.items()
    ),
    headline=rate("7b", 8).name,
)

ROLLOUT_FOLDED = beside_folded(ROLLOUT)


_SMALL = ThroughputPoint(name="7b", shape="qwen2.5-7b", new_tokens=256, batches=(1,))
_RANKED = tuple(at_rank(NVFP4_LORA, rank) for rank in (16, 32, 64, 128))

RANKED = Target(
    name="rollout_ranks",
    title="Rollout engine: LoRA ranks 16 to 128 at batch 1, 7B",
    statement="the adapter's rank hardly changes the speed of a rollout",
    source="not in the paper; its ranks end at 64 (Table 9)",
    arms=_RANKED,
    **timed("throughput", ThroughputScale(points=(_SMALL,)), 40 * GIB),
    metrics=(rate("7b", 1),),
    claims=tuple(
        Statement(
            f"r{first.lora_rank}_within_10_percent_of_r{second.lora_rank}",
            f"at 7B and batch 1, rank {first.lora_rank} samples at least 0.9 times as fast as "
            f"rank {second.lora_rank}",
            OWN_BAR,
        ).times(
            first,
            second,
            "lora_rank lora_alpha",
            rate("7b", 1).name,
            bound=0.9,
            because="stated before; by what a step reads (5.4 GB at rank 128, 4.8 GB at rank 16, "
            "the head included) rank 128 would reach 0.896 of rank 16",
        )
        for first in _RANKED
        for second in _RANKED
        if first is not second
    ),
    headline=rate("7b", 1).name,
)


_BY_VLLM = variant(NVFP4_LORA, "vllm", ", vLLM's engine and kernels")

VLLM = Target(
    name="rollout_vllm",
    title="Rollout engine beside vLLM's own: NVFP4 with LoRA, 7B",
    statement="this project's engine samples NVFP4 with LoRA faster than vLLM's, the paper's",
    source="not in the paper, which samples in vLLM; its rollouts are Tables 5 to 9",
    arms=(NVFP4_LORA, _BY_VLLM),
    **timed("throughput", ThroughputScale(points=POINTS[:1], vllm=(_BY_VLLM.name,)), 40 * GIB),
    metrics=tuple(rate("7b", batch) for batch in BATCHES),
    claims=tuple(
        Statement(
            f"faster_than_vllm_{batch}",
            f"at 7B and batch {batch}, this project's engine samples NVFP4 with LoRA at least "
            "1.3 times as fast as vLLM's own",
            OWN_BAR,
        ).times(
            NVFP4_LORA,
            _BY_VLLM,
            "",
            rate("7b", batch).name,
            bound=1.3,
            because="what makes an engine of one's own worth its code; stated before",
        )
        for batch in BATCHES
    ),
    headline=rate("7b", 8).name,
)


_IN_VLLM = (
    *(variant(arm, "vllm", ", vLLM's engine") for arm in (BF16_LORA, BF16_LORA_FOLDED)),
    variant(BF16_LORA, "fp8_vllm", ", rounded to FP8 by vLLM's engine"),
)
# Both name all three: records of the 16-bit ones were made before FP8 had a target of its own.
_SERVED = ThroughputScale(
    points=POINTS[:1], vllm=tuple(arm.name for arm in _IN_VLLM), fp8=(_IN_VLLM[-1].name,)
)


def _beside(kind: str, own: tuple[Arm, ...], served: tuple[Arm, ...]) -> Target:
    cells = itertools.product(served, BATCHES)
    return replace(
        VLLM,
        name=f"rollout_vllm_{kind.replace('-', '').lower()}",
        title=f"Rollout engine beside vLLM's own: {kind} with LoRA, 7B",
        statement=f"this engine samples NVFP4 with LoRA faster than vLLM samples {kind} weights",
        arms=(*own, *served, NVFP4_LORA),
        **timed("throughput", _SERVED, 60 * GIB),
        claims=tuple(faster_than(slow, "7b", batch, "not in the paper") for slow, batch in cells),
    )


VLLM_16_BIT = _beside("16-bit", (BF16_LORA, BF16_LORA_FOLDED), _IN_VLLM[:2])
VLLM_FP8 = _beside("FP8", (), _IN_VLLM[2:])
ROLLOUT_TARGETS = (ROLLOUT, RANKED, VLLM, ROLLOUT_FOLDED, VLLM_16_BIT, VLLM_FP8)
