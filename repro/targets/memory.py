"""The memory that a GRPO step takes, planned and measured, on the paper's card and on smaller ones.

A peak is what the allocator reserved at most, and the driver's context beside it. Nothing in it is
drawn at random that a seed could change.
"""

from __future__ import annotations

from repro.spec.checkpoint_path import CheckpointScale
from repro.spec.step import StepPoint, StepScale
from repro.spec.target import Cost, Metric, Target
from repro.spec.tier import GIB, Tier
from repro.targets.step_metrics import step_metrics
from repro.targets.table1 import BF16_LORA, MXFP4_LORA, NF4_LORA, NVFP4_LORA

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

MEMORY = Target(
    name="memory",
    title="Device memory of a GRPO step, planned and measured",
    statement="a 32B model trains with NVFP4 LoRA in half of an 80 GB card, and what a step takes "
    "can be said before it runs",
    source="section 1 and section 4.3 (32B on one H100-80GB); the bars are this suite's",
    procedure="step_time",
    timed_repeats=1,
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
    metrics=step_metrics(MEMORY_POINTS, ratios=False),
    headline="peak_bytes_32b",
)

CHECKPOINT_PATH = Target(
    name="checkpoint_path",
    title="A 7B checkpoint's way: written, quantised, loaded, stepped (not in the paper)",
    statement="a 7B checkpoint is quantised in a stream with little memory, and its NVFP4 form "
    "samples a token within seconds of being loaded",
    source="not in the paper; the bars are this suite's",
    procedure="checkpoint_path",
    timed_repeats=1,
    arms=(NVFP4_LORA,),
    scales={Tier.SYSTEMS: CheckpointScale()},
    costs={
        Tier.SYSTEMS: Cost(
            train_seconds=150.0,
            evaluate_seconds=None,
            memory_bytes=20 * GIB,
            disk_bytes=22_000_000_000,
            basis="predicted from the rates of one NVIDIA H200 and its host",
        )
    },
    metrics=tuple(
        Metric(name=name, unit="seconds" if name.endswith("seconds") else "bytes", title=title)
        for name, title in (
            ("load_seconds", "from disk to the first sampled token"),
            ("first_load_seconds", "the same, kernels compiled first"),
            ("build_seconds", "written by transformers"),
            ("source_bytes", "16-bit checkpoint"),
            ("quantise_seconds", "quantised in a stream"),
            ("quantised_bytes", "NVFP4 checkpoint"),
            ("quantise_host_bytes", "peak host memory of quantising"),
            ("quantise_device_bytes", "peak device memory of quantising"),
            ("load_host_bytes", "peak host memory of loading"),
            ("load_device_bytes", "peak device memory of the step"),
            ("step_seconds", "one RL step on the loaded policy"),
        )
    ),
    headline="load_seconds",
)

MEMORY_BUDGETS = Target(
    name="memory_budgets",
    title="GRPO steps on smaller cards (not in the paper)",
    statement="32B trains within a 32 GB card's budget, 14B within 16 GB and 7B within 10 GB",
    source="not in the paper; the bars are this suite's",
    procedure="step_time",
    timed_repeats=1,
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
    metrics=step_metrics(BUDGET_POINTS, ratios=False),
    headline="peak_bytes_32b_32gb",
)
