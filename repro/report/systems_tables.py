"""Tables of `docs/systems.md`: rollouts, steps and bars, each with the paper's numbers beside.

A column in which every row is empty is left out, so that one layout serves every target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from repro.check import Checked
from repro.evidence.expectation import Expectation
from repro.evidence.paper import paper_cells, read_paper
from repro.evidence.statistics import Interval
from repro.evidence.verdict import Verdict
from repro.report.numbers import bar_rows, bar_text, quantity, stated_bars
from repro.report.systems_rates import Comparison, Rate, against, comparisons, rank_of


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table without the columns in which every row is empty."""
    kept = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    lines = [f"| {' | '.join(heads[place] for place in kept)} |", "|---" * len(kept) + "|"]
    for row in rows:
        cells = [row[place].replace("|", "\\|") for place in kept]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


# Tokens a second from which digits behind the point say nothing.
_WHOLE_FROM = 1000


def rate_table(checked: Checked, expected: Path) -> list[str]:
    """Return a row for each pair of arms, model and place whose rollouts are compared."""
    found = comparisons(checked, expected)
    by_rank = any(rank_of(item.fast.arm) for item in found)
    several = len(against(found)) > 1
    first, second = "QeRL, tokens/s", "16-bit LoRA, tokens/s"
    if several:
        second = "its tokens/s"
    elif found and rank_of(found[0].fast.arm) != rank_of(found[0].slow.arm):
        first, second = "the first's tokens/s", "the second's tokens/s"
    heads = ["model", "rank" if by_rank else "batch", "against", second, "the paper's", "must",
             "verdict", first, "the paper's", "must (goal)", "verdict", "ratio, 95 % interval",
             "the paper's", "asked", "verdict"]  # fmt: skip
    rows = [_rate_row(checked, item, by_rank=by_rank, several=several) for item in found]
    lines = table(heads, rows) + bar_rows(checked, expected)
    return lines + _disagreements(checked, expected)


def _rate_row(checked: Checked, item: Comparison, *, by_rank: bool, several: bool) -> list[str]:
    first, second = rank_of(item.fast.arm), rank_of(item.slow.arm)
    other = checked.selection.target.arm(item.slow.arm).label if several else ""
    return [
        item.model.upper(),
        (f"{first} over {second}" if first != second else f"{first}") if by_rank
        else f"{item.place}",
        other.replace(f", rank {second}", ""),
        *_rate_cells(item.slow),
        *_rate_cells(item.fast),
        _interval(item.ratio),
        "" if item.paper is None else f"{item.paper:.2f} x",
        "" if item.asked is None else f"{item.asked:g} x",
        "" if item.verdict is None else item.verdict.status,
    ]  # fmt: skip


def _rate_cells(rate: Rate) -> list[str]:
    """Return tokens a second, the paper's, the bar and its verdict."""
    low, high, bar = rate.measured.low, rate.measured.high, rate.bar
    mean = rate.measured.value
    half = "" if low is None or high is None else f" ± {(high - low) / 2:.2g}"
    told = f"{mean:,.1f}" if mean < _WHOLE_FROM else f"{mean:,.0f}"
    cells = [told + half, "" if rate.paper is None else f"{rate.paper:,g}"]
    if bar is None:
        return [*cells, "", ""]
    least, goal = bar[0].accept[0], bar[0].goal
    told = "" if least is None else f"{least:,g}"
    return [*cells, told + ("" if goal is None else f" ({goal:,g})"), bar[1].status]


def _interval(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.value:.2f} x"
    return f"{interval.value:.2f} x ({interval.low:.2f} to {interval.high:.2f})"


def step_table(checked: Checked, expected: Path) -> list[str]:
    """Return a row for each point and arm whose step was timed against 16-bit LoRA's."""
    target = checked.selection.target
    bars = _bars(checked, expected)
    printed = {
        (cell.arm, cell.column.lower(), cell.quantity): cell.value
        for cell in paper_cells(expected, target.paper_file)
    }
    rows = []
    for metric in target.metrics:
        match = re.fullmatch(r"speedup_((\d+b)_(?:b(\d+)|\w+))", metric.name)
        for arm, ratios in checked.evidence.values(metric.name).items() if match else ():
            assert match is not None
            point = match[1]
            theirs = printed.get((arm, match[2], f"speedup_batch_{match[3]}"))
            whole, update = ((arm, f"{kind}_{point}") for kind in ("speedup", "update_ratio"))
            rows.append([
                _point_text(point),
                target.arm(arm).label,
                _seconds(checked, f"step_seconds_{point}", arm),
                _seconds(checked, f"step_seconds_{point}", "bf16_lora"),
                f"{median(ratios.values()):.2f} x",
                "" if theirs is None else f"{theirs:g} x",
                *(_bar_cells(bars.get(whole))),
                _ratio(checked, *update),
                *(_bar_cells(bars.get(update))),
                f"{len(ratios)}",
            ])  # fmt: skip
    heads = ["point", "arm", "step", "16-bit LoRA's", "speed-up", "paper's", "bar", "verdict",
             "update's", "bar", "verdict", "steps timed"]  # fmt: skip
    return (table(heads, rows) if rows else []) + bar_rows(checked, expected)


