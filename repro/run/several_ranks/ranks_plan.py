"""The time of a step on several GPUs, before any is rented: `plan --ranks 1,2,4,8`.

Two rates follow from the blessed phases of one GPU (`step_lengths`: rows of equal and of spread
lengths). A decode step has a fixed cost and a cost per row::

    rollout = per_step * longest row + per_token * tokens of all rows

The two points of a model have the same tokens and different longest rows, which gives both rates.
The update is in proportion to tokens. Ranks meet after sampling, so each waits for the longest row
of all. The time on links is left out; the target `scaling` measures it on two GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean

from repro.evidence.environment import device_of
from repro.evidence.record import Record
from repro.evidence.store import blessed_records
from repro.models.memory_plan import plan_memory, training_memory
from repro.spec.arm import Arm, require
from repro.spec.config import RunConfig, TrainScale
from repro.spec.shapes import SHAPES, shape_of_checkpoint
from repro.spec.step_scale import StepPoint
from repro.spec.tier import Tier

_DRAWS = 20
_CARD_BYTES = 80 * 10**9
# What full training holds, by parts of the memory plan.
_COLUMNS = {
    "masters": ("adapter",),
    "gradients": ("gradients",),
    "moments": ("optimiser",),
    "16-bit copy": ("weights", "embeddings"),
    "a pass": ("activations", "logits"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds of one GPU: of a decode step, of a token that it samples, of one in the update.

    Tokens of the update are those of prompts and completions; `fixed` is what a step takes beside
    both phases, and `basis` what was measured, and where.
    """

    per_step: float
    per_token: float
    per_update_token: float
    fixed: float
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Seconds of a step, and of its phases; `waiting` is the mean rank's for the last."""

    step: float
    rollout: float
    update: float
    waiting: float


def parse_ranks(text: str) -> list[int]:
    """Return numbers of ranks, as `1,2,4` gives them."""
    parts = [part.strip() for part in text.split(",")]
    require(
        all(part.isdigit() and int(part) > 0 for part in parts),
        f"--ranks {text}: needs numbers such as 1,2,4",
    )
    return sorted({int(part) for part in parts})


def ranks_text(runs: Sequence[RunConfig], counts: Sequence[int], expected: Path) -> str:
    """Return, per arm that trains, the time of its step on each number of GPUs."""
    arms = {run.arm.name: run for run in runs if run.procedure == "train"}
    texts = [_arm_text(run, counts, expected) for run in arms.values()]
    return "\n".join(texts) or "  nothing here trains"


def measured_rates(model: str, arm: Arm, expected: Path) -> Rates | None:
    """Return the rates of a model in an arm's format from blessed records, None without any."""
    names = [f"{model.replace('.', '_')}_{lengths}" for lengths in ("spread", "equal")]
    for record in blessed_records(expected, Tier.SYSTEMS, "step_lengths"):
        measured = all(f"step_seconds_{name}" in record.metrics for name in names)
        if arm.training == "lora" and record.arm == f"{arm.weight_format}_lora" and measured:
            return _rates_of(record, model, *names)
    return None


def _rates_of(record: Record, model: str, spread: str, equal: str) -> Rates:
    def seconds(phase: str, name: str) -> float:
        return record.value(f"{phase}_seconds_{name}") or 0.0

    (values,) = [p for p in record.config["scale"]["points"] if p["name"] == spread]
    point = StepPoint.recorded(values)
    drawn = [point.drawn_lengths(seed) for seed in range(_DRAWS)]
    longest, tokens = fmean(map(max, drawn)), fmean(map(sum, drawn))
    mean = tokens / point.rows
    # Rows of one length end together: the same tokens in as many steps as the mean row has.
    per_step = (seconds("rollout", spread) - seconds("rollout", equal)) / (longest - mean)
    update = seconds("update", spread)
    return Rates(
        per_step=per_step,
        per_token=max(0.0, (seconds("rollout", equal) - per_step * mean) / tokens),
        per_update_token=update / (tokens + point.rows * point.prompt_tokens),
        fixed=max(0.0, seconds("step", spread) - seconds("rollout", spread) - update),
        basis=f"step_lengths of {model} on {device_of(record.environment)}, one GPU",
    )


