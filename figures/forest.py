"""The forest plot of the twelve claims: one row each, measured effect and the paper's on one scale.

A circle with its interval is the effect measured here, on all seeds, a diamond the paper's; grey is
what could not have shown an effect. Where an early look decided, its own interval is the thin line:
the verdict beside the row is that look's. Effects are shares in percent, of what stands below each
title. A claim without records has no row and is named in the note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.layout import frame, new_figure, tidy_rows
from repro.report.pictures import FOREST
from repro.report.twelve import Decided, Share
from repro.report.verdicts import word

NAME = FOREST
_INK, _PAPER, _GREY = "#20588a", "#c0392b", "#a6a6a6"
_NOTE = (
    "circles: measured here, with the interval that holds for all statements of a target; "
    "diamonds: the paper's own share, hollow where it claims that nothing differs; shortfall: what "
    "the other arm's curve leaves below its ceiling"
)
_LOOKED = (
    "\nthin lines: the interval at the early look that decided, from part of the seeds; circles "
    "and thick lines: all seeds"
)
# Letters of a verdict in a line beside the panel.
_VERDICT_LETTERS = 34


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestRow:
    """A claim as it is drawn.

    Attributes
    ----------
    number, title
        Its place among the twelve, and the claim in a few words.
    share, low, high
        Measured effect and interval of all seeds, in `measure`; no interval where it is not
        testable.
    at_look
        The interval at the look that decided, where that was an earlier one; else None.
    paper
        The paper's, in `measure`; None where it has no size.
    is_equality
        Whether the paper claims that there is no difference.
    """

    number: int
    title: str
    share: float
    low: float | None
    high: float | None
    paper: float | None
    measure: str
    verdict: str
    is_testable: bool
    is_equality: bool
    at_look: tuple[float, float] | None = None


def rows(twelve: Sequence[Decided]) -> list[ForestRow]:
    """Return the rows of the claims that have records, in the order of the twelve."""
    return [
        ForestRow(
            number=number,
            title=item.claim.title,
            share=item.measured.value,
            low=item.measured.low,
            high=item.measured.high,
            at_look=_look(item.at_look),
            paper=item.paper,
            measure=item.measure,
            verdict=word(item.verdict),
            is_testable=item.is_testable,
            is_equality=item.is_equality,
        )
        for number, item in enumerate(twelve, 1)
        if item.is_run and item.verdict is not None and item.measured is not None
    ]


def _look(share: Share | None) -> tuple[float, float] | None:
    return None if share is None or share.low is None or share.high is None else (
        share.low, share.high,
    )  # fmt: skip


def draw(drawn: Sequence[ForestRow], where: str, absent: Sequence[str] = ()) -> Figure:
    """Return the figure, the first claim on top.

    Parameters
    ----------
    where
        Said behind the title.
    absent
        Numbers and titles of the claims that are not run.
    """
    figure = new_figure(10.4, 2.1 + 0.52 * len(drawn))
    axes = figure.subplots()
    places = [float(-index) for index in range(len(drawn))]
    for row, place in zip(drawn, places, strict=True):
        _row(axes, row, place)
    _frame(axes, drawn, places)
    looked = _LOOKED if any(row.at_look for row in drawn) else ""
    note = _NOTE + looked + (f"\nnot run: {'; '.join(absent)}" if absent else "")
    frame(figure, f"The paper's claims about learning{where}", note, _keys(drawn))
    return figure


def _row(axes: Axes, row: ForestRow, place: float) -> None:
    tone = _INK if row.is_testable else _GREY
    if row.at_look is not None:
        axes.plot(row.at_look, [place, place], color=tone, linewidth=1.0, alpha=0.6, zorder=2)
    if row.low is not None and row.high is not None:
        axes.plot([row.low, row.high], [place, place], color=tone, linewidth=2.4, zorder=3)
    axes.plot(row.share, place, "o", color=tone, markersize=6.5, zorder=4)
    if row.paper is not None:
        edge = _PAPER if row.is_testable else _GREY
        face = "white" if row.is_equality else edge
        axes.plot(row.paper, place, "D", color=edge, markerfacecolor=face, markersize=8, zorder=2)


def _frame(axes: Axes, drawn: Sequence[ForestRow], places: Sequence[float]) -> None:
    tidy_rows(axes)
    axes.axvline(0.0, color="#808080", linewidth=1.0, zorder=1)
    axes.set_yticks(places, [f"{row.number}. {row.title}\n{row.measure}" for row in drawn])
    axes.set_ylim(min(places, default=0.0) - 0.7, 0.7)
    axes.set_xlabel("effect in the claimed direction, in the measure of each row")
    beside = axes.get_yaxis_transform()
    for row, place in zip(drawn, places, strict=True):
        verdict = "\n".join(wrap(row.verdict, _VERDICT_LETTERS))
        tone = "#303030" if row.is_testable else "#7a7a7a"
        axes.text(1.02, place, verdict, transform=beside, va="center", fontsize=9.5, color=tone)


def _keys(drawn: Sequence[ForestRow]) -> list[Line2D]:
    keys = [
        Line2D([], [], color=_INK, marker="o", linewidth=2.4, label="measured here"),
        Line2D([], [], color=_PAPER, marker="D", linestyle="", markersize=8, label="the paper"),
    ]
    if any(not row.is_testable for row in drawn):
        grey = Line2D([], [], color=_GREY, marker="o", linestyle="", label="not testable here")
        keys.append(grey)
    return keys
