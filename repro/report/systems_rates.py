"""Pairs of arms whose rollouts are compared: ours, the paper's, the claimed ratio, the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repro.evidence.estimate import Interval, mean_interval
from repro.evidence.not_run import reason
from repro.evidence.paper import paper_cells
from repro.evidence.verdicts.sizes import Pair
from repro.evidence.verdicts.verdict import Verdict
from repro.judge.check import Checked
from repro.report.numbers import span
from repro.spec.arm import Arm
from repro.spec.claim import Metric
from repro.spec.shapes import SHAPES
from repro.spec.target import Target
from repro.targets.speed import unranked
from repro.targets.table1 import BF16_LORA, NVFP4_LORA


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePair:
    """Two arms at one model and place, and the ratio of their rates, seed by seed.

    Attributes
    ----------
    model, place
        `7b`, and a batch or a LoRA rank.
    fast, slow
        The names of the arms, without their rank.
    ratio
        Geometric mean of fast over slow, with its 95 % interval; of a claim the verdict's, which
        holds together with those of the target's other claims. None where either was not run.
    paper
        The ratio of the paper's two cells, None where it lacks one.
    verdict
        The claim's or the bar's verdict; None where there is none.
    """

    model: str
    place: int
    fast: str
    slow: str
    ratio: Interval | None
    paper: float | None
    verdict: Verdict | None


def measured_rates(checked: Checked) -> Iterator[tuple[str, int, str, Mapping[Pair, float]]]:
    """Yield (model, batch, arm, values) of each rate of a check that was measured."""
    for metric in rates_of(checked.selection.target).values():
        for arm, values in checked.evidence.values(metric.name).items():
            yield metric.model, metric.batch, arm, values


def rates_of(target: Target) -> dict[str, Metric]:
    """Return the metrics of a target that are rates of rollouts, by name."""
    return {metric.name: metric for metric in target.metrics if metric.quantity == "rollout"}


def comparisons(checked: Checked, expected: Path) -> list[RatePair]:
    """Return the claimed ratios of a check's rollouts, and those of cells without a claim.

    Without a claim, QeRL is compared with 16-bit LoRA at each batch that was measured.
    """
    target = checked.selection.target
    printed = printed_rates(target, expected)
    verdicts = {item.name: item for item in checked.verdicts}
    rates = rates_of(target)
    claims = [claim for claim in target.claims if claim.metric in rates]
    pairs = [_pair(checked, c.arms, rates[c.metric], printed, verdicts[c.name]) for c in claims]
    claimed = {claim.metric for claim in claims}
    bare = [metric for name, metric in rates.items() if name not in claimed]
    pairs += [_pair(checked, (NVFP4_LORA.name, BF16_LORA.name), one, printed) for one in bare]
    measured = [item for item in pairs if item is not None]
    return sorted(measured, key=lambda item: ([*SHAPES].index(item.model), item.place))


def _pair(
    checked: Checked,
    arms: Sequence[str],
    metric: Metric,
    printed: Mapping[tuple[str, str], float],
    verdict: Verdict | None = None,
) -> RatePair | None:
    values = checked.evidence.values(metric.name)
    absent = [arm for arm in arms if not values.get(arm)]
    reasons = [absent_because(checked, arm, metric.name) for arm in absent]
    if len(absent) == len(arms) or not all(reasons):
        return None
    fast, slow = (values.get(arm, {}) for arm in arms)
    logs = [math.log(fast[seed] / slow[seed]) for seed in sorted(fast) if seed in slow]
    if not (logs or absent):
        return None
    compared = [checked.selection.target.arm(arm) for arm in arms]
    names = [unranked(arm) for arm in compared]
    cells = [printed.get(place_in_paper(metric, arm)) for arm in compared]
    return RatePair(
        model=metric.model,
        place=metric.batch if names[0] == arms[0] else compared[0].lora_rank,
        fast=names[0],
        slow=names[1],
        ratio=_ratio(logs, verdict) if logs else None,
        paper=cells[0] / cells[1] if cells[0] and cells[1] else None,
        verdict=verdict,
    )


def place_in_paper(metric: Metric, arm: Arm) -> tuple[str, str]:
    """Return the paper's column, `7b batch 8` or `7b rank 16`, and arm, by whatever products."""
    name = unranked(arm)
    point = metric.point if name == arm.name else f"rank {arm.lora_rank}"
    return f"{metric.model} {point}", name.removesuffix("_bitsandbytes")


def absent_because(checked: Checked, arm: str, metric: str) -> str:
    """Return why the records of an arm have no such rate, empty where they do not say."""
    records = checked.evidence.records.get(arm, {}).values()
    reasons = (reason(record, metric) for record in records)
    return next((words for words in reasons if words), "").partition(": ")[2]


def _ratio(logs: Sequence[float], verdict: Verdict | None) -> Interval:
    """Return the geometric mean with its verdict's interval, or its own without a verdict's."""
    interval = mean_interval(logs)
    low, high = (None if end is None else math.exp(end) for end in (interval.low, interval.high))
    if verdict is not None and verdict.low is not None:
        low, high = verdict.low, verdict.high
    return Interval(value=math.exp(interval.value), low=low, high=high, n=interval.n)


def printed_rates(target: Target, expected: Path) -> dict[tuple[str, str], float]:
    """Return the paper's {(`7b batch 8` or `7b rank 16`, arm): tokens per second} of a target."""
    return {
        (cell.column.lower(), cell.arm): cell.value
        for cell in paper_cells(expected, target.paper_file)
        if cell.quantity == "rollout"
    }


def printed_speedup(metric: Metric, arm: str, paper_file: str, expected: Path) -> float | None:
    """Return the paper's speed-up of an arm's step, None where its file has none of the metric."""
    cells = paper_cells(expected, paper_file) if metric.quantity == "speedup" else ()
    printed = {(cell.arm, cell.column.lower(), cell.quantity): cell.value for cell in cells}
    return printed.get((arm, metric.model, f"speedup_{metric.point.replace(' ', '_')}"))


def ratio_span(pairs: Sequence[RatePair]) -> str:
    """Return the span of the measured ratios, as `span` does."""
    return span(item.ratio.value for item in pairs if item.ratio is not None)
