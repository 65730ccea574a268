"""Markdown tables, with any number of devices in adjacent columns.

A column in which every row is empty is left out, so that one layout serves every target.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from repro.evidence.origins import named_commits
from repro.evidence.paper import paper_cells
from repro.evidence.printable import without_controls
from repro.judge.check import Checked, device_name
from repro.report.numbers import bar_text, cell_text, device_heads, device_title, quantity
from repro.report.verdict_words import Bar, labelled, stated_bars
from repro.spec.target import Metric, Target

# A row: the cells that all devices share, which name it, and those of one device.
Line = tuple[tuple[str, ...], tuple[str, ...]]
NOTHING = ["No records are blessed yet."]
# What HTML takes for the beginning of a tag; `p < 0.001` has none.
_TAG = re.compile("<(?=[A-Za-z/!?])")


def in_cell(text: str) -> str:
    """Return a text as a cell of a Markdown table takes it."""
    return text.replace("|", "\\|").replace("\n", " ")


def plain(text: str) -> str:
    """Return a text that a record may hold so that a page shows it as text: no tags of HTML."""
    return _TAG.sub("&lt;", without_controls(text))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table without the columns in which every row is empty; nothing without rows."""
    cells = [[in_cell(cell) for cell in row] for row in rows]
    used = [place for place in range(len(heads)) if any(row[place] for row in cells)]
    lines = [[heads[place] for place in used], *([row[place] for place in used] for row in cells)]
    written = [f"| {' | '.join(line)} |" for line in lines]
    return [written[0], "|---" * len(used) + "|", *written[1:], ""] if cells else []


def side_by_side(
    heads: Sequence[str],
    own_heads: Sequence[str],
    parts: Mapping[str, Sequence[Line]],
) -> list[str]:
    """Return one table of the lines of each device, joined where their shared cells agree.

    Raises `ValueError` if two lines of a device have the same shared cells: one would hide the
    other.

    Parameters
    ----------
    own_heads
        Heads of a device's own columns, which of several devices name it.
    """
    rows: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
    for device, lines in parts.items():
        for common, own in lines:
            if device in rows.setdefault(common, {}):
                raise ValueError(f"two rows of {device_title(device)} are both {common}")
            rows[common][device] = own
    names = device_heads(parts)
    behind = {device: f", {name}" if len(parts) > 1 else "" for device, name in names.items()}
    empty = ("",) * len(own_heads)
    return table(
        [*heads, *(head + behind[device] for device in parts for head in own_heads)],
        [
            [*common, *(cell for device in parts for cell in own.get(device, empty))]
            for common, own in rows.items()
        ],
    )


def by_device(checks: Iterable[Checked]) -> dict[str, list[Checked]]:
    """Return the checks that have records, by their device."""
    devices: dict[str, list[Checked]] = {}
    for checked in checks:
        if checked.evidence.count:
            devices.setdefault(device_of(checked), []).append(checked)
    return devices


def device_of(checked: Checked) -> str:
    """Return the device of a check's records as folders spell it, empty where they name none."""
    return device_name(checked.evidence) or ""


def origin_text(checked: Checked) -> str:
    """Return the origin of a check's records: runs, command, device, commits, dates."""
    records = checked.evidence.every_record()
    runs = min(len(by_seed) for by_seed in checked.evidence.records.values())
    commits = " and ".join(named_commits(records, 7, "`{}`"))
    dates = " to ".join(sorted({record.finished[:10] for record in records}))
    device, name = device_of(checked), checked.selection.source.name
    tier = checked.selection.tier.value
    cards = max(record.facts.get("ranks", 1) for record in records)
    what = "One run" if runs == 1 else f"Means of {runs} runs"
    return (
        f"{what} per arm of `python -m repro run {name} --tier {tier}` on "
        f"{'one' if cards == 1 else cards} {device_title(device)} ({commits}, {dates})."
    )


def paper_columns(target: Target, expected: Path) -> dict[str, dict[str, str]]:
    """Return {column: {arm: printed value}} of the paper's table for the target's headline."""
    columns: dict[str, dict[str, str]] = {}
    for cell in paper_cells(expected, target.paper_file):
        if cell.arm and cell.quantity in ("accuracy", "Avg"):
            columns.setdefault(cell.column, {})[cell.arm] = f"{cell.value:g}"
    return columns


def arms_table(
    target: Target,
    printed: Mapping[str, Mapping[str, str]],
    measured: Sequence[tuple[str, Checked, Metric]],
    *,
    n: bool = True,
) -> list[str]:
    """Return a row per arm: the paper's columns, then one per metric of a check.

    `printed` has {column: {arm: value}}, `measured` the (head, check, metric) of each column. A
    cell is the mean with its 95 % interval and, with `n`, the number of seeds.
    """
    columns = [(metric, checked.evidence.values(metric.name)) for _, checked, metric in measured]
    rows = [
        [
            arm.label,
            *(cells.get(arm.name, "") for cells in printed.values()),
            *(cell_text([*v.get(arm.name, {}).values()], n=n, unit=m.unit) for m, v in columns),
        ]
        for arm in target.arms
    ]
    heads = [*(f"paper, {name}" for name in printed), *(head for head, _, _ in measured)]
    return table(["arm", *heads], rows)


def bars_table(checks: Sequence[Checked], expected: Path, *statuses: str) -> list[str]:
    """Return a target's bars of some statuses (all by default), and by how much they are met."""
    lines = {
        device_of(checked): [
            ((bar.title, bar_text(bar.expectation, bar.unit)), _bar_cells(bar))
            for bar in stated_bars(checked, expected)
            if not statuses or bar.verdict.status in statuses
        ]
        for checked in checks
    }
    return side_by_side(["what", "bar"], ["measured", "off by", "verdict"], lines)


def _bar_cells(bar: Bar) -> tuple[str, str, str]:
    value, (low, high) = bar.verdict.effect or 0.0, bar.expectation.accept
    measured, off = quantity(value, bar.unit, mixed=True), ""
    bound = low if low is not None and value < low else high
    if not bar.expectation.holds(value):
        off = f"{100 * abs(value / bound - 1):.2g} %" if bound else ""
    elif bar.verdict.status == "contradicted":  # One of its values missed the bar, not their mean.
        measured += f" on average; {bar.verdict.sentence}"
    return measured, off, labelled(bar.verdict)
