"""A table for each claim: its rows in one unit of time, and what each is judged by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from statistics import median_high
from typing import Any

from pytest_benchmark.utils import time_unit
from rich.console import Console
from rich.table import Table

CPU_LINE = (
    "On a CPU: the kernels' plain references at small shapes, by the host's clock; what the paper "
    "claims is timed on a GPU."
)
_WIDTH = 118
# What a row says beside its time, in this order, where any row of the table has it.
_COLUMNS = {
    "ratio": "x 16 bits",
    "limit_percent": "% of limit",
    "tokens_per_second": "tokens/s",
    "peak_bytes": "peak",
    "paper": "the paper",
    "blessed": "the blessed record",
}


def unit_of(seconds: Sequence[float]) -> tuple[str, float]:
    """Return the largest unit in which most of a table's times are 1 or more, and its factor."""
    prefix, factor = time_unit(median_high(seconds))
    return f"{prefix}s", factor


def claim_table(title: str, rows: Sequence[Any], stored: Mapping[str, Any] | None = None) -> str:
    """Return a table of pytest-benchmark's rows of one group as text.

    `stored` are rows of the run that this one is compared with, by their full names.
    """
    before = {name: row["stats"]["median"] for name, row in (stored or {}).items()}
    compared = any(row.fullname in before for row in rows)
    unit, factor = unit_of([row.stats.median for row in rows])
    names = [name for name in _COLUMNS if any(name in row.extra_info for row in rows)]
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("row", no_wrap=True)
    heads = [unit, "least", "most", *(["stored"] * compared), *(_COLUMNS[name] for name in names)]
    for head in heads:
        table.add_column(head, justify="left" if head.startswith("the ") else "right")
    for row in rows:
        times = [row.stats.median, row.stats.min, row.stats.max]
        times += [before.get(row.fullname)] * compared
        cells = [_text(name, row.extra_info) for name in names]
        table.add_row(_name(row.name), *(_number(time, factor) for time in times), *cells)
    out = StringIO()
    Console(file=out, width=_WIDTH).print("\n", table, sep="")
    return out.getvalue()


def _name(test: str) -> str:
    """Return what is timed, without the test's function."""
    function, _, parameters = test.partition("[")
    timed = parameters.removesuffix("]")
    for end in ("-kernel-cuda", "-reference-cpu"):
        timed = timed.removesuffix(end)
    return timed or function.removeprefix("test_").replace("_", " ")


def _number(seconds: float | None, factor: float) -> str:
    if seconds is None:
        return ""
    value = factor * seconds
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _text(name: str, said: Mapping[str, Any]) -> str:
    value = said.get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return re.sub(r"\s+", " ", value)
    if name == "peak_bytes":
        return f"{value / 1e9:.1f} GB"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
