"""`python -m repro plan memory`: what a step needs, and the largest batch that fits.

Stated in decimal gigabytes (10^9 bytes), as cards and the paper are; a budget may be given in GiB.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, get_args

from repro.models.memory_plan import (
    MemoryPlan,
    StepShape,
    checkpoint_bytes,
    fit_slots,
    plan_memory,
)
from repro.spec.arm import WEIGHT_FORMATS, OptimizerName, RolloutAdapter
from repro.spec.checks import require
from repro.spec.shapes import SHAPES, shape_named
from repro.spec.tier import parse_bytes

_COUNT: dict[str, Any] = {"type": int, "metavar": "N"}
# The flags of a step: their defaults, and how they are read.
_FLAGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "format": ("nvfp4", {"choices": WEIGHT_FORMATS}),
    "rank": (32, _COUNT),
    "prompts": (1, _COUNT),
    "group": (8, _COUNT),
    "prompt_tokens": (256, _COUNT),
    "completion_tokens": (2048, _COUNT),
    "budget": ("80GB", {"metavar": "SIZE"}),
    "optimizer": ("adamw", {"choices": get_args(OptimizerName)}),
    "rollout_adapter": ("apart", {"choices": get_args(RolloutAdapter)}),
}
# What a parsed line holds that is no flag.
_NO_FLAGS = ("targets", "command")


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe a step; those that are not given are not in the namespace."""
    group = parser.add_argument_group(
        "memory --model SIZE",
        "Device memory of one GRPO step, by part, before anything runs; SIZE is one of "
        f"{', '.join(SHAPES)}. Exit status: 0 when the step fits, 2 when it does not.",
        argument_default=argparse.SUPPRESS,
    )
    for name, (default, reading) in _FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", help=f"default: {default}", **reading)


def asks_for_bytes(args: argparse.Namespace) -> bool:
    """Whether `plan` is to print the bytes of a step rather than a target's runs.

    `memory` is a target, too; with `--model` its plan is that of a model's size. Flags of the one
    with the other raise.
    """
    asks = args.targets == ["memory"] and args.model is not None
    given = [name for name, value in vars(args).items() if value is not None and value is not False]
    flags = {name: f"--{name.replace('_', '-')}" for name in given if name not in _NO_FLAGS}
    if asks:
        others = [flag for name, flag in flags.items() if name not in _FLAGS and name != "model"]
        require(not others, f"plan memory --model takes no {', '.join(others)}")
    else:
        own = [flag for name, flag in flags.items() if name in _FLAGS]
        require(not own, f"{', '.join(own)}: only with plan memory --model SIZE")
    return asks


def main_memory(args: argparse.Namespace) -> int:
    """Print the plan; return 0 when the step fits its budget, 2 when it does not."""
    given = {name: getattr(args, name, default) for name, (default, _) in _FLAGS.items()}
    budget = parse_bytes(given.pop("budget"), "--budget")
    shape, weight_format = shape_named(args.model), given.pop("format")
    largest = StepShape(
        **given,
        shape=shape,
        weight_format=weight_format,
        slots=given["prompts"] * given["group"],
        micro_tokens=given["prompt_tokens"] + given["completion_tokens"],
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
