"""What a GRPO step's time is made of (Table 3): a bar per arm, its phases one behind the other.

A bar ends with the step's seconds and how many times as fast as 16-bit LoRA's it is, with the
paper's ratio beside it. Points whose rollout was not sampled whole have no step time and no bar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from figures.layout import frame, new_figure, tidy_rows
from figures.palette import order, short
from repro.evidence.paper import PaperCell
from repro.evidence.record import Record

NAME = "steps"
# In the order of a step; colours differ in lightness, too.
PHASES = {
    "rollout": ("rollout", "#2f5d8a"),
    "reward": ("rewards", "#8fb8de"),
    "update": ("forward and backward", "#d9a441"),
    "optimizer": ("optimiser", "#7a3e2b"),
    "idle": ("device idle", "#bdbdbd"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One arm at one point.

    Attributes
    ----------
    phases
        Seconds of each phase, medians over the repeats.
    seconds, n
        Of a whole step, and how many were timed.
    speedup, low, high
        16-bit LoRA's step over this one's, least and largest; None without a baseline.
    paper
        The paper's ratio for this model and batch, None where it has none.
    """

    arm: str
    model: str
    batch: str
    phases: Mapping[str, float]
    seconds: float
    n: int
    speedup: float | None
    low: float | None
    high: float | None
    paper: float | None


def rows(records: Sequence[Record], cells: Sequence[PaperCell] = ()) -> list[StepRow]:
    """Return a row for each point and arm that has a step time.

    Points stand by the size of their model, and of one size as recorded.
    """
    printed = {(cell.arm, cell.column.lower(), cell.quantity): cell.value for cell in cells}
    by_arm: dict[str, list[Record]] = {}
    for record in records:
        by_arm.setdefault(record.arm, []).append(record)
    points = {
        point["name"]: point for record in records for point in record.config["scale"]["points"]
    }
    return [
        _row(by_arm[arm], point, printed)
        for point in sorted(points.values(), key=lambda point: int(point["model"].rstrip("b")))
        for arm in order(list(by_arm))
        if _values(by_arm[arm], f"step_seconds_{point['name']}")
    ]


def _row(
    records: Sequence[Record],
    point: Mapping[str, Any],
    printed: Mapping[tuple[str, str, str], float],
) -> StepRow:
    name, arm, model = point["name"], records[0].arm, point["model"]
    phases = {phase: _values(records, f"{phase}_seconds_{name}") for phase in PHASES}
    steps = _values(records, f"step_seconds_{name}")
    ratios = _values(records, f"speedup_{name}")
    prompts, group = point["prompts"], point["group"]
    return StepRow(
        arm=arm,
        model=model,
        batch=f"batch {group}" if prompts == 1 else f"{prompts} x {group}",
        phases={phase: median(values) for phase, values in phases.items() if values},
        seconds=median(steps),
        n=len(steps),
        speedup=median(ratios) if ratios else None,
        low=min(ratios, default=None),
        high=max(ratios, default=None),
        paper=printed.get((arm, model, f"speedup_batch_{group}")) if prompts == 1 else None,
    )


def _values(records: Sequence[Record], metric: str) -> list[float]:
    return [value for record in records for value in record.repeats(metric)]


def draw(rows: Sequence[StepRow], title: str, note: str) -> Figure:
    """Return the figure: points from above, the arms of one close together."""
    figure = new_figure(9.5, 1.9 + 0.42 * len(rows))
    axes = figure.subplots()
    places = _places(rows)
    for row, place in zip(rows, places, strict=True):
        _bar(axes, row, place)
    axes.set_yticks(places, [_label(row) for row in rows])
    axes.invert_yaxis()
    tidy_rows(axes)
    # Room for what is written behind the longest bar.
    axes.set_xlim(0, 1.32 * max(row.seconds for row in rows))
    axes.set_xlabel("seconds of a step")
    frame(figure, title, note, _keys())
    return figure


def _places(rows: Sequence[StepRow]) -> list[float]:
    """Return a height per row, with a gap where another point begins."""
    points = [(row.model, row.batch) for row in rows]
    gaps = (1.0 if last == point else 1.6 for last, point in pairwise(points))
    return list(accumulate(gaps, initial=0.0))


def _bar(axes: Axes, row: StepRow, place: float) -> None:
    start = 0.0
    for phase, (_, tone) in PHASES.items():
        seconds = row.phases.get(phase, 0.0)
        axes.barh(place, seconds, left=start, height=0.8, color=tone)
        start += seconds
    axes.annotate(_seconds_text(row), (max(start, row.seconds), place), xytext=(5, 0), va="center",
                  textcoords="offset points", fontsize=9)  # fmt: skip


def _seconds_text(row: StepRow) -> str:
    words = f"{row.seconds:.2f} s"
    if row.speedup is not None:
        words += f", {row.speedup:.2f} x"
        if row.n > 1:
            words += f" ({row.low:.2f} to {row.high:.2f})"
    return words + ("" if row.paper is None else f" (paper: {row.paper:g} x)")


def _label(row: StepRow) -> str:
    return f"{row.model.upper()}, {row.batch}: {short(row.arm)}"


def _keys() -> list[Patch]:
    return [Patch(color=tone, label=label) for label, tone in PHASES.values()]
