"""The picture of paired differences: a row per contrast, a panel per metric, the paper's last.

A tinted half of a row is the side that is claimed there; zero is no difference. Panels share rows
and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from figures.captions import ArmRow, rate_of, rates_text
from figures.contrasts import Cell, Column
from figures.layout import draw_interval, frame, new_figure, tidy_rows
from figures.palette import colour, order, short
from repro.evidence.printed import Printed
from repro.evidence.record import Record

NAME = "paired_differences"
Differences = Mapping[Printed, Mapping[tuple[str, ...], float]]
_PAPER, _CONTROL = "#f6e3c5", "#e4ebf2"
_MARKS = {"o": "circles", "s": "squares", "D": "diamonds"}
_GREY = "#444444"
# Letters of a heading that fit over the narrowest panel.
_PANEL_LETTERS = 42


def draw(
    cells: Sequence[Cell], paper: Differences, records: Sequence[Record], stated: str, where: str
) -> Figure:
    """Return the figure.

    Parameters
    ----------
    paper
        The paper's differences, by where it prints them.
    records
        Those behind the cells, for their learning rates.
    stated
        What the target states, said below the picture.
    where
        Said behind the title.
    """
    contrasts = list(dict.fromkeys(cell.arms for cell in cells))
    columns = list(dict.fromkeys(cell.column for cell in cells))
    count = len(columns) + bool(paper)
    lines = [_label(arms).count("\n") + 1 for arms in contrasts]
    figure = new_figure(max(7.6, 2.4 + 2.75 * count), 2.4 + 0.21 * sum(lines))
    places = _places(lines)
    grid = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for axes, column in zip(grid, columns, strict=False):
        column_cells = [cell for cell in cells if cell.column == column]
        _measured(axes, column_cells, {arms: places[contrasts.index(arms)] for arms in contrasts})
    if paper:
        _printed(grid[-1], paper, dict(zip(contrasts, places, strict=True)))
    grid[0].set_yticks(places, [_label(arms) for arms in contrasts], fontsize=9)
    grid[0].set_ylim(min(places) - 0.9, max(places) + 0.9)
    note = "\n".join(filter(None, [stated, _note(cells), _rates(cells, records)]))
    frame(figure, f"Paired differences between arms{where}", note, _keys(cells))
    return figure


def _label(arms: tuple[str, ...]) -> str:
    names = [short(arm) for arm in arms]
    if len(names) == 2:
        return f"{names[0]}\n\u2212 {names[1]}"
    return f"({names[0]} \u2212 {names[1]})\n\u2212 ({names[2]} \u2212 {names[3]})"


def _places(lines: Sequence[int]) -> list[float]:
    """Return a height per row, the first on top."""
    gaps = (-(above + below) / 2 for above, below in pairwise(lines))
    return list(accumulate(gaps, initial=0.0))


def _measured(axes: Axes, cells: Sequence[Cell], places: Mapping[tuple[str, ...], float]) -> None:
    column = cells[0].column
    _frame(axes, _reach(cells))
    for cell in cells:
        _tint(axes, cell, places[cell.arms])
        ends = (cell.low, cell.high)
        draw_interval(axes, places[cell.arms], cell.mean, ends, cell.pairs, colour(cell.arms[0]))
    axes.set_title(f"{column.title}\n{_base(column)}", fontsize=9, loc="left", color=_GREY)
    axes.set_xlabel(f"difference, {column.unit}")


def _reach(cells: Sequence[Cell]) -> tuple[float, float]:
    """Return the ends of a panel: all that is drawn, zero, and a little more."""
    drawn = [0.0]
    for cell in cells:
        drawn += [cell.mean, *(end for end in (cell.low, cell.high) if end is not None)]
        drawn += [*cell.pairs, cell.bound]
    low, high = min(drawn), max(drawn)
    margin = 0.08 * (high - low or 1.0)
    return low - margin, high + margin


def _tint(axes: Axes, cell: Cell, place: float) -> None:
    if cell.claimed:
        left, right = axes.get_xlim()
        width = (right if cell.claimed > 0 else left) - cell.bound
        tone = _PAPER if cell.paper else _CONTROL
        axes.barh(place, width, left=cell.bound, height=1.5, color=tone, zorder=0)


def _base(column: Column) -> str:
    arm, mean, unit = column.base
    return f"({short(arm)}: {mean:.3g} {unit})"


def _printed(axes: Axes, paper: Differences, places: Mapping[tuple[str, ...], float]) -> None:
    values = [0.0, *(value for by_arms in paper.values() for value in by_arms.values())]
    margin = 0.1 * (max(values) - min(values) or 1.0)
    _frame(axes, (min(values) - margin, max(values) + margin))
    for mark, by_arms in zip(_MARKS, paper.values(), strict=False):
        for arms, value in by_arms.items():
            tone = colour(arms[0])
            axes.plot(value, places[arms], mark, color=tone, markerfacecolor="white")
    named = [f"{_MARKS[mark]}: {place.words}" for mark, place in zip(_MARKS, paper, strict=False)]
    lines = wrap("; ".join(named), _PANEL_LETTERS)
    heading = "\n".join(["the paper, other problems:", *lines])
    axes.set_title(heading, fontsize=9, loc="left", color=_GREY)
    axes.set_xlabel(f"difference, {next(iter(paper)).unit}")


def _frame(axes: Axes, reach: tuple[float, float]) -> None:
    tidy_rows(axes)
    axes.axvline(0.0, color="#808080", linewidth=1.0, zorder=1)
    axes.set_xlim(*reach)
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _note(cells: Sequence[Cell]) -> str:
    counts = sorted({len(cell.pairs) for cell in cells})
    pairs = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    first = f"{pairs} pairs per row, paired by seed"
    return f"{first}; intervals of claims are those of their verdicts, others 95 % t"


def _rates(cells: Sequence[Cell], records: Sequence[Record]) -> str:
    arms = order(list({arm for cell in cells for arm in cell.arms}))
    return rates_text([ArmRow(arm=arm, n=0, rate=rate_of(records, arm)) for arm in arms])


def _keys(cells: Sequence[Cell]) -> list[Line2D | Patch]:
    keys: list[Line2D | Patch] = [
        Line2D([], [], color=_GREY, marker="o", markersize=6, label="mean and interval"),
        Line2D([], [], color=_GREY, marker="|", markersize=11, linestyle="", label="each pair"),
    ]
    if any(cell.claimed and cell.paper for cell in cells):
        keys.append(Patch(color=_PAPER, label="side that the paper claims"))
    if any(cell.claimed and not cell.paper for cell in cells):
        keys.append(Patch(color=_CONTROL, label="side that a control asks about"))
    return keys
