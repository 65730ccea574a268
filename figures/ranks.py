"""Rollout throughput by LoRA rank at batch 1 (Table 9, Fig. 11): panels are models, lines formats.

Axes begin at zero, so that heights compare as the speeds do.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.layout import frame, new_figure, tidy
from figures.timings.rates import RateRow, arms, by_rank, draw_line, keys, line_of, models
from repro.evidence.paper import PaperCell
from repro.evidence.record import Record

NAME = "ranks"
# Inches that the title and the note need.
_LEAST_WIDTH = 7.0


def rows(records: Sequence[Record], cells: Sequence[PaperCell] = ()) -> list[RateRow]:
    """Return a row for each model, format and rank."""
    return by_rank(records, cells)


def draw(rows: Sequence[RateRow], title: str, note: str) -> Figure:
    """Return the figure; `note` stands below it."""
    columns = models(rows)
    figure = new_figure(max(1.0 + 2.7 * len(columns), _LEAST_WIDTH), 4.4)
    grid = figure.subplots(1, len(columns), squeeze=False)
    for axes, model in zip(grid[0], columns, strict=True):
        _panel(axes, [row for row in rows if row.model == model])
        axes.set_title(f"Qwen2.5-{model.upper()}", fontsize=10, loc="left")
        axes.set_xlabel("LoRA rank")
    grid[0][0].set_ylabel("tokens per second, batch 1")
    frame(figure, title, note, keys(rows))
    return figure


def _panel(axes: Axes, rows: Sequence[RateRow]) -> None:
    tidy(axes)
    axes.set_xscale("log", base=2)
    for arm in arms(rows):
        draw_line(axes, line_of(rows, rows[0].model, arm))
    axes.set_xticks(sorted({row.place for row in rows}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.margins(x=0.12)
    axes.set_ylim(0, 1.08 * max(max(row.mean, row.paper or 0.0) for row in rows))
