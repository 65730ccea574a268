"""Cells and small tables of the report, apart from its prose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from repro.check import Checked, device_name
from repro.evidence.expectation import Expectation, load_expectations
from repro.evidence.paper import paper_cells
from repro.evidence.statistics import mean_interval
from repro.evidence.verdict import Verdict
from repro.spec.target import Target
from repro.spec.tier import Tier


def number(value: float) -> str:
    """Return a number with three digits or one decimal place, whichever is more."""
    if value == 0 or abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}"


# The source of claims that are not the paper's.
OWN_BAR = "this suite's bar"

# What a unit is printed in: its sign, and how many of its own make one.
_PRINTED = {
    "bytes": ("GiB", 2.0**30),
    "seconds": ("s", 1.0),
    "tokens per second": ("tokens/s", 1.0),
    "ratio": ("x", 1.0),
}
_IN_WORDS = {"bytes": "in GiB", "seconds": "in seconds", "ratio": "as a ratio"}


def quantity(value: float, unit: str) -> str:
    """Return a value with its unit as people say it: `32.9 GiB (35.3 GB)`, `9.81 s`, `412 ms`.

    Units whose tables name them once (percent, points, nats, reward) are left out.
    """
    if unit == "seconds" and 0 < abs(value) < 0.1:
        return f"{number(value * 1e3)} ms"
    if unit == "bytes" and abs(value) < 2**20:
        return f"{value:.0f} B"
    if unit == "bytes":
        return f"{number(value / 2**30)} GiB ({number(value / 1e9)} GB)"
    if unit == "tokens per second":
        return f"{value:,.0f} tokens/s"
    sign = _PRINTED.get(unit, ("", 1.0))[0]
    return f"{number(value)} {sign}".strip()


def unit_words(unit: str) -> str:
    """Return how a heading says a unit: `in percent`, `in GiB`, `as a ratio`."""
    return _IN_WORDS.get(unit, f"in {unit}")


def cell_text(values: Sequence[float], *, n: bool = True, unit: str = "") -> str:
    """Return mean, half-width of the 95 % interval and number of seeds; a dash without values."""
    if not values:
        return "-"
    interval = mean_interval(values)
    count = f" (n = {interval.n})" if n else ""
    if interval.high is None:
        return f"{quantity(interval.value, unit)}{count}"
    sign, size = _PRINTED.get(unit, ("", 1.0))
    mean, half = interval.value / size, (interval.high - interval.value) / size
    digits = f"{half:.1f}" if abs(mean) >= 10 or mean == 0 else f"{half:.2g}"
    return f"{number(mean)} ± {digits}{' ' + sign if sign else ''}{count}"


def paper_columns(target: Target, expected: Path) -> dict[str, dict[str, str]]:
    """Return {column: {arm: printed value}} of the paper's table for the target's headline."""
    columns: dict[str, dict[str, str]] = {}
    for cell in paper_cells(expected, target.paper_file):
        if cell.arm and cell.quantity in ("accuracy", "Avg"):
            columns.setdefault(cell.column, {})[cell.arm] = f"{cell.value:g}"
    return columns


def origin_text(checked: Checked) -> str:
    """Return what the records of a check are: runs, command, device, commits, dates, file."""
    records = [r for by_seed in checked.evidence.records.values() for r in by_seed.values()]
    runs = min(len(by_seed) for by_seed in checked.evidence.records.values())
    commits = " and ".join(sorted({f"`{record.commit[:7]}`" for record in records}))
    dates = " to ".join(sorted({record.finished[:10] for record in records}))
    device, name = device_name(checked.evidence), checked.selection.source.name
    tier = checked.selection.tier.value
    what = "One run" if runs == 1 else f"Means of {runs} runs"
    return (
        f"{what} an arm of `python -m repro run {name} --tier {tier}` on one "
        f"{(device or '').replace('_', ' ').upper()} (commit {commits}, {dates}; "
        f"`expected/{tier}/{device}/{name}.records.json`)."
    )


def verdict_counts(checked: Checked) -> Counter[str]:
    """Count the claims of a check by verdict."""
    return Counter(
        verdict.status for verdict in checked.verdicts if verdict.about in ("claim", "mechanism")
    )


def stated_bars(checked: Checked, expected: Path) -> list[tuple[Expectation, Verdict]]:
    """Return the stated bars of a check that were measured, each with its verdict.

    Stated are expectations with a reason of their own (`derived`), as against those that were
    blessed from earlier records and may be of the same arm and metric. The smoke tier's are about
    its machinery and are left out.
    """
    target, tier = checked.selection.target, checked.selection.tier
    if tier is Tier.SMOKE:
        return []
    # A verdict's source tells a stated bar from a blessed value of the same name.
    verdicts = {(item.name, item.source): item for item in checked.verdicts}
    found = []
    for bar in load_expectations(expected, tier.value, target.name):
        verdict = verdicts.get((f"{bar.arm}.{bar.metric}", f"{bar.source}: {bar.because}"))
        if bar.source == "derived" and verdict is not None and verdict.effect is not None:
            found.append((bar, verdict))
    return found


def bar_rows(checked: Checked, expected: Path) -> list[str]:
    """Return how many of a check's stated bars hold, and a table of those missed; empty if none."""
    target = checked.selection.target
    bars = stated_bars(checked, expected)
    if not bars:
        return []
    counts = Counter(verdict.status for _, verdict in bars)
    told = (
        f"Of {len(bars)} bars that this suite states, {counts['reproduced']} hold, "
        f"{counts['inconclusive']} are undecided and {counts['contradicted']} are missed"
    )
    missed = [(bar, verdict) for bar, verdict in bars if verdict.status == "contradicted"]
    if not missed:
        return [f"{told}.", ""]
    lines = [f"{told}:", "", "| missed | bar | measured |", "|---|---|---|"]
    for bar, verdict in missed:
        metric = target.metric(bar.metric)
        measured = quantity(verdict.effect or 0.0, metric.unit)
        if bar.holds(verdict.effect or 0.0):  # Of its values one missed it, and not their mean.
            measured += f" on average; {verdict.sentence}"
        what = f"{target.arm(bar.arm).label}: {metric.title}"
        lines.append(f"| {what} | {bar_text(bar, metric.unit)} | {measured} |")
    return [*lines, ""]


def bar_text(bar: Expectation, unit: str) -> str:
    """Return the accepted interval of a bar in words: `at least 1.5 x`."""
    low, high = bar.accept
    if low is None:
        return f"at most {quantity(high or 0.0, unit)}"
    if high is None:
        return f"at least {quantity(low, unit)}"
    if low == high:
        return f"exactly {quantity(low, unit)}"
    return f"{quantity(low, unit)} to {quantity(high, unit)}"
