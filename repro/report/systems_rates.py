"""Pairs of arms whose rollouts are compared: ours, the paper's, the claimed ratio, the verdict."""

from __future__ import annotations

import math
import re
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
from repro.spec.target import Target
from repro.targets.table1 import BF16_LORA, NVFP4_LORA

RATE = re.compile(r"tokens_per_second_(\d+b)_(\d+)")
_SPEEDUP = re.compile(r"speedup_(\d+b)_b(\d+)")
_CELL = re.compile(r"(\d+B) (batch|rank) (\d+)")
RANK = re.compile(r"_r(\d+)(?=_|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePair:
    """Two arms at one model and place, and the ratio of their rates, seed by seed.

    Attributes
    ----------
    model, place
        `7b`, and a batch or a LoRA rank.
    fast, slow
        The names of the arms.
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
    for metric in checked.selection.target.metrics:
        if match := RATE.fullmatch(metric.name):
            for arm, values in checked.evidence.values(metric.name).items():
                yield match[1], int(match[2]), arm, values


def comparisons(checked: Checked, expected: Path) -> list[RatePair]:
    """Return the claimed ratios of a check's rollouts, and those of cells without a claim.

    Without a claim, QeRL is compared with 16-bit LoRA at each batch that was measured.
    """
    target = checked.selection.target
    printed = printed_rates(target, expected)
    verdicts = {item.name: item for item in checked.verdicts}
    claims = [claim for claim in target.claims if RATE.fullmatch(claim.metric)]
    pairs = [
        _pair(checked, claim.arms, claim.metric, printed, verdicts[claim.name]) for claim in claims
    ]
    claimed = {claim.metric for claim in claims}
    pairs += [
        _pair(checked, (NVFP4_LORA.name, BF16_LORA.name), metric.name, printed)
        for metric in target.metrics
        if RATE.fullmatch(metric.name) and metric.name not in claimed
    ]
    measured = [item for item in pairs if item is not None]
    return sorted(measured, key=lambda item: (int(item.model.rstrip("b")), item.place))


def _pair(
    checked: Checked,
    arms: Sequence[str],
    metric: str,
    printed: Mapping[tuple[str, str, int], float],
    verdict: Verdict | None = None,
) -> RatePair | None:
    match, values = RATE.fullmatch(metric), checked.evidence.values(metric)
    absent = [arm for arm in arms if not values.get(arm)]
    reasons = [absent_because(checked, arm, metric) for arm in absent]
    if match is None or len(absent) == len(arms) or not all(reasons):
        return None
    fast, slow = (values.get(arm, {}) for arm in arms)
    logs = [math.log(fast[seed] / slow[seed]) for seed in sorted(fast) if seed in slow]
    if not (logs or absent):
        return None
    rank = RANK.search(arms[0])
    place = int(rank[1] if rank else match[2])
    # The paper's row is the same by whatever products.
    rows = [RANK.sub("", arm).removesuffix("_bitsandbytes") for arm in arms]
    cells = [printed.get((match[1], row, place)) for row in rows]
    return RatePair(
        model=match[1],
        place=place,
        fast=arms[0],
        slow=arms[1],
        ratio=_ratio(logs, verdict) if logs else None,
        paper=cells[0] / cells[1] if cells[0] and cells[1] else None,
        verdict=verdict,
    )


def absent_because(checked: Checked, arm: str, metric: str) -> str:
    """Return why the records of an arm have no such rate, empty where they do not say."""
    records = checked.evidence.records.get(arm, {}).values()
    reasons = (reason(record, metric) for record in records)
    sentence = next((words for words in reasons if words), "")
    return sentence.partition(": ")[2]


def _ratio(logs: Sequence[float], verdict: Verdict | None) -> Interval:
    """Return the geometric mean with its verdict's interval, or its own without a verdict's."""
    interval = mean_interval(logs)
    low, high = (None if end is None else math.exp(end) for end in (interval.low, interval.high))
    if verdict is not None and verdict.low is not None:
        low, high = verdict.low, verdict.high
    return Interval(value=math.exp(interval.value), low=low, high=high, n=interval.n)


def printed_rates(target: Target, expected: Path) -> dict[tuple[str, str, int], float]:
    """Return the paper's {(model, arm, batch or rank): tokens per second} of a target."""
    return {
        (match[1].lower(), cell.arm, int(match[3])): cell.value
        for cell in paper_cells(expected, target.paper_file)
        if cell.quantity == "rollout" and cell.arm and (match := _CELL.fullmatch(cell.column))
    }


def printed_speedup(metric: str, arm: str, paper_file: str, expected: Path) -> float | None:
    """Return the paper's speed-up of an arm's step, None where its file has none of the metric."""
    match = _SPEEDUP.fullmatch(metric)
    cells = paper_cells(expected, paper_file) if match else ()
    printed = {(cell.arm, cell.column.lower(), cell.quantity): cell.value for cell in cells}
    return printed.get((arm, match[1], f"speedup_batch_{match[2]}")) if match else None


def ratio_span(pairs: Sequence[RatePair]) -> str:
    """Return the span of the measured ratios, as `span` does."""
    return span(item.ratio.value for item in pairs if item.ratio is not None)
