"""The picture of effects by policy: what is drawn is what is judged."""

from __future__ import annotations

import pytest

from figures import policies
from repro.evidence.store import Blessed
from repro.judge.check import Checked, check_selection
from repro.run.places import expected_folder
from repro.run.select import select


def checked(name: str) -> Checked:
    (selection,) = select([name], tier="proxy")
    expected = expected_folder(None)
    return check_selection(selection, Blessed(expected, "proxy", "nvidia_h200"), expected)


@pytest.fixture(scope="module")
def over_policies() -> Checked:
    return checked("needle_policies")


def test_a_row_has_every_policy_and_the_verdicts_own_numbers(over_policies: Checked) -> None:
    rows = policies.rows(over_policies)
    assert len(rows) == len(over_policies.verdicts) == 4
    for row, verdict in zip(rows, over_policies.verdicts, strict=True):
        assert (row.mean, row.low, row.high) == (verdict.effect, verdict.low, verdict.high)
        assert len(row.each) == verdict.n == 4
        assert f"by pre-training seed {row.each[0]:.3g}, {row.each[1]:.3g}" in verdict.sentence
        assert min(row.each) < row.mean < max(row.each)


def test_marks_intervals_and_the_papers_size_are_drawn(over_policies: Checked) -> None:
    rows = policies.rows(over_policies)
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


def test_statements_about_training_seeds_have_no_row() -> None:
    assert policies.rows(checked("needle_ranks_grown")) == []