def predicted(rates: Rates, point: StepPoint, ranks: int) -> Predicted:
    """Return the time of a step on a point's rows; ranks share prompts as they do in training."""
    rollouts, waits, updates = [], [], []
    for seed in range(_DRAWS):
        lengths = point.drawn_lengths(seed)
        groups = [lengths[p * point.group : (p + 1) * point.group] for p in range(point.prompts)]
        shares = [[*chain(*groups[rank::ranks])] for rank in range(ranks)]
        each = [rates.per_step * max(own) + rates.per_token * sum(own) for own in shares]
        tokens = sum(lengths) + point.rows * point.prompt_tokens
        rollouts.append(max(each))
        waits.append(max(each) - fmean(each))
        updates.append(rates.per_update_token * tokens / ranks)
    rollout, update = fmean(rollouts), fmean(updates)
    step = rollout + update + rates.fixed
    return Predicted(step=step, rollout=rollout, update=update, waiting=fmean(waits))


def _full_text(run: RunConfig, counts: Sequence[int]) -> str:
    """Return the memory per card of full training, which ranks divide, on each number of them."""
    columns = (*_COLUMNS, "rest", "in all")
    lines = [
        f"  {run.arm.name}: GB of an 80 GB card, FSDP2 dividing what is trained; no time predicted",
        "    GPUs" + "".join(f"{name:>12}" for name in columns),
    ]
    for ranks in counts:
        memory = training_memory(run.arm, run.scale, ranks)
        if memory is None:
            return f"  {run.arm.name}: not planned: no known shape of {run.scale.checkpoint}"
        peak = memory.peak(_CARD_BYTES)
        parts = plan_memory(memory.fitting(_CARD_BYTES)).update
        own = [sum(parts[name] for name in names) for names in _COLUMNS.values()]
        row = "".join(f"{part / 1e9:12.1f}" for part in (*own, peak - sum(own), peak))
        lines.append(f"    {ranks:>4}{row}  {'fits' if peak <= _CARD_BYTES else 'does not fit'}")
    return "\n".join(lines)


def _arm_text(run: RunConfig, counts: Sequence[int], expected: Path) -> str:
    if run.arm.training == "full":
        return _full_text(run, counts)
    scale: TrainScale = run.scale
    shape = shape_of_checkpoint(scale.checkpoint)
    model = next((name for name, known in SHAPES.items() if known == shape), None)
    rates = None if model is None else measured_rates(model, run.arm, expected)
    if rates is None:
        return (f"  {run.arm.name}: not predicted: no blessed step_lengths of "
                f"{Path(scale.checkpoint).name} in {run.arm.weight_format} with LoRA")  # fmt: skip
    basis = StepPoint(name="planned", model="7b", lengths="spread", prompt_tokens=150)
    point = dataclasses.replace(
        basis,
        prompts=scale.prompts_per_rollout,
        group=scale.group_size,
        completion_tokens=scale.rollout.max_new_tokens,
        mean_tokens=min(basis.mean_tokens, scale.rollout.max_new_tokens),
    )
    lines = [
        f"  {run.arm.name}: {point.rows} rows a step, {point.mean_tokens} tokens each on average "
        f"(deviation half of it, at most {point.completion_tokens})",
        "    GPUs  step s  rollout  update  waiting  efficiency",
    ]
    alone = predicted(rates, point, 1)
    for ranks in counts:
        if ranks > point.prompts:
            lines.append(f"    {ranks:>4}  not possible: a rollout has {point.prompts} prompts")
            continue
        own = predicted(rates, point, ranks)
        lines.append(
            f"    {ranks:>4}  {own.step:>6.2f}  {own.rollout:>7.2f}  {own.update:>6.2f}  "
            f"{own.waiting:>7.2f}  {alone.step / own.step / ranks:>10.2f}"
        )
    return "\n".join([*lines, f"    from {rates.basis}; time on links is left out"])
