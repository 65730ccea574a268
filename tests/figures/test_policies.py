"""The picture of effects by policy: what is drawn is what is judged."""

from __future__ import annotations

import pytest

from figures import policies
from repro.evidence.store import Blessed
from repro.judge.check import Checked, check_selection
from repro.report.over_policies import over_policies
from repro.run.places import expected_folder
from repro.run.select import select


def checked(name: str) -> Checked:
    (selection,) = select([name], tier="proxy")
    expected = expected_folder(None)
    return check_selection(selection, Blessed(expected, "proxy", "nvidia_h200"), expected)


@pytest.fixture(scope="module")
def judged() -> Checked:
    return checked("needle_policies")


def test_marks_intervals_and_the_papers_size_are_drawn(judged: Checked) -> None:
    rows = over_policies([judged])["needle_policies"]
    figure = policies.draw(rows, "; of a test")
    (axes,) = figure.axes
    drawn = [list(line.get_xdata()) for line in axes.get_lines()]
    for row in rows:
        assert list(row.each) in drawn
        assert [row.low, row.high] in drawn
    diamonds = [line for line in axes.get_lines() if line.get_marker() == "D"]
    assert [list(line.get_xdata()) for line in diamonds] == [
        [row.paper] for row in rows if row.paper
    ]
    low, high = axes.get_xlim()
    assert all(low < value < high for row in rows for value in (*row.each, row.low, row.high))
    said = " ".join(text.get_text() for text in figure.texts)
    assert "of a test" in said
    assert "4 policies" in " ".join(said.split())
