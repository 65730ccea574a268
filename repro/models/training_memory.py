"""What a training run takes of its device: asked by the plan of a run and by the run itself.

A published model's micro-batches hold as many tokens as its device has room for: few long products
are faster than many short ones, and the gradient is the same. So the step that trains is cut as the
step that is timed is. A policy whose shape is not known by its checkpoint keeps the scale's rows.
"""

from __future__ import annotations

from repro.models.memory_plan import StepShape
from repro.spec.arm import Arm
from repro.spec.config import OPENING_TOKENS, TrainScale
from repro.spec.shapes import shape_of_checkpoint

# Rows that a training run's engine samples at once.
MOST_SLOTS = 256


def training_step(arm: Arm, scale: TrainScale, ranks: int = 1) -> StepShape | None:
    """Return a run's step on each device of its ranks, with micro-batches of one row.

    None where the shape is not known.
    """
    shape = shape_of_checkpoint(scale.checkpoint)
    if shape is None:
        return None
    prompt = scale.longest_prompt + OPENING_TOKENS
    rows = scale.prompts_per_rollout * scale.group_size
    return StepShape(
        shape=shape,
        weight_format=arm.weight_format,
        rank=arm.lora_rank if arm.training == "lora" else 1,
        prompts=scale.prompts_per_rollout,
        group=scale.group_size,
        prompt_tokens=prompt,
        completion_tokens=scale.longest_completion,
        slots=min(rows, MOST_SLOTS),
        micro_tokens=prompt + scale.longest_completion,
        optimizer=scale.optimizer.name,
        shares_prompts=False,
        filtered=scale.rollout.filtered or scale.evaluation.sampling.filtered,
        full_over=ranks if arm.training == "full" else 0,
    )
