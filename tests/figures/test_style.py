"""Styles: of any two arms in one picture each has a look and a label of its own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D

from figures.style import COLOURS, GREY, apart, frame, ink, new_figure, styles
from repro.targets import TARGETS, find


def test_lines_and_words_stand_out_from_white():
    def contrast(tone):  # as WCAG 2.2 defines it
        screen = np.array(to_rgb(tone))
        light = np.where(screen <= 0.04045, screen / 12.92, ((screen + 0.055) / 1.055) ** 2.4)
        return 1.05 / (0.05 + light @ np.array([0.2126, 0.7152, 0.0722]))

    assert min(map(contrast, COLOURS.values())) >= 3.0
    assert min(contrast(tone) for tone in (GREY, *map(ink, COLOURS.values()))) >= 4.5


@pytest.mark.parametrize(
    "target",
    [item for item in TARGETS if item.arms and item.procedure in ("train", "dose", "step_time")],
    ids=lambda item: item.name,
)
def test_arms_of_a_target_have_looks_and_labels_of_their_own(target):
    looks = styles(target.arms)
    assert looks.keys() == {arm.name for arm in target.arms}
    assert len({(style.colour, style.line) for style in looks.values()}) == len(looks)
    assert len({style.label for style in looks.values()}) == len(looks)


def test_colour_says_format_and_noise():
    looks = styles(find("table1_coder_0_5b").arms)
    assert looks["nvfp4_half"].colour == looks["nvfp4_lora"].colour == COLOURS["nvfp4"]
    assert looks["nvfp4_lora_aqn"].colour == looks["nvfp4_lora_aqn_x5"].colour == COLOURS["noise"]
    assert looks["bf16_full"].colour == COLOURS["full"]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=12))
def test_labels_are_spread_apart_in_order(heights):
    placed = apart(heights, 0.05)
    steps = np.diff(np.array(placed)[np.argsort(heights)])
    assert np.all(steps >= 0.05 * (1 - 1e-3))


@pytest.mark.parametrize(("width", "lines"), [(12.0, 1), (6.5, 2), (2.5, 5)])
def test_keys_that_a_figure_has_no_room_for_go_into_more_lines(width, lines):
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
