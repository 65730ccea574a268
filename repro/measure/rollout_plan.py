"""Which points of a measurement fit a device, from shapes alone, before anything is loaded.

A rollout takes the bytes of `repro.models.memory_plan`'s rollout phase, without what belongs to
training, and with the cache of an engine that shares no prompt: every row has all blocks of its
own.

An engine would run with a smaller cache, too, and let rows wait: what it measured then would be its
queue. So rows that do not all fit are not measured. A step has rows wait, and must hold one alone.
Needs no torch.
"""

from __future__ import annotations

import dataclasses

from repro.evidence.not_run import needs
from repro.models.memory_plan import StepShape, plan_memory, weight_bytes
from repro.spec.arm import Arm, OptimizerName
from repro.spec.shapes import shape_named
from repro.spec.step_scale import StepPoint
from repro.spec.throughput_scale import ThroughputPoint, ThroughputScale


def cell_of(point: ThroughputPoint, batch: int) -> str:
    """Return the name of a batch at a point, as the names of its metrics end."""
    return f"{point.name}_{batch}"


def planned_bytes(point: ThroughputPoint, batch: int, arm: Arm) -> int:
    """Return the peak bytes of an engine of `batch` slots on the arm's model."""
    decoder = shape_named(point.shape.removeprefix("qwen2.5-"))
    row = point.prompt_tokens + point.new_tokens
    step = StepShape(
        shape=decoder,
        weight_format=arm.weight_format,
        rank=arm.lora_rank,
        prompts=batch,
        group=1,
        prompt_tokens=point.prompt_tokens,
        completion_tokens=point.new_tokens,
        slots=batch,
        micro_tokens=row,
        shares_prompts=False,
        rollout_adapter=arm.rollout_adapter,
    )
    parts = dict(plan_memory(step).rollout)
    # What is only sampled from has no base to restore.
    parts["weights"] = weight_bytes(step)
    if arm.training != "lora":
        parts["adapter"] = 0
    return sum(parts.values()) - parts["optimiser"]


def not_fitting(scale: ThroughputScale, arm: Arm, total_bytes: int) -> dict[str, str]:
    """Return the batches of a scale's points that an arm does not fit an empty device, with why."""
    planned = {
        cell_of(point, batch): planned_bytes(point, batch, arm)
        for point in scale.points
        for batch in point.batches
    }
    return {
        cell: needs(nbytes, total_bytes, "by the plan")
        for cell, nbytes in planned.items()
        if nbytes > total_bytes
    }


def unfitted_step(point: StepPoint, arm: Arm, optimizer: OptimizerName) -> StepShape:
    """Return an arm's step at a point with all rows at once, or as many as the point says.

    A micro-batch has one row, a long one, where the point does not say more; no block is kept.
    """
    # Few spread rows are twice as long as the mean, and all share the cache; each is updated whole.
    planned_tokens = min(point.completion_tokens, 2 * point.expected_tokens)
    return StepShape(
        shape=shape_named(point.model),
        weight_format=arm.weight_format,
        rank=point.lora_rank or arm.lora_rank,
        prompts=point.prompts,
        group=point.group,
        prompt_tokens=point.prompt_tokens,
        completion_tokens=planned_tokens,
        slots=point.slots or point.rows,
        micro_tokens=point.micro_tokens
        or point.prompt_tokens + max(planned_tokens, point.long_tokens),
        optimizer=optimizer,
        rollout_adapter=arm.rollout_adapter,
    )


def least_of_step(point: StepPoint, arm: Arm, optimizer: OptimizerName) -> int:
    """Return the bytes of an arm's step at a point with one row at once."""
    smallest = dataclasses.replace(point, slots=1, micro_tokens=point.row_tokens)
    return plan_memory(unfitted_step(smallest, arm, optimizer)).peak
