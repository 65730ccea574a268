"""The memory that a GRPO step takes, planned and measured, on the paper's card and on smaller ones.

A peak is what the allocator reserved at most, and the driver's context beside it. Nothing in it is
drawn at random that a seed could change.
"""

from __future__ import annotations

from typing import Any

from repro.spec.arm import Arm
from repro.spec.step_scale import StepPoint, StepScale
from repro.spec.target import Target
from repro.spec.tier import GIB
from repro.targets.step_targets import step_metrics, step_target
from repro.targets.steps import POINTS_32B
from repro.targets.table1 import BF16_LORA, MXFP4_LORA, NF4_LORA, NVFP4_LORA, NVFP4_LORA_AQN

_CAP = 80 * 10**9


def _point(name: str, model: str, **changes: Any) -> StepPoint:
    """Return a point that measures memory alone: few tokens are sampled, two micro-batches go."""
    return StepPoint(name=name, model=model, sampled_tokens=48, memory_only=True, **changes)


_UNITS = ("bytes", "percent")

# The claim's own point is a whole step, and Table 8's: whichever target comes first measures it.
CLAIM = POINTS_32B[2]
_LONG = _point("7b_long", "7b", completion_tokens=4096, micro_tokens=8704)
_R16 = _point("14b_r16", "14b", micro_tokens=9216, lora_rank=16)
_SHORT = _point("3b_short", "3b", prompts=4, completion_tokens=512)
MEMORY_POINTS = (
    CLAIM,
    _point("14b", "14b", micro_tokens=4608),
    _point("7b", "7b", micro_tokens=4608),
    _LONG,
    _point("7b_r64", "7b", micro_tokens=2304, lora_rank=64),
    _R16,
    _SHORT,
    _point("72b", "72b", budget_bytes=_CAP, micro_tokens=2304),
)
# 16-bit weights at the same points, the claim's size without its rollout; 72B does not fit.
DENSE_POINTS = (_point("32b", "32b", budget_bytes=_CAP, micro_tokens=2304), *MEMORY_POINTS[1:])
# Other 4-bit formats lie on the device as NVFP4 does: a size, a length and a rank each will do.
FORMAT_POINTS = (_LONG, _R16, _SHORT)

# Smaller cards than the paper's: fewer rows at once, micro-batches of one row.
BUDGET_POINTS = (
    _point("32b_32gb", "32b", budget_bytes=32 * 10**9, slots=2, micro_tokens=2304),
    _point("14b_16gb", "14b", budget_bytes=16 * 10**9, slots=1, micro_tokens=2304, lora_rank=16),
    _point("7b_10gb", "7b", budget_bytes=10 * 10**9, slots=4, micro_tokens=2304, lora_rank=16),
)

# Whole steps within the budgets of common cards, with lengths like those of GSM8K.
CARD_POINTS = tuple(
    StepPoint(
        name=f"{model.replace('.', '_')}_{prompts}x8_{gigabytes}gb",
        model=model,
        prompts=prompts,
        group=8,
        prompt_tokens=150,
        lengths="spread",
        budget_bytes=gigabytes * 10**9,
    )
    for model, prompts, gigabytes in (
        ("0.5b", 16, 24),
        ("0.5b", 64, 24),
        ("7b", 16, 24),
        ("7b", 16, 16),
        ("7b", 16, 12),
    )
)


def _target(
    name: str,
    title: str,
    statement: str,
    arms: tuple[Arm, ...],
    points: tuple[StepPoint, ...],
    source: str = "not in the paper; the bars are this suite's",
    **more: Any,
) -> Target:
    # What such a point is measured for; the time of its whole step is Table 8's.
    scale = StepScale(points=points)
    measured = tuple(item for item in step_metrics(scale) if item.unit in _UNITS)
    return step_target(name, title, statement, arms, scale, metrics=measured, source=source, **more)


MEMORY = _target(
    "memory",
    "Device memory of a GRPO step, planned and measured",
    "a 32B model trains with NVFP4 LoRA in half of an 80 GB card, and what a step takes "
    "can be said before it runs",
    (NVFP4_LORA,),
    MEMORY_POINTS,
    "section 1 and section 4.3 (32B on one H100-80GB); the bars are this suite's",
    headline=f"peak_bytes_{CLAIM.name}",
    version=3,
)
MEMORY_DENSE = _target(
    "memory_dense",
    "Device memory of a GRPO step on 16-bit weights, planned and measured",
    "what a step of 16-bit LoRA takes can be said before it runs, too, and 72B does not fit 80 GB",
    (BF16_LORA,),
    DENSE_POINTS,
    headline="peak_bytes_32b",
)
MEMORY_FORMATS = _target(
    "memory_formats",
    "Device memory of a GRPO step in the other 4-bit formats (not in the paper)",
    "what a step on NF4 or MXFP4 weights takes can be said before it runs, too",
    (NF4_LORA, MXFP4_LORA),
    FORMAT_POINTS,
    headline=f"peak_bytes_{_LONG.name}",
)
MEMORY_BUDGETS = _target(
    "memory_budgets",
    "GRPO steps on smaller cards (not in the paper)",
    "32B trains within a 32 GB card's budget, 14B within 16 GB and 7B within 10 GB",
    (NVFP4_LORA,),
    BUDGET_POINTS,
    headline="peak_bytes_32b_32gb",
    version=3,
    card=32 * GIB,
)
MEMORY_CARDS = step_target(
    "memory_cards",
    "Whole GRPO steps within the memory of common cards (not in the paper)",
    "QeRL trains a 7B model within 24 GB, and the plan says what a step takes",
    (NVFP4_LORA_AQN,),
    StepScale(points=CARD_POINTS, steps=3),
    headline=f"peak_bytes_{CARD_POINTS[2].name}",
    source="not in the paper; the bars are this suite's",
    card=24 * 10**9,
)
MEMORY_TARGETS = (MEMORY, MEMORY_DENSE, MEMORY_FORMATS, MEMORY_BUDGETS, MEMORY_CARDS)
