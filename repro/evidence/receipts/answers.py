"""Receipts of answers: all that a run must ask was asked, and nearly all of it could be graded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from repro.evidence.derived import set_names
from repro.evidence.receipts.required import TRAINED
from repro.evidence.record import Record
from repro.spec.claim import Metric

# Of a set's problems, those whose gold could not be read or whose grader failed.
DROPPED_MOST = 0.01


def units(record: Record, metrics: Mapping[str, Metric]) -> Iterator[str]:
    """Yield which numbers are not finite, not of their metric's unit, or beyond its bounds."""
    for name, estimate in record.metrics.items():
        metric = metrics.get(name)
        value, low = estimate.value, -100 if metric is not None and metric.change else 0
        if metric is not None and estimate.unit != metric.unit:
            yield f"metrics.{name}.unit is {estimate.unit!r}; the target's is {metric.unit!r}"
        if value is None:
            yield f"metric {name} is not a finite number"
        elif estimate.unit == "percent" and not low - 1e-9 <= value <= 100 + 1e-9:
            yield f"metric {name} is {value} percent; it must lie between {low} and 100"


def answers(record: Record) -> Iterator[str]:
    """Yield which questions were not asked, or of how many too few could be graded."""
    scale, tallies = record.config["scale"], record.effects.get("answers")
    if tallies is None and "answers" in record.effects.get("not_kept", ()):
        return
    if tallies is None:
        yield "effects.answers is missing: nothing shows the grades behind the accuracies"
        return
    for name in _asked(record):
        if name not in tallies:
            yield f"effects.answers.{name} is missing"
    sets = set_names(scale)
    for name, tally in tallies.items():
        problems, dropped = sum(tally["right"]), tally["dropped"]
        if not problems or dropped > DROPPED_MOST * (problems + dropped):
            yield f"effects.answers.{name}.dropped is {dropped} beside {problems} graded"
        if any(sum(tally[part]) != problems for part in ("right_lenient", "format", "truncated")):
            yield f"effects.answers.{name} counts different problems in its parts"
        data = [sets[name]] if name in sets else [*sets.values()] if _over_sets(record) else []
        yield from _of_all(name, problems + dropped, data or [scale["data"]])


def _of_all(name: str, count: int, data: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield why a set is not as large as the scale says: exactly so where problems are made."""
    sizes = [int(one["test_problems"]) for one in data]
    made = len(data) == 1 and str(data[0]["source"]).startswith("generated")
    if all(sizes) and (count > sum(sizes) or (made and count != sum(sizes))):
        yield f"effects.answers.{name} has {count} problems; the scale asks {sum(sizes)}"


def _over_sets(record: Record) -> bool:
    """Whether the accuracy is a mean over further sets, so that it is not asked for alone."""
    return bool(record.config["scale"].get("accuracy_over") == "sets")


def _asked(record: Record) -> list[str]:
    """Return the names of the accuracies for which a run of its configuration asks questions."""
    left_out = {f"accuracy_{name}" for name in record.effects.get("test_sets_left_out") or ()}
    names = [] if _over_sets(record) else ["accuracy"]
    names += ["accuracy_greedy", *(["accuracy_greedy_start"] * (record.procedure in TRAINED))]
    return names + [name for name in set_names(record.config["scale"]) if name not in left_out]


def grades(record: Record) -> Iterator[str]:
    """Yield why too many grades were dropped or given too late."""
    given = record.effects.get("grades")
    if not given:
        yield "effects.grades is missing: nothing shows that answers were graded"
        return
    total, late = sum(given.values()), given.get("timeout", 0)
    dropped = given.get("unparsable_gold", 0) + given.get("error", 0)
    if dropped > DROPPED_MOST * total:
        yield f"effects.grades: {dropped} of {total} were dropped; at most 1 % may be"
    if late > DROPPED_MOST * total:
        yield f"effects.grades: {late} of {total} were over the time limit; at most 1 % may be"
