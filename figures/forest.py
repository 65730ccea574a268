"""The forest plot of the twelve claims: one row each, measured effect and the paper's on one scale.

A circle with its interval is the effect measured here, a diamond the paper's; grey is what could
not have shown an effect. Effects are shares in percent, of what stands below each title. A claim
without records has no row and is named in the note.
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
from repro.report.twelve import Decided
from repro.report.verdicts import word

NAME = FOREST
_INK, _PAPER, _GREY = "#20588a", "#c0392b", "#a6a6a6"
_NOTE = (
    "circles: measured here, with the interval that holds for all statements of a target; "
    "diamonds: the paper's own share, hollow where it claims that nothing differs; shortfall: what "
    "the other arm's curve leaves below its ceiling"
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
        Measured effect and interval, in `measure`; no interval where it is not testable.
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


def rows(twelve: Sequence[Decided]) -> list[ForestRow]:
    """Return the rows of the claims that have records, in the order of the twelve."""
    return [
        ForestRow(
            number=number,
            title=item.claim.title,
            share=item.share,
            low=item.low,
            high=item.high,
            paper=item.paper,
            measure=item.measure,
            verdict=word(item.verdict),
            is_testable=item.is_testable,
            is_equality=item.is_equality,
        )
        for number, item in enumerate(twelve, 1)
        if item.is_run and item.verdict is not None and item.share is not None
    ]


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
    note = _NOTE + (f"\nnot run: {'; '.join(absent)}" if absent else "")
    frame(figure, f"The paper's claims about learning{where}", note, _keys(drawn))
    return figure


def _row(axes: Axes, row: ForestRow, place: float) -> None:
    tone = _INK if row.is_testable else _GREY
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
