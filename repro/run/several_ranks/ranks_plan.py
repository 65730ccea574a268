"""What a step takes on several GPUs, before any is rented: `plan --ranks 1,2,4,8`.

From the blessed phases of one GPU (`step_lengths`: rows of equal and of spread lengths) follow two
rates. A decode step costs a part whatever it holds and a part per row that it holds::

    rollout = per_step * longest row + per_token * tokens of all rows

The two points of a model have the same tokens and different longest rows, which gives both rates.
The update goes by tokens. Ranks meet after sampling, so that each waits for the longest row of
all; the adapter's gradient is added up once a step. How fast links are is measured nowhere yet:
the rates are their makers' and the text says so.
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
from repro.run.disk import size
from repro.run.preflight import memory_of
from repro.spec.arm import Arm, require
from repro.spec.config import RunConfig, TrainScale
from repro.spec.shapes import SHAPES, DecoderShape, shape_of_checkpoint
from repro.spec.step_scale import StepPoint
from repro.spec.tier import Tier

# Bytes per second of adding up, in a host of NVLinks and for each GPU between hosts of eight.
_IN_HOST, _BETWEEN_HOSTS, _HOST_GPUS = 350e9, 45e9, 8
_DRAWS = 20
# Where another GPU's gain ends: a step on all is no better used than this.
_WORTH = 0.7
# As much sooner as one sampling a step ahead must be, to be worth a second policy.
_AHEAD = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one GPU, seconds.

    Attributes
    ----------
    per_step, per_token
        Of a decode step, and of each token that rows take in it.
    per_update_token
        Of a token, of prompt or completion, in the update.
    fixed
        What a step takes beside both: rewards, optimiser, waiting.
    basis
        What was measured, and where.
    """

    per_step: float
    per_token: float
    per_update_token: float
    fixed: float
    basis: str

    def rollout(self, lengths: Sequence[int]) -> float:
        """Return the seconds of sampling rows of these lengths together."""
        return self.per_step * max(lengths, default=0) + self.per_token * sum(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A step on so many GPUs, seconds; `idle` is what the mean rank waits for the last one."""

    ranks: int
    rollout: float
    update: float
    exchange: float
    idle: float
    fixed: float
    ahead: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.rollout + self.update + self.exchange + self.fixed


def parse_ranks(text: str) -> list[int]:
    """Return numbers of ranks, as `1,2,4` gives them."""
    parts = [part.strip() for part in text.split(",")]
    require(
        all(part.isdigit() and int(part) > 0 for part in parts),
        f"--ranks {text}: needs numbers such as 1,2,4",
    )
    return sorted({int(part) for part in parts})


def ranks_text(runs: Sequence[RunConfig], counts: Sequence[int], expected: Path) -> str:
    """Return, per arm that trains, what its step takes on each number of GPUs."""
    texts = []
    arms = {run.arm.name: run for run in runs if isinstance(run.scale, TrainScale)}
    for name, run in arms.items():
        if run.procedure == "evaluate":
            continue
        shape = shape_of_checkpoint(run.scale.checkpoint)
        rates = None if shape is None else measured_rates(shape, run.arm, expected)
        if shape is None or rates is None:
            model = Path(run.scale.checkpoint).name
            texts.append(f"  {name}: not predicted: no blessed step_lengths of {model} in "
                         f"{run.arm.weight_format} with LoRA")  # fmt: skip
            continue
        texts.append(_arm_text(run, shape, rates, counts))
    return "\n".join(texts) or "  nothing here trains"


def measured_rates(shape: DecoderShape, arm: Arm, expected: Path) -> Rates | None:
    """Return the rates of a model in an arm's format from blessed records, None without any."""
    model = next((name for name, known in SHAPES.items() if known == shape), None)
    if model is None or arm.training != "lora":
        return None
    for record in blessed_records(expected, Tier.SYSTEMS, "step_lengths"):
        if record.arm == f"{arm.weight_format}_lora":
            return _rates_of(record, model)
    return None


def _rates_of(record: Record, model: str) -> Rates | None:
    prefix = model.replace(".", "_")
    points = {point["name"]: point for point in record.config["scale"]["points"]}
    names = f"{prefix}_spread", f"{prefix}_equal"
    if not all(f"step_seconds_{name}" in record.metrics for name in names):
        return None

    def seconds(phase: str, name: str) -> float:
        return record.value(f"{phase}_seconds_{name}") or 0.0

    spread, equal = names
    point = StepPoint(**points[spread])
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


def predicted(
    rates: Rates, shape: DecoderShape, arm: Arm, point: StepPoint, ranks: int
) -> Predicted:
    """Return what a step of a point's rows takes; prompts go to ranks as they do in training."""
    rollouts, idles, updates, aheads = [], [], [], []
    for seed in range(_DRAWS):
        lengths = point.drawn_lengths(seed)
        groups = [lengths[p * point.group : (p + 1) * point.group] for p in range(point.prompts)]
        each = [rates.rollout([*chain(*groups[rank::ranks])]) for rank in range(ranks)]
        tokens = sum(lengths) + point.rows * point.prompt_tokens
        rollouts.append(max(each))
        idles.append(max(each) - fmean(each))
        updates.append(rates.per_update_token * tokens / ranks)
        aheads.append(_ahead(rates, groups, updates[-1] * ranks, ranks))
    nbytes = 4 * shape.adapter_parameters(arm.lora_rank)
    exchange = 0.0 if ranks == 1 else 2 * nbytes / _IN_HOST
    if ranks > _HOST_GPUS:
        exchange += 2 * nbytes / (_HOST_GPUS * _BETWEEN_HOSTS)
    return Predicted(
        ranks=ranks,
        rollout=fmean(rollouts),
        update=fmean(updates),
        exchange=exchange,
        idle=fmean(idles),
        fixed=rates.fixed,
        ahead=fmean(aheads) + rates.fixed,
    )


def _ahead(rates: Rates, groups: Sequence[list[int]], update: float, ranks: int) -> float:
    """Return the step where some GPUs sample while the others update, as well split as can be."""
    best = float("inf")
    for sampling in range(1, ranks):
        own = (rates.rollout([*chain(*groups[rank::sampling])]) for rank in range(sampling))
        best = min(best, max(*own, update / (ranks - sampling)))
    return best


def _arm_text(run: RunConfig, shape: DecoderShape, rates: Rates, counts: Sequence[int]) -> str:
    scale: TrainScale = run.scale
    basis = StepPoint(name="planned", model="7b", lengths="spread", prompt_tokens=150)
    point = dataclasses.replace(
        basis,
        prompts=scale.prompts_per_rollout,
        group=scale.group_size,
        completion_tokens=scale.rollout.max_new_tokens,
        mean_tokens=min(basis.mean_tokens, scale.rollout.max_new_tokens),
    )
    alone = predicted(rates, shape, run.arm, point, 1)
    every = [
        predicted(rates, shape, run.arm, point, ranks)
        for ranks in counts
        if ranks <= scale.prompts_per_rollout
    ]
    gradient = 4 * shape.adapter_parameters(run.arm.lora_rank)
    memory = memory_of(run.arm, scale)[0]
    lines = [
        f"  {run.arm.name}: {point.rows} rows a step, {point.mean_tokens} tokens each on average "
        f"(deviation half of it, at most {point.completion_tokens})",
        "    GPUs  step s  rollout  update  exchange  waiting  efficiency  memory a GPU",
    ]
    for one in every:
        efficiency = alone.step / one.step / one.ranks
        room = memory + (gradient if one.ranks > 1 else 0)
        lines.append(
            f"    {one.ranks:>4}  {one.step:>6.2f}  {one.rollout:>7.2f}  {one.update:>6.2f}  "
            f"{one.exchange:>8.4f}  {one.idle:>7.2f}  {efficiency:>10.2f}  {size(room):>12}"
        )
    left_out = [str(ranks) for ranks in counts if ranks > scale.prompts_per_rollout]
    if left_out:
        lines.append(f"    not {', '.join(left_out)}: a rollout has {point.prompts} prompts")
    lines += [f"    {_ends(alone, every)}", f"    {_said_of_ahead(every)}"]
    return "\n".join([
        *lines,
        f"    from {rates.basis}; links are not measured: exchange at {_IN_HOST / 1e9:.0f} GB/s in "
        f"a host and {_BETWEEN_HOSTS / 1e9:.0f} a GPU between hosts of {_HOST_GPUS}",
    ])  # fmt: skip


def _ends(alone: Predicted, every: Sequence[Predicted]) -> str:
    """Return a sentence on where further GPUs gain little, and why."""
    poor = [one for one in every if alone.step / one.step / one.ranks < _WORTH]
    if not poor:
        return f"Every number shown is used to {100 * _WORTH:.0f} % or better."
    first = poor[0]
    parts = {
        "the longest row, for which a rollout lasts however few rows a GPU has": first.rollout
        - alone.rollout / first.ranks,
        "what a step takes beside rollout and update": first.fixed,
        "adding up the gradient": first.exchange,
    }
    return f"Scaling ends before {first.ranks} GPUs: by {max(parts, key=lambda k: parts[k])}."


def _said_of_ahead(every: Sequence[Predicted]) -> str:
    """Return a sentence on sampling one step ahead on some of the GPUs."""
    gains = {one.ranks: one.step / one.ahead for one in every if one.ranks > 1}
    if not gains:
        return "Sampling a step ahead on other GPUs needs two."
    best = max(gains, key=lambda ranks: gains[ranks])
    worth = "" if gains[best] >= _AHEAD else f", less than the {100 * (_AHEAD - 1):.0f} % needed"
    return (
        f"Sampling a step ahead on some of the GPUs would take {gains[best]:.2f} times less at "
        f"{best}{worth}."
    )
