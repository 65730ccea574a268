"""Rows of values, old against new, as sentences."""

from __future__ import annotations

from collections.abc import Sequence

from repro.judge.as_before import Comparison, MetricRow
from repro.report.numbers import quantity


def as_before_lines(compared: Comparison | None) -> list[str]:
    """Return how many values are as they were blessed, then a line for each that is not.

    Unclear ones are only counted. Without values, the first reason why none was compared.
    """
    if compared is None:
        return []
    counts = [f"{count} {verdict}" for verdict, count in compared.counts().items()]
    n = "1 value" if len(compared.rows) == 1 else f"{len(compared.rows)} values"
    if not counts:
        return [f"no value is compared with blessed ones: {compared.problems[0]}"]
    if len(counts) == 1:
        return [f"{n} {compared.rows[0].verdict} since blessed"]
    shown = [row for row in compared.rows if row.verdict not in ("unclear", "unchanged")]
    return [f"{n} compared with blessed ones: {', '.join(counts)}", *map(row_text, shown)]


def row_text(row: MetricRow) -> str:
    """Return a row as a sentence."""
    return (
        f"{row.verdict}: {row.target} {row.arm} {row.metric} {_mean(row.old, row)} -> "
        f"{_mean(row.new, row)}, {change_text(row)} ({_because(row)})"
    )


def _mean(values: Sequence[float], row: MetricRow) -> str:
    return quantity(sum(values) / len(values), row.unit)


def change_text(row: MetricRow) -> str:
    """Return the change, in percent where it is relative."""
    return f"{_change(row.change, row)} {_change_unit(row)}"


def _because(row: MetricRow) -> str:
    threshold = f"threshold {_change(row.threshold, row).lstrip('+')} {_change_unit(row)}"
    n = f"n = {len(row.old)} and {len(row.new)}"
    if row.low is None or row.high is None:
        return f"{row.better} is better; too few values for an interval, {n}; {threshold}"
    interval = f"95 % interval {_change(row.low, row)} to {_change(row.high, row)}"
    return f"{row.better} is better; {interval}, {n}; {threshold}"


def _change(value: float, row: MetricRow) -> str:
    return f"{100 * value:+.1f}" if row.relative else f"{value:+.3g}"


def _change_unit(row: MetricRow) -> str:
    if row.relative:
        return "%"
    return "points" if row.unit == "percent" else row.unit
