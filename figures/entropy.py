"""Entropy over training, by arm (after Fig. 5): whether quantisation raises it."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from figures.curves import CurveRow, curve_rows, draw_curves
from repro.evidence.record import Record

NAME = "entropy_curves"


def rows(records: Sequence[Record]) -> list[CurveRow]:
    """Return the mean token entropy, in nats, per arm and step."""
    return curve_rows(records, "entropy")


def draw(rows: Sequence[CurveRow], where: str = "") -> Figure:
    """Return the figure; `where` is said behind its title."""
    return draw_curves(
        rows,
        title=f"Entropy during training{where}",
        ylabel="mean token entropy, nats",
    )
