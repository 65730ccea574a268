"""Room for words: nothing written around a picture leaves it or lies on other words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import combinations

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from figures import accuracy
from figures.accuracy import AccuracyRow
from figures.curves import ENTROPY, REWARD, CurveRow, draw_heldout
from figures.layout import frame, new_figure
from repro.spec.target import Target
from repro.targets import TARGETS, find

STEPS = 3


def trained(target: Target) -> list[str]:
    """Return the arms that have curves: untrained ones have none."""
    return [arm.name for arm in target.arms if arm.training != "none"]


def apart() -> list[str]:
    """Return the targets of learning; of those with the same arms, the longest name.

    The others' pictures have the same words but for the name, which stands in the title.
    """
    widest: dict[tuple[str, ...], str] = {}
    for target in TARGETS:
        if target.procedure == "train" and target.scales and trained(target):
            alike = (target.procedure, *trained(target))
            widest[alike] = max(widest.get(alike, ""), target.name, key=len)
    return list(widest.values())


Overlap = Callable[[Bbox, Bbox], bool]


def written(figure: Figure) -> list[Text]:
    """Return title, caption, and what stands at the ends of lines and at the left of rows."""
    figure.draw_without_rendering()
    texts = list(figure.texts)
    for axes in figure.axes:
        texts += [*axes.texts, axes.xaxis.label]
        low, high = sorted(axes.get_ylim())
        # A panel that shares its neighbour's axis has no labels.
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=False)
        texts += [text for place, text in ticks if low <= place <= high]
    return [text for text in texts if text.get_text()]


def drawn(name: str) -> list[Figure]:
    """Return the pictures of a target's trained arms, seeds and learning rates all unlike."""
    target = find(name)
    where = f"; {name.replace('_', ' ')}, mini tier"
    curves = [
        CurveRow(arm=arm, place=step, mean=0.4 + 0.001 * place, low=0.3, high=0.5, n=3 + place % 8,
                 rate=1e-4 * (1 + place % 3))
        for place, arm in enumerate(trained(target))
        for step in range(1, STEPS)
    ]  # fmt: skip
    heights = [
        dataclasses.replace(row, place=1000.0 * row.place, mean=100 * row.mean, low=None, high=None)
        for row in curves
    ]  # fmt: skip
    shares = [
        AccuracyRow(arm=row.arm, n=row.n, mean=50.0, low=40.0, high=60.0, seeds=(40.0,) * row.n,
                    ceiling=None, rate=row.rate, paper={})
        for row in curves
        if row.place == 1
    ]  # fmt: skip
    return [
        REWARD.draw(curves, where),
        ENTROPY.draw(curves, where),
        draw_heldout(heights, where),
        accuracy.draw(shares, where),
    ]


@pytest.mark.parametrize("name", apart())
def test_words_of_a_targets_pictures_stay_inside_and_apart(name: str, overlap: Overlap) -> None:
    for figure in drawn(name):
        boxes = {text.get_text(): extent(text) for text in written(figure)}
        for words, box in boxes.items():
            assert box.x0 >= figure.bbox.x0 - 1, words
            assert box.x1 <= figure.bbox.x1 + 1, words
        for one, other in combinations(boxes, 2):
            assert not overlap(boxes[one], boxes[other]), (one, other)


def extent(text: Text) -> Bbox:
    """Return the box of the words alone; an annotation's own box has its stroke in it, too."""
    return Text.get_window_extent(text)


@pytest.mark.parametrize(("width", "lines"), [(12.0, 1), (6.5, 2), (2.5, 5)])
def test_keys_that_a_figure_has_no_room_for_go_into_more_lines(width: float, lines: int) -> None:
    figure = new_figure(width, 4.0)
    axes = figure.subplots()
    axes.set_title("a panel")
    keys = [Line2D([], [], label=f"{number} of several keys") for number in range(5)]
    frame(figure, "A title", "a note", keys)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert len({round(text.get_window_extent().y0) for text in legend.get_texts()}) == lines
    assert box.x1 <= figure.bbox.x1
    assert axes.title.get_window_extent().y1 <= box.y0 + 2
