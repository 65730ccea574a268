"""Markdown tables.

A column in which every row is empty is left out, so that one layout serves every target; so is what
a row's first cell repeats of the one above.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from repro.evidence.origins import grouped_by
from repro.evidence.paper import paper_cells
from repro.evidence.printable import without_controls
from repro.judge.check import Checked
from repro.report.numbers import cell_text
from repro.spec.claim import Metric
from repro.spec.target import Target

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
    """Return a table without empty columns and repeated first cells; nothing without rows."""
    cells = [[in_cell(cell) for cell in row] for row in rows]
    for above, row in [*itertools.pairwise(cells)][::-1]:
        row[0] = "" if row[0] == above[0] else row[0]
    used = [place for place in range(len(heads)) if any(row[place] for row in cells)]
    lines = [[heads[place] for place in used], *([row[place] for place in used] for row in cells)]
    written = [f"| {' | '.join(line)} |" for line in lines]
    return [written[0], "|---" * len(used) + "|", *written[1:], ""] if cells else []


def of_targets(checks: Iterable[Checked], *names: str) -> list[Checked]:
    """Return the checks of targets of these names that have records."""
    return [c for c in checks if c.selection.target.name in names and c.evidence.count]


def by_device(checks: Iterable[Checked]) -> dict[str, list[Checked]]:
    """Return the checks that have records, by their device."""
    recorded = (checked for checked in checks if checked.evidence.count)
    return grouped_by(recorded, lambda checked: checked.evidence.device)


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
