"""The picture of statements over policies: a row each, every policy's effect and their mean.

A small mark is one pre-trained policy, the mean over its training seeds; the circle with its
interval is the mean over policies, which are what varies; a diamond is the paper's. Effects are
quotients, so the axis is logarithmic and equal factors are equally far apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from figures.layout import frame, new_figure, tidy_rows
from repro.report.over_policies import PolicyRow

NAME = "by_policy"
_INK, _PAPER, _GREY = "#20588a", "#c0392b", "#808080"
_STATEMENT_LETTERS, _VERDICT_LETTERS = 46, 28
_TICKS = (0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)


def draw(drawn: Sequence[PolicyRow], where: str) -> Figure:
    """Return the figure, the first statement on top.

    Parameters
    ----------
    where
        Said behind the title.
    """
    figure = new_figure(10.4, 1.7 + 0.72 * len(drawn))
    axes = figure.subplots()
    for index, row in enumerate(drawn):
        _row(axes, row, -float(index))
    _frame(axes, drawn)
    note = (
        f"{len(drawn[0].each)} policies, each pre-trained from a seed of its own; a mark is the "
        "mean over a policy's training seeds; above 1: in the direction that is stated; the "
        "interval is over policies, 95 % for all statements together"
    )
    frame(figure, f"Effects in policies of other pre-training seeds{where}", note, _keys(drawn))
    return figure


def _row(axes: Axes, row: PolicyRow, place: float) -> None:
    axes.plot([row.low, row.high], [place, place], color=_INK, linewidth=2.4, zorder=3)
    axes.plot(row.mean, place, "o", color=_INK, markersize=7, zorder=4)
    above = [place + 0.24] * len(row.each)
    axes.plot(row.each, above, "|", color=_GREY, markersize=12, markeredgewidth=1.8, zorder=2)
    if row.paper is not None:
        axes.plot(row.paper, place, "D", color=_PAPER, markersize=8, zorder=2)


def _frame(axes: Axes, drawn: Sequence[PolicyRow]) -> None:
    tidy_rows(axes)
    axes.set_xscale("log")
    values = [1.0]
    for row in drawn:
        values += [*row.each, row.low, row.high, *([row.paper] if row.paper else [])]
    axes.set_xlim(min(values) / 1.08, max(values) * 1.08)
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(1.0, color=_GREY, linewidth=1.0, zorder=1)
    places = [-float(index) for index in range(len(drawn))]
    labels = ["\n".join(wrap(row.statement, _STATEMENT_LETTERS)) for row in drawn]
    axes.set_yticks(places, labels, fontsize=9)
    axes.set_ylim(min(places) - 0.6, 0.6)
    axes.set_xlabel("quotient of steps to the take-off")
    beside = axes.get_yaxis_transform()
    for row, place in zip(drawn, places, strict=True):
        verdict = "\n".join(wrap(row.verdict, _VERDICT_LETTERS))
        axes.text(1.02, place, verdict, transform=beside, va="center", fontsize=9.5)


def _keys(drawn: Sequence[PolicyRow]) -> list[Line2D]:
    keys = [
        Line2D([], [], color=_GREY, marker="|", linestyle="", markersize=12, markeredgewidth=1.8,
               label="one policy"),
        Line2D([], [], color=_INK, marker="o", linewidth=2.4, label="mean of policies"),
    ]  # fmt: skip
    if any(row.paper is not None for row in drawn):
        keys.append(Line2D([], [], color=_PAPER, marker="D", linestyle="", markersize=8,
                           label="the paper"))  # fmt: skip
    return keys
