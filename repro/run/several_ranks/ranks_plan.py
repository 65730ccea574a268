"""The time of a run on several GPUs, before any is rented: `plan --ranks 1,2,4,8`.

Two rates follow from the blessed phases of one GPU (`step_lengths`: rows of equal and of spread
lengths). A decode step has a fixed cost and a cost per row::

    rollout = per_step * decode steps + per_token * tokens of all rows

Decode steps are the longest row's, or more where rows wait for a slot. A model's two points have
the same tokens in different numbers of steps, which gives both rates. The update is in proportion
to tokens. Where `scaling` has that format on one GPU, both are scaled to its time of spread rows.
A run counts optimiser steps. Where several share a rollout, all rows but the first step's go
forward once more before them. Ranks wait for the last row of all.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import cast

from repro.evidence.environment import capture_environment, device_of
from repro.evidence.record import Record
from repro.evidence.store import blessed_records
from repro.models.memory_plan import TrainingMemory, plan_memory, training_memory, update_cost
from repro.run.preflight import among_unlike_devices, smallest_device
from repro.spec.arm import Arm
from repro.spec.checks import require
from repro.spec.config import RunConfig, TrainScale
from repro.spec.shapes import SHAPES, shape_of_checkpoint
from repro.spec.step_scale import StepPoint
from repro.spec.tier import CudaDevice, Tier

_DRAWS = 20
# Mean tokens of a completion where not 300. Assumed: the paper (arXiv 2510.11696) gives none.
_MEAN_TOKENS = {"bigmath": 1500}
_PROMPT_TOKENS = 150
# Steps between a row's end and the next one's entry: the engine looks every 16, a round behind.
_LATE = 24
# Planned for where this machine has no card.
_CARD = CudaDevice(name="a card of 80 GB", capability=(9, 0), memory_bytes=80 * 10**9)
# Targets whose records have a model's phases.
_MEASURED = ("step_lengths", "step_lengths_32b")
# How many times as fast a step off would have to be.
_WORTH = 1.15
# What full training holds, by parts of the memory plan.
_COLUMNS = {
    "masters": ("adapter",),
    "gradients": ("gradients",),
    "moments": ("optimiser",),
    "16 bits": ("weights", "embeddings"),
    "a pass": ("activations", "logits"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds of one GPU: of a decode step, of a token that it samples, of one in the update.

    Tokens of the update are those of prompts and completions; `fixed` is what a step takes beside
    both phases, `basis` what was measured, and where, and `cost` the passes' `update_cost`.
    """

    per_step: float
    per_token: float
    per_update_token: float
    fixed: float
    basis: str
    cost: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Seconds of a rollout with its steps, and by phase; `waiting`: a mean rank's for the last."""

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
    """Return what a run takes on each number of GPUs, once for all arms of which it is the same.

    Rates are of this machine's kind of device where blessed records have them.
    """
    arms = {run.arm.name: run for run in runs if run.procedure == "train"}
    device = device_of(capture_environment())
    alike: dict[str, list[str]] = {}
    for name, run in arms.items():
        alike.setdefault(_arm_text(run, counts, expected, device), []).append(name)
    heads = {text: _wrapped(f"{', '.join(names)}:", "  ") for text, names in alike.items()}
    return "\n".join(f"{head}\n{text}" for text, head in heads.items()) or "  nothing here trains"


def measured_rates(model: str, arm: Arm, expected: Path, device: str | None = None) -> Rates | None:
    """Return the rates of a model in an arm's format from blessed records, None without any.

    Those of `device`, named as `device_of` does, come before those of others.
    """
    names = [f"{model.replace('.', '_')}_{lengths}" for lengths in ("spread", "equal")]
    records = [r for target in _MEASURED for r in blessed_records(expected, Tier.SYSTEMS, target)]
    for record in sorted(records, key=lambda item: device_of(item.environment) != device):
        measured = all(f"step_seconds_{name}" in record.metrics for name in names)
        if arm.training == "lora" and record.arm == f"{arm.weight_format}_lora" and measured:
            here = device_of(record.environment)
            scaling = blessed_records(expected, Tier.SYSTEMS, "scaling", here)
            alike = [r for r in scaling if r.arm.startswith(record.arm)]
            level = [r for r in alike if f"step_seconds_{names[0]}" in r.metrics]
            return _rates_of(record, [*level, record][0], model, *names)
    return None


