"""Cells and small tables of the report, apart from its prose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from repro.check import Checked
from repro.evidence.paper import paper_cells
from repro.evidence.statistics import mean_interval
from repro.spec.target import Target
from repro.spec.tier import Tier


def number(value: float) -> str:
    """Return a number with three digits or one decimal place, whichever is more."""
    if value == 0 or abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}"


def cell_text(values: Sequence[float], *, n: bool = True) -> str:
    """Return mean, half-width of the 95 % interval and number of seeds; a dash without values."""
    if not values:
        return "-"
    interval = mean_interval(values)
    count = f" (n = {interval.n})" if n else ""
    if interval.high is None:
        return f"{number(interval.value)}{count}"
    half = interval.high - interval.value
    digits = f"{half:.1f}" if abs(interval.value) >= 10 or interval.value == 0 else f"{half:.2g}"
    return f"{number(interval.value)} ± {digits}{count}"


def paper_columns(target: Target, expected: Path) -> dict[str, dict[str, str]]:
    """Return {column: {arm: printed value}} of the paper's table for the target's headline."""
    columns: dict[str, dict[str, str]] = {}
    for cell in paper_cells(expected, target.paper_file):
        if cell.arm and cell.quantity in ("accuracy", "Avg"):
            columns.setdefault(cell.column, {})[cell.arm] = f"{cell.value:g}"
    return columns


def verdict_counts(checked: Checked) -> Counter[str]:
    """Count the claims of a check by verdict."""
    return Counter(
        verdict.status for verdict in checked.verdicts if verdict.about in ("claim", "mechanism")
    )


def results_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return the short results of README: one table a target, then the claims' verdicts."""
    if not checks:
        return ["No records are blessed yet."]
    lines: list[str] = []
    for checked in checks:
        target, tier = checked.selection.target, checked.selection.tier
        if target.headline is None or not checked.evidence.count:
            continue
        values = checked.evidence.values(target.headline)
        columns = paper_columns(target, expected)
        whose = ", tiny policy" if tier is Tier.SMOKE else ""
        heads = [f"paper, {name}" for name in columns] + [f"`{tier.value}` tier{whose}"]
        lines += [f"**{target.title}**, accuracy in percent, mean ± 95 % interval:", ""]
        lines += [f"| arm | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for arm in target.arms:
            printed = [columns[name].get(arm.name, "") for name in columns]
            measured = cell_text(list(values.get(arm.name, {}).values()))
            lines.append(f"| {arm.label} | {' | '.join([*printed, measured])} |")
        lines.append("")
    lines += ["| claim | tier | verdict |", "|---|---|---|"]
    for checked in checks:
        for verdict in checked.verdicts:
            if verdict.about in ("claim", "mechanism"):
                tier_name = checked.selection.tier.value
                lines.append(f"| {verdict.statement} | `{tier_name}` | {verdict.status} |")
    return lines
