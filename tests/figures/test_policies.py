"""The picture of effects by policy."""

from __future__ import annotations

import dataclasses

from figures import policies
from repro.report.over_policies import PolicyRow

SOONER = PolicyRow(
    statement="NVFP4 LoRA takes off after fewer steps",
    each=(1.04, 0.95, 1.32, 0.93),
    mean=1.05,
    low=0.68,
    high=1.62,
    paper=2.31,
    verdict="excluded at the paper's size",
)
LATER = dataclasses.replace(
    SOONER, each=(1.64, 1.44, 1.56, 1.69), mean=1.58, low=1.31, high=1.91, paper=None
)


def test_marks_intervals_and_the_papers_size_are_drawn() -> None:
    figure = policies.draw([SOONER, LATER], "; of a test")
    (axes,) = figure.axes
    drawn = {(line.get_marker(), tuple(map(float, line.get_xdata()))) for line in axes.get_lines()}
    for row in (SOONER, LATER):
        assert {("|", row.each), ("None", (row.low, row.high)), ("o", (row.mean,))} <= drawn
    assert {values for mark, values in drawn if mark == "D"} == {(SOONER.paper,)}
    low, high = axes.get_xlim()
    assert low < 0.68
    assert high > 2.31
    said = " ".join(text.get_text() for text in figure.texts)
    assert "of a test" in said
    assert "4 policies" in said
    keys = [text.get_text() for text in figure.legends[0].get_texts()]
    assert keys == ["one policy", "mean of policies", "the paper"]


def test_without_a_size_of_the_papers_no_key_names_it() -> None:
    figure = policies.draw([LATER], "")
    assert "the paper" not in [text.get_text() for text in figure.legends[0].get_texts()]
