"""Device memory of a GRPO step: the measured peak, the peak that was planned, and the limits.

The bar of each arm and point is the measured peak; the diamond on it is what the plan said before
the run. A black stroke is what this suite accepts at most, a broken grey one what the allocator was
allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from figures.layout import frame, new_figure, tidy_rows
from figures.palette import colour, order, short
from figures.timings.rates import Bars
from repro.evidence.record import Record

NAME = "memory"
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One arm at one point, in GB (10^9 bytes).

    Attributes
    ----------
    size
        Billions of parameters, by the model's name.
    measured
        The largest peak of the records.
    planned
        What the memory plan said, None where it said nothing.
    budget
        What the allocator might take, None where it might take all.
    most
        The largest peak that this suite accepts, None where it demands nothing.
    """

    arm: str
    size: int
    point: str
    measured: float
    planned: float | None
    budget: float | None
    most: float | None


def rows(records: Sequence[Record], bars: Bars | None = None) -> list[MemoryRow]:
    """Return a row for each point and arm whose peak was measured, largest models first.

    Parameters
    ----------
    bars
        (arm, metric) to what is expected of it.
    """
    largest: dict[tuple[str, str], MemoryRow] = {}
    for record in records:
        for point in record.config["scale"]["points"]:
            row = _row(record, point, bars or {})
            if row is not None:
                earlier = largest.get((row.point, row.arm), row)
                largest[row.point, row.arm] = max(earlier, row, key=lambda item: item.measured)
    arms = order(list({row.arm for row in largest.values()}))
    most: dict[str, float] = {}
    for row in largest.values():
        most[row.point] = max(most.get(row.point, 0.0), row.measured)
    return sorted(
        largest.values(),
        key=lambda row: (-row.size, -most[row.point], row.point, arms.index(row.arm)),
    )


def _row(record: Record, point: Mapping[str, Any], bars: Bars) -> MemoryRow | None:
    name = point["name"]
    peak, planned = record.value(f"peak_bytes_{name}"), record.value(f"predicted_bytes_{name}")
    if peak is None:
        return None
    bar = bars.get((record.arm, f"peak_bytes_{name}"))
    most = None if bar is None else bar.accept[1]
    return MemoryRow(
        arm=record.arm,
        size=int(point["model"].rstrip("b")),
        point=_point_text(record, point),
        measured=peak / _GB,
        planned=None if planned is None else planned / _GB,
        budget=point["budget_bytes"] / _GB or None,
        most=None if most is None else most / _GB,
    )


def _point_text(record: Record, point: Mapping[str, Any]) -> str:
    """Return `32B, 8 x 2048 tokens, rank 32`, and how many rows at once where not all."""
    rank = point["lora_rank"] or record.config["arm"]["lora_rank"]
    completions = point["prompts"] * point["group"]
    words = f"{point['model'].upper()}, {completions} x {point['completion_tokens']}, rank {rank}"
    slots = point.get("slots", 0)
    return words + (f", {slots} rows at once" if slots else "")


def draw(rows: Sequence[MemoryRow], title: str, note: str) -> Figure:
    """Return the figure; `note` stands below it."""
    figure = new_figure(9.0, 1.9 + 0.34 * len(rows))
    axes = figure.subplots()
    places = _places(rows)
    for row, place in zip(rows, places, strict=True):
        _draw_row(axes, row, place)
    middles = {
        point: [place for row, place in zip(rows, places, strict=True) if row.point == point]
        for point in dict.fromkeys(row.point for row in rows)
    }
    axes.set_yticks([sum(heights) / len(heights) for heights in middles.values()], list(middles))
    axes.invert_yaxis()
    tidy_rows(axes)
    axes.set_xlim(left=0)
    axes.set_xlabel("GB of device memory at the peak")
    frame(figure, title, note, _keys(rows))
    return figure


def _places(rows: Sequence[MemoryRow]) -> list[float]:
    """Return a height per row, with a gap where another point begins."""
    gaps = (1.0 if row.point == last.point else 1.7 for last, row in pairwise(rows))
    return list(accumulate(gaps, initial=0.0))


def _draw_row(axes: Axes, row: MemoryRow, place: float) -> None:
    axes.barh(place, row.measured, height=0.85, color=colour(row.arm))
    ends = [place - 0.55, place + 0.55]
    if row.budget is not None and row.budget != row.most:
        axes.plot([row.budget] * 2, ends, color="#808080", linestyle=":", linewidth=1.6)
    if row.most is not None:
        axes.plot([row.most] * 2, ends, color="#000000", linewidth=1.6)
    if row.planned is not None:
        axes.plot(row.planned, place, "D", color="#000000", markerfacecolor="white", markersize=5)


def _keys(rows: Sequence[MemoryRow]) -> list[Patch | Line2D]:
    keys: list[Patch | Line2D] = [
        Patch(color=colour(arm), label=f"{short(arm)}, measured")
        for arm in order(list({row.arm for row in rows}))
    ]
    if any(row.planned is not None for row in rows):
        keys.append(Line2D([], [], color="#000000", marker="D", markerfacecolor="white",
                           linestyle="", markersize=5, label="planned"))  # fmt: skip
    if any(row.most is not None for row in rows):
        keys.append(Line2D([], [], color="#000000", label="at most accepted"))
    if any(row.budget is not None and row.budget != row.most for row in rows):
        keys.append(Line2D([], [], color="#808080", linestyle=":", label="allocator's limit"))
    return keys
