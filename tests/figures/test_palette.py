"""Looks of arms: of any two arms in one picture, each has a look and a label of its own.

Likeness of colours is their distance in CIELAB (about 2 is the least that is seen side by side),
as seen by people with full colour vision and with each of the three kinds of colour blindness; the
matrices are those of Machado, Oliveira and Fernandes (2009) at full severity.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from figures.palette import CONTROLS, STYLES, colour, dash, order, short, style
from figures.timings import systems
from figures.timings.rates import plain
from repro.targets import TARGETS, find

LEAST = 15.0
# Procedures whose pictures show arms by colour and kind of line, or name them on an axis.
LEARNING = ("train", "entropy")
# Pictures that tell arms by colour; the others name them on an axis.
COLOURED = [picture for picture in systems.PICTURES if not picture.name.endswith("_steps")]
VISION = {
    "full": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868],
                            [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968],
                              [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779],
                            [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
TO_XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
) / np.array([[0.9505], [1.0], [1.089]])


def lab(tone: str, vision: str) -> np.ndarray:
    """Return a colour in CIELAB, as it is seen."""
    screen = np.array(to_rgb(tone))
    light = np.where(screen <= 0.04045, screen / 12.92, ((screen + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(VISION[vision] @ light, 0, 1)
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def distance(one: str, other: str) -> float:
    """Return how far two colours are apart for those who tell them apart least."""
    return min(float(np.linalg.norm(lab(one, v) - lab(other, v))) for v in VISION)


def clashes(arms: list[str], *, lines: bool) -> Iterator[str]:
    """Yield the pairs of arms that look alike; with `lines` a kind of line tells them apart."""
    for one, other in combinations(arms, 2):
        apart = distance(colour(one), colour(other))
        if short(one) == short(other) or (
            not (lines and dash(one) != dash(other)) and apart < LEAST
        ):
            yield f"{one} and {other}: {style(one)}, {style(other)}, colours {apart:.1f} apart"


def learning() -> list[str]:
    """Return the targets whose arms learn, or are measured before they do."""
    return [target.name for target in TARGETS if target.arms and target.procedure in LEARNING]


@pytest.mark.parametrize("name", learning())
def test_arms_of_a_target_have_looks_and_labels_of_their_own(name: str) -> None:
    target = find(name)
    arms = [arm.name for arm in target.arms]
    assert set(arms) <= set(STYLES)
    assert len({(colour(arm), dash(arm)) for arm in arms}) == len(arms)
    assert len({short(arm) for arm in arms}) == len(arms)
    # An untrained arm has no line: it is a row with its name beside it.
    assert not list(
        clashes([arm.name for arm in target.arms if arm.training != "none"], lines=True)
    )


@pytest.mark.parametrize("picture", COLOURED, ids=lambda picture: picture.name)
def test_arms_of_a_picture_of_the_systems_tier_differ_in_colour(picture: systems.Picture) -> None:
    arms = {plain(arm.name) for name in picture.targets for arm in find(name).arms}
    assert arms <= set(STYLES)
    assert not list(clashes(sorted(arms), lines=False))


def test_two_arms_of_like_colours_are_a_clash_unless_their_lines_differ() -> None:
    assert distance("#5a5a5a", "#5b5a5a") < 1
    assert list(clashes(["bf16_lora", "lora_5e6"], lines=True))
    assert not list(clashes(["bf16_lora", "bf16_lora_low"], lines=True))
    assert list(clashes(["bf16_lora", "bf16_lora_low"], lines=False))
    # Told apart in full vision, not with red-green blindness.
    assert np.linalg.norm(lab("#c0392b", "full") - lab("#a0522d", "full")) > LEAST
    assert distance("#c0392b", "#a0522d") < LEAST


def test_arms_that_are_one_run_look_alike_but_for_their_label() -> None:
    for target in TARGETS:
        for arm, (_, recorded) in target.shared.items():
            assert (colour(arm), dash(arm)) == (colour(recorded), dash(recorded))


def test_noise_that_acts_in_training_is_a_broken_line() -> None:
    for name in learning():
        for arm in find(name).arms:
            if not name.startswith("learning_rates") and arm.noise is not None:
                assert (dash(arm.name) != "-") == (arm.noise.form != "as_published")


def test_an_arm_that_no_target_declares_is_drawn_all_the_same() -> None:
    assert short("nvfp4_lora_r16") == "NVFP4 LoRA r16"
    assert dash("gone") == ":"
    assert order(["gone", *CONTROLS, "rank_128", "rank_16"]) == [
        *CONTROLS,
        "rank_16",
        "rank_128",
        "gone",
    ]
