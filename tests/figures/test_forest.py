"""The forest plot: a row per claim with records, the paper's diamond, grey where not testable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from figures import forest
from figures.forest import ForestRow
from repro.evidence.store import blessed_sources
from repro.report.learning import learning_checks
from repro.report.twelve import Decided, decided
from repro.spec.tier import Tier

EXPECTED = Path(__file__).resolve().parents[2] / "expected"
Overlap = Callable[[Bbox, Bbox], bool]


@pytest.fixture(scope="module")
def twelve() -> list[Decided]:
    """Return the twelve on the blessed records, which take seconds to judge."""
    source = blessed_sources(EXPECTED, Tier.PROXY)[0]
    return decided(learning_checks(source, EXPECTED))


def marks(figure: Figure, marker: str) -> dict[float, Line2D]:
    """Return what is drawn with a marker, by the row's height."""
    lines = [line for line in figure.axes[0].lines if line.get_marker() == marker]
    return {float(line.get_ydata()[0]): line for line in lines}  # type: ignore[index]


def made_up(number: int) -> ForestRow:
    return ForestRow(
        number=number,
        title=f"A claim of some length, number {number}",
        share=1.0 - number,
        low=-4.0,
        high=5.0,
        paper=40.0,
        measure="% of the shortfall",
        verdict="reproduced below a tenth of the paper's size",
        is_testable=True,
        is_equality=False,
    )


def test_a_row_is_drawn_per_claim_with_records_with_the_papers_diamond(
    twelve: list[Decided],
) -> None:
    run = [item for item in twelve if item.is_run]
    figure = forest.draw(forest.rows(twelve), "")
    assert len(marks(figure, "o")) == len(run) > 5
    places = [-float(at) for at, item in enumerate(run) if item.paper is not None]
    diamonds = marks(figure, "D")
    assert sorted(diamonds) == sorted(places)
    values = {-float(at): item.paper for at, item in enumerate(run)}
    for place, diamond in diamonds.items():
        assert diamond.get_xdata()[0] == values[place]  # type: ignore[index]
    for claim in (item for item in run if item.is_testable):
        assert claim.half is not None


def test_what_is_not_testable_is_grey_and_has_no_interval(twelve: list[Decided]) -> None:
    untestable = dataclasses.replace(made_up(2), is_testable=False, low=None, high=None)
    rows = [made_up(1), untestable, made_up(3), *forest.rows(twelve)]
    figure = forest.draw(rows, "")
    circles, diamonds = marks(figure, "o"), marks(figure, "D")
    grey = {-float(at) for at, row in enumerate(rows) if not row.is_testable}
    tones = {
        place: {line.get_color() for line in (circles[place], diamonds.get(place)) if line}
        for place in circles
    }
    assert grey >= {-1.0}
    assert all(tones[place] == {"#a6a6a6"} for place in grey)
    assert all("#a6a6a6" not in tones[place] for place in tones.keys() - grey)
    intervals = {float(line.get_ydata()[0]) for line in figure.axes[0].lines  # type: ignore[index]
                 if len(line.get_xdata()) == 2 and line.get_linewidth() > 2}  # type: ignore[arg-type]  # fmt: skip
    assert not intervals & grey


def test_a_diamond_is_hollow_where_the_paper_claims_that_nothing_differs() -> None:
    equal = dataclasses.replace(made_up(2), is_equality=True, paper=0.0)
    diamonds = marks(forest.draw([made_up(1), equal], ""), "D")
    assert diamonds[-1.0].get_markerfacecolor() == "white"
    assert diamonds[0.0].get_markerfacecolor() != "white"


def test_of_an_early_look_the_interval_is_thin_below_that_of_all_seeds(
    twelve: list[Decided],
) -> None:
    looked = dataclasses.replace(made_up(1), at_look=(-20.0, 25.0))
    figure = forest.draw([looked, made_up(2)], "")
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 2]  # type: ignore[arg-type]
    by_ends = {tuple(map(float, line.get_xdata())): line.get_linewidth() for line in lines}  # type: ignore[arg-type]
    assert by_ends[-20.0, 25.0] < by_ends[-4.0, 5.0]
    assert "early look" in " ".join(text.get_text() for text in figure.findobj(Text))
    plain = forest.draw([made_up(1)], "")
    assert "early look" not in " ".join(text.get_text() for text in plain.findobj(Text))
    rows = {row.number: row for row in forest.rows(twelve)}
    assert rows[1].at_look is not None
    assert rows[1].low is not None
    assert rows[1].at_look[0] < rows[1].low
    assert rows[6].at_look is None


def test_claims_without_records_are_named_below() -> None:
    figure = forest.draw([made_up(1)], "; proxy tier", ["Noise costs nothing"])
    words = " ".join(text.get_text() for text in figure.findobj(Text))
    assert "not run: Noise costs nothing" in words
    assert "not run" not in " ".join(
        text.get_text() for text in forest.draw([made_up(1)], "").findobj(Text)
    )


@pytest.mark.parametrize("count", [1, 9, 12])
def test_words_stay_inside_and_apart(count: int, overlap: Overlap) -> None:
    figure = forest.draw([made_up(number) for number in range(1, count + 1)], "; proxy tier")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    texts = [*figure.texts, *axes.texts, axes.xaxis.label, *axes.get_yticklabels()]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    for box in boxes:
        assert box.x0 >= figure.bbox.x0 - 1
        assert box.x1 <= figure.bbox.x1 + 1
    assert not [pair for pair in combinations(boxes, 2) if overlap(*pair)]
