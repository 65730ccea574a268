"""`python -m repro memory`: what a step needs, and the largest batch that fits.

Stated in decimal gigabytes (10^9 bytes), as cards and the paper are; a budget may be given in GiB.
"""

from __future__ import annotations

import argparse
import sys

from repro.models.memory_plan import MemoryPlan, StepShape, checkpoint_bytes, fit_slots, plan_memory
from repro.spec.shapes import shape_named
from repro.spec.tier import parse_bytes


def main_memory(args: argparse.Namespace) -> int:
    """Print the plan; return 0 when the step fits its budget, 2 when it does not."""
    budget = parse_bytes(args.budget, "--budget")
    largest = StepShape(
        shape=shape_named(args.model),
        weight_format=args.format,
        rank=args.rank,
        prompts=args.prompts,
        group=args.group,
        prompt_tokens=args.prompt_tokens,
        completion_tokens=args.completion_tokens,
        slots=args.prompts * args.group,
        micro_tokens=args.prompt_tokens + args.completion_tokens,
        optimizer=args.optimizer,
        rollout_adapter=args.rollout_adapter,
    )
    plan = plan_memory(fit_slots(largest, budget))
    sys.stdout.write(_text(plan, budget) + "\n")
    return 0 if plan.peak <= budget else 2


def _text(plan: MemoryPlan, budget: int) -> str:
    step = plan.step
    stored = checkpoint_bytes(step.shape, step.weight_format)
    lines = [
        f"Qwen2.5 {step.shape.name}, {step.weight_format}, LoRA rank {step.rank}: "
        f"{step.prompts} x {step.group} completions, {step.prompt_tokens} + "
        f"{step.completion_tokens} tokens",
        f"checkpoint {stored / 1e9:.2f} GB (a tied lm_head counted twice, as the paper does)",
        "",
        f"{'GB (10^9 bytes)':<16}{'rollout':>8}{'update':>9}",
    ]
    for part, nbytes in plan.rollout.items():
        lines.append(f"{part:<16}{nbytes / 1e9:8.2f}{plan.update[part] / 1e9:9.2f}")
    totals = sum(plan.rollout.values()), sum(plan.update.values())
    lines.append(f"{'total':<16}{totals[0] / 1e9:8.2f}{totals[1] / 1e9:9.2f}")
    verdict = "fits" if plan.peak <= budget else "does not fit"
    lines += [
        "",
        f"peak {plan.peak / 1e9:.2f} GB ({plan.peak / 2**30:.2f} GiB): {verdict} "
        f"{budget / 1e9:.2f} GB",
        f"{step.slots} of {step.rows} rows sampled at once"
        + ("" if step.slots >= step.rows else "; the others wait for a place"),
        f"micro-batches of {step.micro_tokens} tokens ({step.micro_tokens // step.row_tokens} "
        f"full rows); the activations of {step.kept_blocks} of {step.shape.layers} blocks are kept",
    ]
    return "\n".join(lines)
