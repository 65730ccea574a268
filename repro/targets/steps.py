"""Whole GRPO steps on one device: Table 3's end-to-end speed, and the memory that a step takes.

Table 3 was measured in the paper on one H100-80GB: 256 prompt tokens, up to 2048 new ones, the
first 30 steps averaged (App. J), batch 2, 4 and 8. The bars on the speed-ups and on memory are this
suite's own and stand in `expected/systems/`; a speed-up is the step of 16-bit LoRA over the arm's,
both taken in one process on one device with random weights and full completion lengths.
"""

from __future__ import annotations

from collections.abc import Iterable

from repro.spec.config import Arm
from repro.spec.step import StepPoint, StepScale
from repro.spec.target import Claim, Cost, Metric, Target
from repro.spec.tier import GIB, Tier
from repro.targets.table1 import BF16_LORA, MXFP4_LORA, NF4_LORA, NVFP4_LORA

TABLE3_POINTS = tuple(
    StepPoint(name=f"{model}_b{batch}", model=model, prompts=1, group=batch)
    for model in ("7b", "14b")
    for batch in (2, 4, 8)
)
_CAP = 80 * 10**9
MEMORY_POINTS = (
    StepPoint(name="32b", model="32b", budget_bytes=_CAP, micro_tokens=4608),
    StepPoint(name="14b", model="14b", sampled_tokens=48, micro_tokens=4608),
    StepPoint(name="7b", model="7b", sampled_tokens=48, micro_tokens=4608),
    StepPoint(
        name="7b_long", model="7b", sampled_tokens=48, completion_tokens=4096, micro_tokens=8704
    ),
    StepPoint(name="7b_r64", model="7b", sampled_tokens=48, micro_tokens=2304, lora_rank=64),
    StepPoint(name="14b_r16", model="14b", sampled_tokens=48, micro_tokens=9216, lora_rank=16),
    StepPoint(name="3b_short", model="3b", sampled_tokens=48, prompts=4, completion_tokens=512),
    StepPoint(name="72b", model="72b", budget_bytes=_CAP, sampled_tokens=48, micro_tokens=2304),
)

# Smaller cards than the paper's: fewer rows at once, micro-batches of one row.
BUDGET_POINTS = (
    StepPoint(
        name="32b_32gb", model="32b", budget_bytes=32 * 10**9, slots=4, micro_tokens=2304,
        sampled_tokens=48,
    ),
    StepPoint(
        name="14b_16gb", model="14b", budget_bytes=16 * 10**9, slots=2, micro_tokens=2304,
        sampled_tokens=48, lora_rank=16,
    ),
    StepPoint(
        name="7b_10gb", model="7b", budget_bytes=10 * 10**9, slots=4, micro_tokens=2304,
        sampled_tokens=48, lora_rank=16,
    ),
)  # fmt: skip

_SECONDS = {
    "step": "time of a GRPO step",
    "rollout": "rollout",
    "logprob": "old log-probabilities",
    "update": "forward and backward",
    "optimizer": "optimiser",
    "idle": "device idle",
    "reward": "rewards, beside the device",
}
_RATIOS = {
    "speedup": "step against 16-bit LoRA",
    "update_ratio": "update against 16-bit LoRA",
    "rollout_ratio": "rollout against 16-bit LoRA",
}


def _metrics(points: Iterable[StepPoint], *, ratios: bool) -> tuple[Metric, ...]:
    found = []
    for point in points:
        where = point.name
        found += [
            Metric(name=f"{name}_seconds_{where}", unit="seconds", title=f"{title}, {where}")
            for name, title in _SECONDS.items()
        ]
        found += [
            Metric(
                name=f"tokens_per_second_{where}", unit="tokens per second",
                title=f"rollout throughput, {where}",
            ),
            Metric(name=f"peak_bytes_{where}", unit="bytes", title=f"peak memory, {where}"),
            Metric(name=f"predicted_bytes_{where}", unit="bytes", title=f"planned, {where}"),
            Metric(name=f"prediction_error_{where}", unit="percent", title=f"plan off, {where}"),
        ]  # fmt: skip
        if ratios:
            found += [
                Metric(name=f"{name}_{where}", unit="ratio", title=f"{title}, {where}")
                for name, title in _RATIOS.items()
            ]
    return tuple(found)