def _rates_of(record: Record, level: Record, model: str, spread: str, equal: str) -> Rates:
    def seconds(phase: str, name: str) -> float:
        own, own_spread, level_spread = (
            cast(float, one.value(f"{phase}_seconds_{point}"))
            for one, point in ((record, name), (record, spread), (level, spread))
        )
        return own * level_spread / own_spread

    points = {p["name"]: StepPoint.recorded(p) for p in record.config["scale"]["points"]}
    facts = record.facts["points"][spread][record.config["arm"]["weight_format"]]
    # Rows of one length end together: the same tokens in fewer steps.
    drawn, even = _drawn(points[spread]), _drawn(points[equal])
    most, least = (fmean(decode_steps(r, facts["slots"]) for r in rows) for rows in (drawn, even))
    tokens = fmean(map(sum, drawn))
    per_step = (seconds("rollout", spread) - seconds("rollout", equal)) / (most - least)
    update, point = seconds("update", spread), points[spread]
    cost = update_cost(facts["kept_blocks"] / SHAPES[model].layers, facts["micro_tokens"])
    return Rates(
        per_step=per_step,
        per_token=max(0.0, (seconds("rollout", equal) - per_step * least) / tokens),
        per_update_token=update / cost / (tokens + point.rows * point.prompt_tokens),
        fixed=max(0.0, seconds("step", spread) - seconds("rollout", spread) - update),
        basis=f"{record.target} of {model} on {device_of(record.environment)}, one GPU"
        + (f", at the level of {level.target}'s" if level is not record else ""),
        cost=cost,
    )


@functools.cache
def _drawn(point: StepPoint) -> list[list[int]]:
    """Return the tokens of each completion in several rollouts."""
    return [point.drawn_lengths(seed) for seed in range(_DRAWS)]


def decode_steps(lengths: Sequence[int], slots: int) -> int:
    """Return the decode steps of rows that enter in their order, `slots` of them at once."""
    ends = [-_LATE] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + _LATE + length)
    return max(ends)


@functools.cache
def predicted(rates: Rates, point: StepPoint, ranks: int) -> Predicted:
    """Return the time of a point's rollout and update; ranks share prompts as in training."""
    slots = point.slots or point.rows
    rollouts, waits, updates = [], [], []
    for lengths in _drawn(point):
        groups = [lengths[p * point.group : (p + 1) * point.group] for p in range(point.prompts)]
        shares = [[*chain(*groups[rank::ranks])] for rank in range(ranks)]
        each = [rates.per_step * decode_steps(r, slots) + rates.per_token * sum(r) for r in shares]
        tokens = sum(lengths) + point.rows * point.prompt_tokens
        rollouts.append(max(each))
        waits.append(max(each) - fmean(each))
        updates.append(rates.cost * rates.per_update_token * tokens / ranks)
    rollout, update = fmean(rollouts), fmean(updates)
    step = rollout + update + rates.fixed
    return Predicted(step=step, rollout=rollout, update=update, waiting=fmean(waits))


def step_off(rates: Rates, point: StepPoint, ranks: int) -> float:
    """Return the seconds of a step whose rollout is made beside the update of the step before.

    Both at once on a GPU would slow each other, by how much is not measured. So some of the GPUs
    sample and the others update, divided as is fastest; 2 or more are needed.
    """
    update = predicted(rates, point, 1).update
    slower = (
        max(predicted(rates, point, sampling).rollout, update / (ranks - sampling))
        for sampling in range(1, ranks)
    )
    return min(slower) + rates.fixed


def _full_text(run: RunConfig, counts: Sequence[int]) -> str:
    """Return the memory per card of full training, which ranks divide, on each number of them."""
    columns = (*_COLUMNS, "rest", "in all")
    card = smallest_device() or _CARD
    lines = [
        f"    GB of {card.name}{among_unlike_devices()}, FSDP2 dividing what is trained; no time "
        "predicted",
        "    GPUs" + "".join(f"{name:>11}" for name in columns),
    ]
    for ranks in counts:
        memory = training_memory(run.arm, run.scale, ranks)
        if memory is None:
            return f"    not planned: no known shape of {run.scale.checkpoint}"
        peak = memory.peak(card.memory_bytes)
        parts = plan_memory(memory.fitting(card.memory_bytes)).update
        own = [sum(parts[name] for name in names) for names in _COLUMNS.values()]
        row = "".join(f"{part / 1e9:11.1f}" for part in (*own, peak - sum(own), peak))
        fits = "fits" if peak <= card.memory_bytes else "does not fit"
        lines.append(f"    {ranks:>4}{row}  {fits}")
    return "\n".join(lines)