def update_table(checked: Checked, expected: Path) -> list[str]:
    """Return a row for each point and arm whose update was timed against 16-bit LoRA's."""
    target = checked.selection.target
    bars = _bars(checked, expected)
    rows = []
    for metric in target.metrics:
        point = metric.name.removeprefix("update_ratio_")
        found = {} if point == metric.name else checked.evidence.records
        for arm, records in found.items():
            repeats = [value for r in records.values() for value in r.repeats(metric.name)]
            if repeats:
                rows.append([
                    _point_text(point),
                    target.arm(arm).label,
                    _seconds(checked, f"update_seconds_{point}", arm),
                    _seconds(checked, f"update_seconds_{point}", "bf16_lora"),
                    _spread(repeats),
                    *(_bar_cells(bars.get((arm, metric.name)))),
                    f"{len(repeats)}",
                ])  # fmt: skip
    heads = ["point", "arm", "update", "16-bit LoRA's", "ratio (least to most)", "bar", "verdict",
             "updates timed"]  # fmt: skip
    return (table(heads, rows) if rows else []) + bar_rows(checked, expected)


def _spread(values: Sequence[float]) -> str:
    told = f"{median(values):.3f} x"
    return told if len(values) == 1 else f"{told} ({min(values):.3f} to {max(values):.3f})"


def _point_text(point: str) -> str:
    """Return `7B, batch 8` for `7b_b8`, `7B, 16x8` for `7b_16x8`, `3B, batch 8, full` too."""
    model, rest = point.split("_", 1)
    return f"{model.upper()}, {re.sub('^b(?=[0-9])', 'batch ', rest).replace('_', ', ')}"


def _seconds(checked: Checked, metric: str, arm: str) -> str:
    values = checked.evidence.values(metric).get(arm)
    return quantity(median(values.values()), "seconds") if values else ""


def _ratio(checked: Checked, arm: str, metric: str) -> str:
    values = checked.evidence.values(metric).get(arm)
    return f"{median(values.values()):.3f} x" if values else ""


def _bars(checked: Checked, expected: Path) -> dict[tuple[str, str], tuple[Expectation, Verdict]]:
    """Return each stated bar with its verdict, by arm and metric."""
    return {
        (bar.arm, bar.metric): (bar, verdict) for bar, verdict in stated_bars(checked, expected)
    }


def _bar_cells(bar: tuple[Expectation, Verdict] | None) -> tuple[str, str]:
    return ("", "") if bar is None else (bar_text(bar[0], "ratio"), bar[1].status)


def bar_table(checked: Checked, expected: Path) -> list[str]:
    """Return every stated bar with what was measured and the verdict."""
    target = checked.selection.target
    rows = []
    for bar, verdict in stated_bars(checked, expected):
        unit = target.metric(bar.metric).unit
        whose = f"{target.arm(bar.arm).label}: " if len(target.arms) > 1 else ""
        rows.append([
            whose + target.metric(bar.metric).title,
            _quantity(verdict.effect or 0.0, unit),
            bar_text(bar, unit),
            verdict.status,
        ])  # fmt: skip
    return table(["what", "measured", "bar", "verdict"], rows) if rows else []


def _quantity(value: float, unit: str) -> str:
    """Return a value with its unit, those that `quantity` leaves to a table's head included."""
    sign = {"percent": " %", "nats": " nats", "rows": " rows"}.get(unit)
    return quantity(value, unit) if sign is None else f"{value:.4g}{sign}"


def _disagreements(checked: Checked, expected: Path) -> list[str]:
    """Return where the paper's own numbers of this target disagree."""
    name = checked.selection.target.paper_file
    path = expected / "paper" / f"{name}.json"
    if not name or not path.is_file():
        return []
    raw: Mapping[str, Sequence[Mapping[str, object]]] = read_paper(path)[0]
    found = [
        f"printed {item['printed']}, against {item['computed']} ({item['note']})"
        for item in raw.get("contradictions", [])
    ]
    return [f"The paper against itself: {'; '.join(found)}.", ""] if found else []
