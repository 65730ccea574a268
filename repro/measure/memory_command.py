"""`python -m repro plan memory`: what a step needs, the largest batch that fits, what to change.

Stated in decimal gigabytes (10^9 bytes), as cards and the paper are; a budget may be given in GiB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, get_args

from repro.models.memory_plan import (
    MemoryPlan,
    StepShape,
    alternatives,
    checkpoint_bytes,
    fit_micro_tokens,
    fit_slots,
    plan_memory,
)
from repro.spec.arm import WEIGHT_FORMATS, CacheName, OptimizerName
from repro.spec.command_parser import SentenceParser
from repro.spec.shapes import SHAPES, shape_named

_UNITS = {"gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20, "": 1}


def parse_bytes(text: str) -> int:
    """Return the bytes that `80GB`, `40 GiB` or a plain number stands for.

    Raises
    ------
    ValueError
        If the text is no size, or not above zero.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise ValueError(f"--budget {text}: needs a size such as 80GB or 40GiB")
    nbytes = int(float(match[1]) * _UNITS[match[2]])
    if nbytes <= 0:
        raise ValueError(f"--budget {text}: needs more than nothing")
    return nbytes


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `plan memory`'s flags."""
    parser = SentenceParser(
        prog="repro plan memory",
        description="Device memory of one GRPO step, by part, before anything runs.",
    )
    parser.add_argument("--model", required=True, metavar="SIZE", help=", ".join(SHAPES))
    parser.add_argument("--format", default="nvfp4", choices=WEIGHT_FORMATS)
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank (default: 32)")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of each")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--completion-tokens", type=int, default=2048)
    parser.add_argument("--budget", default="80GB", metavar="SIZE", help="such as 80GB or 40GiB")
    parser.add_argument("--slots", type=int, help="rows sampled at once (default: as many as fit)")
    parser.add_argument("--micro-tokens", type=int, help="tokens of a micro-batch (default: fits)")
    parser.add_argument("--optimizer", default="adamw", choices=get_args(OptimizerName))
    parser.add_argument("--cache", default="compute", choices=get_args(CacheName))
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main_memory(arguments: Sequence[str]) -> int:
    """Print the plan; return 0 when the step fits its budget, 1 when it does not."""
    args = build_parser().parse_args(arguments)
    budget = parse_bytes(args.budget)
    shape = shape_named(args.model)
    asked_step = StepShape(
        shape=shape,
        weight_format=args.format,
        rank=args.rank,
        prompts=args.prompts,
        group=args.group,
        prompt_tokens=args.prompt_tokens,
        completion_tokens=args.completion_tokens,
        slots=args.slots or args.prompts * args.group,
        micro_tokens=args.micro_tokens or args.prompt_tokens + args.completion_tokens,
        optimizer=args.optimizer,
        cache=args.cache,
        checkpointing=not args.no_checkpointing,
    )
    step = asked_step
    if not args.slots:
        step = fit_slots(step, budget)
    if args.micro_tokens:
        step = dataclasses.replace(step, micro_tokens=args.micro_tokens)
    elif args.slots:
        step = fit_micro_tokens(step, budget)
    plan = plan_memory(step)
    text = json.dumps(plan_json(plan, budget), indent=1) if args.json else _text(plan, budget)
    sys.stdout.write(text + "\n")
    return 0 if plan.peak <= budget else 1


def plan_json(plan: MemoryPlan, budget: int) -> dict[str, Any]:
    """Return the plan as JSON values."""
    step = dataclasses.asdict(plan.step)
    return {
        "step": step | {"shape": plan.step.shape.name},
        "rollout": plan.rollout,
        "update": plan.update,
        "peak": plan.peak,
        "budget": budget,
        "fits": plan.peak <= budget,
        "checkpoint_bytes": checkpoint_bytes(plan.step.shape, plan.step.weight_format),
        "changes": [
            {"change": words, "peak": plan_memory(changed).peak}
            for words, changed in alternatives(plan.step)
        ],
    }


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:8.2f}"


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
        lines.append(f"{part:<16}{_gigabytes(nbytes)}{_gigabytes(plan.update[part]):>9}")
    totals = sum(plan.rollout.values()), sum(plan.update.values())
    lines.append(f"{'total':<16}{_gigabytes(totals[0])}{_gigabytes(totals[1]):>9}")
    verdict = "fits" if plan.peak <= budget else "does not fit"
    lines += [
        "",
        f"peak {plan.peak / 1e9:.2f} GB ({plan.peak / 2**30:.2f} GiB): {verdict} "
        f"{budget / 1e9:.2f} GB",
        f"{step.slots} of {step.rows} rows sampled at once"
        + ("" if step.slots >= step.rows else "; the others wait for a place"),
        f"micro-batches of {step.micro_tokens} tokens ({step.micro_tokens // step.row_tokens} "
        f"full rows)",
    ]
    lines += _changes(plan, budget)
    return "\n".join(lines)


def _changes(plan: MemoryPlan, budget: int) -> list[str]:
    if plan.peak <= budget and plan.step.slots >= plan.step.rows:
        return []
    lines = ["", "what would change it:"]
    if plan.peak > budget:
        for words, changed in alternatives(plan.step):
            peak = plan_memory(changed).peak
            word = "fits" if peak <= budget else "too much still"
            lines.append(f"  {words}: peak {peak / 1e9:.2f} GB, {word}")
        part = max(plan.update, key=lambda name: max(plan.update[name], plan.rollout[name]))
        lines.append(f"  the largest part: {part}")
        return lines
    for words, changed in alternatives(plan.step):
        slots = fit_slots(changed, budget).slots
        if slots > plan.step.slots:
            lines.append(f"  {words}: {slots} rows at once")
    return lines