def _arm_text(run: RunConfig, counts: Sequence[int], expected: Path, device: str | None) -> str:
    scale: TrainScale = run.scale
    if run.arm.training == "full":
        return _full_text(run, counts)
    if scale.sampler != "own":
        return f"    not predicted: sampler is {scale.sampler}, rates are of the suite's own engine"
    shape, memory = shape_of_checkpoint(scale.checkpoint), training_memory(run.arm, scale)
    model = next((name for name, known in SHAPES.items() if known == shape), None)
    measured = None if model is None else measured_rates(model, run.arm, expected, device)
    if measured is None or memory is None:
        return _wrapped(f"not predicted: no blessed step_lengths of {Path(scale.checkpoint).name} "
                        f"in {run.arm.weight_format} with LoRA")  # fmt: skip
    card, updates = smallest_device() or _CARD, scale.updates_per_rollout
    rates, point = _of_run(measured, scale, memory, card.memory_bytes)
    peak = memory.peak(card.memory_bytes)
    on_card = f"{peak / 1e9:>8.1f}" + "  does not fit" * (peak > card.memory_bytes)
    old = f" ({updates - 1}/{updates} forward twice, for old log-probabilities)"
    lines = [
        _wrapped(
            f"{scale.steps} steps, {updates} on each rollout of {point.rows} rows, at most "
            f"{point.slots} at once on a GPU; {point.mean_tokens} tokens a row (assumed; deviation "
            f"half of it, at most {point.completion_tokens}). Seconds of a rollout, its update"
            f"{old * (updates > 1)}, both, and of a step; hours in all; GB a card, for all rows:"
        ),
        "    GPUs   rollout    update      both   waiting efficiency      step     hours      GB",
    ]
    for ranks in counts:
        if ranks > point.prompts:
            lines.append(f"    {ranks:>4}  not possible: a rollout has {point.prompts} prompts")
            continue
        own, share = predicted(rates, point, ranks), _efficiency(rates, point, ranks)
        hours = own.step * -(-scale.steps // updates) / 3600
        cells = (own.rollout, own.update, own.step, own.waiting, share, own.step / updates, hours)
        lines.append(f"    {ranks:>4}" + "".join(f"{cell:>10.2f}" for cell in cells) + on_card)
    draws = run.arm.loss.dynamic_sampling
    drawn = f"; dynamic sampling (1 to {draws} times the rollout)" * (draws > 1)
    sentences = (
        _end_text(rates, point),
        _step_off_text(rates, point, [ranks for ranks in counts if 1 < ranks <= point.prompts]),
        f"From {rates.basis}; memory of {card.name}{among_unlike_devices()}.",
        "Left out: exchanges, below 1 % of a step on two GPUs; questions before and after; groups "
        f"of equal rewards, which only go forward; attention to longer rows than measured{drawn}.",
    )
    return "\n".join([*lines, *(_wrapped(sentence) for sentence in sentences if sentence)])


def _of_run(
    rates: Rates, scale: TrainScale, memory: TrainingMemory, device_bytes: int
) -> tuple[Rates, StepPoint]:
    """Return the rates with a run's own passes, and its rollout; each GPU is sized for all rows."""
    shape, step = memory.step.shape, memory.fitting(device_bytes)
    # Old log-probabilities of all rows but the first step's take what blocks computed again do.
    kept = step.kept_blocks / shape.layers - (1 - 1 / scale.updates_per_rollout)
    mean = min(_MEAN_TOKENS.get(scale.data.source, 300), scale.rollout.max_new_tokens)
    # Among rows of all ages, one's tokens are 5/8 of the mean length (deviation half of it).
    held = 4 * shape.layers * shape.key_size * (_PROMPT_TOKENS / scale.group_size + 5 / 8 * mean)
    point = StepPoint(
        name="planned", model=shape.name, lengths="spread", mean_tokens=mean,
        prompts=scale.prompts_per_rollout, group=scale.group_size, prompt_tokens=_PROMPT_TOKENS,
        completion_tokens=scale.rollout.max_new_tokens,
        slots=max(1, min(memory.step.slots, int(memory.cache(device_bytes) / held))),
    )  # fmt: skip
    return dataclasses.replace(rates, cost=update_cost(kept, step.micro_tokens)), point


def _wrapped(sentence: str, indent: str = "    ") -> str:
    return fill(
        sentence, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _efficiency(rates: Rates, point: StepPoint, ranks: int) -> float:
    """Return the part of one GPU's rate that each of several has."""
    return predicted(rates, point, 1).step / predicted(rates, point, ranks).step / ranks


def _end_text(rates: Rates, point: StepPoint) -> str:
    """Return where scaling ends, and why."""
    counts = range(2, point.prompts + 1)
    halved = next((ranks for ranks in counts if _efficiency(rates, point, ranks) < 0.5), None)
    if halved is None:
        return f"Scaling ends at {point.prompts} GPUs: a rollout has no more prompts to divide."
    longest = fmean(map(max, _drawn(point)))
    return (
        f"From {halved} GPUs on each does less than half of one's work: the longest row's "
        f"{longest:.0f} decode steps take {rates.per_step * longest:.2f} s on any number of them."
    )


def _step_off_text(rates: Rates, point: StepPoint, counts: Sequence[int]) -> str:
    """Return on which numbers of GPUs, two or more, sampling beside the update is worth it."""
    times = {ranks: step_off(rates, point, ranks) for ranks in counts}
    worth = [
        str(ranks)
        for ranks, seconds in times.items()
        if predicted(rates, point, ranks).step >= _WORTH * seconds
    ]
    listed = ", ".join(f"{seconds:.2f} s on {ranks}" for ranks, seconds in times.items())
    gain = f"{100 * _WORTH - 100:.0f} % faster"
    found = f"at least {gain} on {', '.join(worth)}" if worth else f"not {gain} on any"
    ways = "One rollout off, some GPUs sampling while the others update"
    return f"{ways}: {listed}; {found}." if times else ""
