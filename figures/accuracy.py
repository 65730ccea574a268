"""Table 1 as a picture: accuracy by arm with intervals, the paper's values in a panel of their own.

The panels share rows and nothing else: other models, other problems. What can be compared is the
pattern down the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.captions import ArmRow, caption, rate_of
from figures.layout import draw_interval, foot, new_figure, tidy_rows
from figures.palette import colour, order, short
from repro.evidence.paper import PaperCell
from repro.evidence.record import Record
from repro.evidence.verdicts.statistics import mean_interval

NAME = "accuracy"
# Percent. Where nothing is lower, an axis from 0 would lose differences of a point or two.
_HIGH = 75.0
_CEILING = "\ngrey triangle: greedy, made to begin with the working"
_MARKS = ("o", "s", "D", "^")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRow(ArmRow):
    """One arm: measured percent with interval, one value per seed, the paper's values by column."""

    mean: float
    low: float | None
    high: float | None
    seeds: tuple[float, ...]
    ceiling: float | None
    paper: Mapping[str, float]


def rows(
    records: Sequence[Record], cells: Sequence[PaperCell] = (), metric: str = "accuracy"
) -> list[AccuracyRow]:
    """Return one row per arm, in the order of the paper's table."""
    values: dict[str, list[float]] = {}
    ceilings: dict[str, list[float]] = {}
    for record in sorted(records, key=lambda item: item.seed):
        value, ceiling = record.value(metric), record.value("accuracy_forced_working")
        if record.ok and value is not None:
            values.setdefault(record.arm, []).append(value)
            if ceiling is not None:
                ceilings.setdefault(record.arm, []).append(ceiling)
    printed: dict[str, dict[str, float]] = {}
    for cell in cells:
        if cell.arm and cell.quantity == "accuracy":
            printed.setdefault(cell.arm, {})[cell.column] = cell.value
    table = []
    for arm in order(list(values)):
        interval = mean_interval(values[arm])
        ceiling_values = ceilings.get(arm)
        table.append(
            AccuracyRow(
                arm=arm,
                n=len(values[arm]),
                mean=interval.value,
                low=interval.low,
                high=interval.high,
                seeds=tuple(values[arm]),
                ceiling=mean_interval(ceiling_values).value if ceiling_values else None,
                rate=rate_of(records, arm),
                paper=printed.get(arm, {}),
            )
        )
    return table


def draw(rows: Sequence[AccuracyRow], where: str = "") -> Figure:
    """Return the figure: measured on the left, the paper's values on the right.

    `where` is said behind the title.
    """
    columns = sorted({column for row in rows for column in row.paper})
    figure = new_figure(10.0 if columns else 6.5, 0.36 * len(rows) + 1.9)
    if columns:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.5, 1])
    else:
        left, right = figure.subplots(), None
    places = list(range(len(rows)))[::-1]
    _measured(left, rows, places)
    left.set_yticks(places, [short(row.arm) for row in rows])
    if right is not None:
        _printed(right, rows, places, columns)
    figure.suptitle(f"Accuracy by arm{where}", x=0.01, ha="left")
    note = caption(rows, "mean, 95 % t interval (cut at 0 and 100) and each seed (ticks)")
    foot(figure, note)
    return figure


def _measured(axes: Axes, rows: Sequence[AccuracyRow], places: Sequence[int]) -> None:
    tidy_rows(axes)
    for row, place in zip(rows, places, strict=True):
        ends = (row.low and max(0.0, row.low), row.high and min(100.0, row.high))
        draw_interval(axes, place, row.mean, ends, row.seeds, colour(row.arm))
        if row.ceiling is not None:
            axes.plot(row.ceiling, place, ">", color="#bbbbbb", markersize=5, zorder=1)
    begin = first_percent(rows)
    axes.set_xlim(begin, 100)
    axes.set_title(
        "measured" + (_CEILING if any(row.ceiling is not None for row in rows) else ""),
        fontsize=9,
        loc="left",
        color="#444444",
    )
    axes.set_xlabel("accuracy, percent" + (f" (the axis begins at {begin})" if begin else ""))


def first_percent(rows: Sequence[AccuracyRow]) -> int:
    """Return where the axis begins, in percent.

    At 0; but where all that is drawn lies high, at a multiple of 10, at least 5 below the lowest.
    """
    marks = [mark for row in rows for mark in (*row.seeds, row.low, row.ceiling)]
    lowest = min(mark for mark in marks if mark is not None)
    return 10 * int((lowest - 5) // 10) if lowest >= _HIGH else 0


def _printed(
    axes: Axes, rows: Sequence[AccuracyRow], places: Sequence[int], columns: Sequence[str]
) -> None:
    tidy_rows(axes)
    for column, mark in zip(columns, _MARKS, strict=False):
        for row, place in zip(rows, places, strict=True):
            if column in row.paper:
                axes.plot(
                    row.paper[column],
                    place,
                    mark,
                    color=colour(row.arm),
                    markerfacecolor="white" if mark == "o" else colour(row.arm),
                )
    named = ", ".join(
        f"{column} {_name(mark)}" for column, mark in zip(columns, _MARKS, strict=False)
    )
    axes.set_title(
        f"the paper, other models and problems:\n{named}",
        fontsize=9,
        loc="left",
        color="#444444",
    )
    axes.set_xlabel("accuracy, percent")
    axes.tick_params(labelleft=False)


def _name(mark: str) -> str:
    return {"o": "circles", "s": "squares", "D": "diamonds", "^": "triangles"}[mark]
