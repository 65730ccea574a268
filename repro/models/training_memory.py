"""What a training run takes of its device: asked by the plan of a run and by the run itself.

A published model's micro-batches hold as many tokens as its device has room for: few long products
are faster than many short ones, and the gradient is the same. So the step that trains is cut as the
step that is timed is. A policy whose shape is not known by its checkpoint keeps the scale's rows.
"""

from __future__ import annotations

import dataclasses

from repro.models.memory_plan import (
    MOST_FULL_TOKENS,
    StepShape,
    fit_training,
    full_training_bytes,
    peak_within,
    plan_memory,
)
from repro.spec.arm import Arm
from repro.spec.config import OPENING_TOKENS, TrainScale
from repro.spec.shapes import shape_of_checkpoint

# Rows that a training run's engine samples at once.
MOST_SLOTS = 256
# What vLLM is given beside weights and cache: activations, captured graphs, draws. An estimate.
_SERVING_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """What a run of an arm at a scale takes of a device.

    Attributes
    ----------
    step
        With micro-batches of one row.
    more
        Bytes beyond the step's own plan.
    served
        Bytes of vLLM beside them, its copy of the base among them; its cache is in the plan.
    """

    step: StepShape
    more: int
    served: int = 0

    @property
    def least(self) -> int:
        """Bytes with one row at once, in the rollout and in the update."""
        return plan_memory(dataclasses.replace(self.step, slots=1)).peak + self.more + self.served

    def fitting(self, device_bytes: int) -> StepShape:
        """Return the step with micro-batches and kept blocks for a device of so many bytes."""
        return fit_training(self.step, device_bytes - self.served, self.more)

    def served_share(self, device_bytes: int) -> float:
        """Return the part of a device that vLLM takes: what is served, and the cache."""
        plan = plan_memory(self.step)
        beyond = plan.peak - peak_within(self.step, device_bytes - self.served)
        return (self.served + plan.rollout["cache"] - beyond) / device_bytes

    def peak(self, device_bytes: int | None) -> int:
        """Return the planned peak; without a device, of all rows at once."""
        if device_bytes is None:
            rows = max(1, min(self.step.rows, MOST_FULL_TOKENS // self.step.row_tokens))
            whole = dataclasses.replace(self.step, micro_tokens=rows * self.step.row_tokens)
            return plan_memory(whole).peak + self.more + self.served
        room = device_bytes - self.served
        return peak_within(self.fitting(device_bytes), room, self.more) + self.served


def training_memory(arm: Arm, scale: TrainScale) -> TrainingMemory | None:
    """Return the memory of a run on a device; None where the shape is not known."""
    shape = shape_of_checkpoint(scale.checkpoint)
    if shape is None:
        return None
    prompt = scale.longest_prompt + OPENING_TOKENS
    rows = scale.prompts_per_rollout * scale.group_size
    step = StepShape(
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
    )
    more = full_training_bytes(shape, scale.optimizer.name) if arm.training == "full" else 0
    served = 0
    if scale.sampler == "vllm":
        plan = plan_memory(step).rollout
        served = plan["weights"] + plan["embeddings"] + _SERVING_BYTES
    return TrainingMemory(step=step, more=more, served=served)