def _slower(slow: Arm, fast: Arm, point: StepPoint, statement: str) -> Claim:
    return Claim(
        name=f"{fast.name}_faster_than_{slow.name}_{point.name}",
        statement=statement,
        source="Table 3",
        kind="ratio",
        arms=(slow.name, fast.name),
        metric=f"step_seconds_{point.name}",
        factor=("weight_format", "learning_rate"),
        margin=1.0,
        because="faster means a ratio above one",
    )


TABLE3 = Target(
    name="table3",
    title="Table 3: model size and end-to-end speed of GRPO, 7B and 14B",
    statement="a GRPO step of QeRL takes less time than 16-bit LoRA's, and QLoRA's takes more",
    source="Table 3; section 4.3",
    procedure="step_time",
    arms=(BF16_LORA, NF4_LORA, NVFP4_LORA),
    scales={Tier.SYSTEMS: StepScale(points=TABLE3_POINTS, baseline="bf16")},
    costs={
        Tier.SYSTEMS: Cost(
            train_seconds=300.0,
            evaluate_seconds=None,
            memory_bytes=80 * GIB,
            disk_bytes=10_000_000,
            basis="a start on one NVIDIA H200 that ended before its last point",
        )
    },
    metrics=_metrics(TABLE3_POINTS, ratios=True),
    claims=(
        *(
            _slower(BF16_LORA, NVFP4_LORA, point, "16-bit LoRA's step takes longer than QeRL's")
            for point in TABLE3_POINTS
        ),
        *(
            _slower(NF4_LORA, BF16_LORA, point, "QLoRA's step takes longer than 16-bit LoRA's")
            for point in TABLE3_POINTS
        ),
    ),
    headline="speedup_7b_b8",
    paper_file="table3",
)

MEMORY = Target(
    name="memory",
    title="Device memory of a GRPO step, planned and measured",
    statement="a 32B model trains with NVFP4 LoRA in half of an 80 GB card, and what a step takes "
    "can be said before it runs",
    source="section 1 and section 4.3 (32B on one H100-80GB); the bars are this suite's",
    procedure="step_time",
    arms=(NVFP4_LORA, NF4_LORA, MXFP4_LORA, BF16_LORA),
    scales={Tier.SYSTEMS: StepScale(points=MEMORY_POINTS, warm_up=0)},
    costs={
        Tier.SYSTEMS: Cost(
            train_seconds=150.0,
            evaluate_seconds=None,
            memory_bytes=80 * GIB,
            disk_bytes=10_000_000,
            basis="one run an arm on one NVIDIA H200",
        )
    },
    metrics=_metrics(MEMORY_POINTS, ratios=False),
    headline="peak_bytes_32b",
)

MEMORY_BUDGETS = Target(
    name="memory_budgets",
    title="GRPO steps on smaller cards (not in the paper)",
    statement="32B trains within a 32 GB card's budget, 14B within 16 GB and 7B within 10 GB",
    source="not in the paper; the bars are this suite's",
    procedure="step_time",
    arms=(NVFP4_LORA,),
    scales={Tier.SYSTEMS: StepScale(points=BUDGET_POINTS, warm_up=0)},
    costs={
        Tier.SYSTEMS: Cost(
            train_seconds=60.0,
            evaluate_seconds=None,
            memory_bytes=32 * GIB,
            disk_bytes=10_000_000,
            basis="estimated from the rates of one NVIDIA H200",
        )
    },
    metrics=_metrics(BUDGET_POINTS, ratios=False),
    headline="peak_bytes_32b_32gb",
)
