"""Reward over training, by arm (after Fig. 4): whether it grows faster on quantised weights."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from figures.curves import CurveRow, curve_rows, draw_curves
from repro.evidence.record import Record

NAME = "reward_curves"


def rows(records: Sequence[Record]) -> list[CurveRow]:
    """Return the accuracy part of the training reward, in percent, an arm and step.

    The total reward of the controls is another thing (a coin, the format), so what is drawn for
    every arm is the share of right answers among the sampled completions.
    """
    accuracies = curve_rows(records, "accuracy")
    return accuracies or curve_rows(records, "reward")


def draw(rows: Sequence[CurveRow], where: str = "") -> Figure:
    """Return the figure; `where` is said behind its title."""
    return draw_curves(
        rows,
        title=f"Right answers during training{where}",
        ylabel="share of sampled completions that are right",
    )
