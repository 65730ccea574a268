"""Bars: what a GRPO step's time is made of (Table 3), and what memory it takes.

A bar of a step has its phases one behind the other and ends with the seconds and how many times as
fast as 16-bit LoRA's they are, the paper's ratio beside them. A bar of memory is the measured peak:
the diamond on it is what the plan said before the run, a black stroke what this suite accepts at
most, a dotted grey one what the allocator was allowed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from figures import captions
from figures.style import Style, frame, new_figure, styles, tidy
from repro.evidence.record import Record
from repro.judge.check import Checked
from repro.report.systems_rates import printed_speedups
from repro.report.verdict_words import stated_bars

# In the order of a step; colours differ in lightness, too.
PHASES = {
    "rollout": ("rollout", "#2f5d8a"),
    "reward": ("rewards", "#8fb8de"),
    "update": ("forward and backward", "#d9a441"),
    "optimizer": ("optimiser", "#7a3e2b"),
    "idle": ("device idle", "#bdbdbd"),
}
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One arm at one point.

    Attributes
    ----------
    phases
        Seconds of each phase, medians over the repeats.
    seconds, n
        Of a whole step, and how many were timed.
    speedups
        16-bit LoRA's steps over this arm's; none without a baseline.
    paper
        The paper's ratio for this model and batch, None where it has none.
    """

    arm: str
    point: str
    phases: Mapping[str, float]
    seconds: float
    n: int
    speedups: Sequence[float]
    paper: float | None

    @property
    def words(self) -> str:
        """`5.81 s, 2.21 x (2.20 to 2.25) (paper: 1.5 x)`."""
        words = f"{self.seconds:.2f} s"
        if self.speedups:
            words += f", {median(self.speedups):.2f} x"
        if self.speedups and self.n > 1:
            words += f" ({min(self.speedups):.2f} to {max(self.speedups):.2f})"
        return words + ("" if self.paper is None else f" (paper: {self.paper:g} x)")


def step_rows(checks: Sequence[Checked], expected: Path) -> list[StepRow]:
    """Return a row for each point and arm that has a step time, the smallest models first.

    A point whose rollout was not sampled whole has no step time.
    """
    rows = []
    for point, checked in _points(checks):
        name, prompts, group = point["name"], point["prompts"], point["group"]
        printed = printed_speedups(checked.selection.target.paper_file, expected)
        batch = f"batch {group}" if prompts == 1 else f"{prompts} x {group}"
        for arm in styles(checked.selection.target.arms):
            records = [*checked.evidence.records.get(arm, {}).values()]
            seconds = _repeats(records, f"step_seconds_{name}")
            if not seconds:
                continue
            phases = {phase: _repeats(records, f"{phase}_seconds_{name}") for phase in PHASES}
            row = StepRow(
                arm=arm,
                point=f"{point['model'].upper()}, {batch}",
                phases={phase: median(values) for phase, values in phases.items() if values},
                seconds=median(seconds),
                n=len(seconds),
                speedups=_repeats(records, f"speedup_{name}"),
                paper=printed.get((arm, point["model"], f"{group}")) if prompts == 1 else None,
            )
            rows.append(row)
    return rows


def _points(checks: Sequence[Checked]) -> list[tuple[Mapping[str, Any], Checked]]:
    """Return each point with its check, the smallest models first."""
    points = {
        point["name"]: (point, checked)
        for checked in checks
        for record in checked.evidence.every_record()
        for point in record.config["scale"]["points"]
    }
    return sorted(points.values(), key=lambda pair: _size(pair[0]))


def _size(point: Mapping[str, Any]) -> int:
    return int(point["model"].rstrip("b"))


def _repeats(records: Sequence[Record], metric: str) -> list[float]:
    return [value for record in records for value in record.repeats(metric)]


def steps(checks: Sequence[Checked], expected: Path, title: str) -> Figure | None:
    """Return the figure of steps: points from above, the arms of one close together."""
    rows = step_rows(checks, expected)
    if not rows:
        return None
    figure, axes, places = _figure([row.point for row in rows], 0.42)
    for row, place in zip(rows, places, strict=True):
        start = 0.0
        for phase, (_, tone) in PHASES.items():
            seconds = row.phases.get(phase, 0.0)
            axes.barh(place, seconds, left=start, height=0.8, color=tone)
            start += seconds
        axes.annotate(row.words, (max(start, row.seconds), place), xytext=(5, 0), va="center",
                      textcoords="offset points", fontsize=9)  # fmt: skip
    labels = _looks(checks)
    axes.set_yticks(places, [fill(f"{row.point}: {labels[row.arm].label}", 38) for row in rows])
    # Room for what is written behind the longest bar.
    axes.set_xlim(0, 1.45 * max(row.seconds for row in rows))
    axes.set_xlabel("seconds of a step")
    records = _records(checks)
    timed = f"{min(row.n for row in rows)} timed after a warm-up"
    note = f"{captions.origin(records)}; {timed}; x: 16-bit LoRA's time over the arm's"
    note += f"\n{captions.steps(records)}; {captions.adapter(records)}"
    keys = [Patch(color=tone, label=label) for label, tone in PHASES.values()]
    frame(figure, title, note, keys)
    return figure


def _figure(points: Sequence[Hashable], height: float) -> tuple[Figure, Axes, list[float]]:
    """Return an empty figure of bars and a height per bar, with a gap where a point begins."""
    figure = new_figure(9.5, 1.9 + height * len(points))
    axes = figure.subplots()
    axes.invert_yaxis()
    tidy(axes, "x")
    gaps = (1.0 if here == last else 1.7 for last, here in pairwise(points))
    return figure, axes, list(accumulate(gaps, initial=0.0))


def _looks(checks: Sequence[Checked]) -> dict[str, Style]:
    arms = {arm.name: arm for checked in checks for arm in checked.selection.target.arms}
    return styles(arms.values())


def _records(checks: Sequence[Checked]) -> list[Record]:
    return [record for checked in checks for record in checked.evidence.every_record()]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One arm at one point, in GB (10^9 bytes).

    Attributes
    ----------
    size
        Billions of parameters, by the model's name.
    measured
        The largest peak of the records.
    planned, budget, most
        What the memory plan said, what the allocator might take, and the largest peak that this
        suite accepts; None where there is none.
    """

    arm: str
    size: int
    point: str
    measured: float
    planned: float | None
    budget: float | None
    most: float | None


def memory_rows(checks: Sequence[Checked], expected: Path) -> list[MemoryRow]:
    """Return a row for each point and arm whose peak was measured, largest models first."""
    bars = {bar.key: bar.expectation for one in checks for bar in stated_bars(one, expected)}
    arms = list(_looks(checks))
    rows = []
    for checked in checks:
        for arm, by_seed in checked.evidence.records.items():
            for point in next(iter(by_seed.values())).config["scale"]["points"]:
                name, records = point["name"], [*by_seed.values()]
                peaks = [p for r in records if (p := r.value(f"peak_bytes_{name}")) is not None]
                if not peaks:
                    continue
                bar = bars.get((arm, f"peak_bytes_{name}"))
                rank = point["lora_rank"] or records[0].config["arm"]["lora_rank"]
                planned = records[0].value(f"predicted_bytes_{name}")
                most = None if bar is None else bar.accept[1]
                row = MemoryRow(
                    arm=arm,
                    size=_size(point),
                    point=_point_text(point, rank),
                    measured=max(peaks) / _GB,
                    planned=planned and planned / _GB,
                    budget=point["budget_bytes"] / _GB or None,
                    most=most and most / _GB,
                )
                rows.append(row)
    peak = {row.point: 0.0 for row in rows}
    for row in rows:
        peak[row.point] = max(peak[row.point], row.measured)
    return sorted(
        rows, key=lambda row: (-row.size, -peak[row.point], row.point, arms.index(row.arm))
    )


def _point_text(point: Mapping[str, Any], rank: int) -> str:
    """Return `32B, 8 x 2048, rank 32`, and how many rows at once where not all."""
    completions = point["prompts"] * point["group"]
    words = f"{point['model'].upper()}, {completions} x {point['completion_tokens']}, rank {rank}"
    slots = point.get("slots", 0)
    return words + (f", {slots} rows at once" if slots else "")


def memory(checks: Sequence[Checked], expected: Path, title: str) -> Figure | None:
    """Return the figure of device memory at the peak, planned and measured."""
    rows, looks = memory_rows(checks, expected), _looks(checks)
    if not rows:
        return None
    figure, axes, places = _figure([row.point for row in rows], 0.34)
    middles: dict[str, list[float]] = {}
    for row, place in zip(rows, places, strict=True):
        middles.setdefault(row.point, []).append(place)
        axes.barh(place, row.measured, height=0.85, color=looks[row.arm].colour)
        ends = [place - 0.55, place + 0.55]
        if row.budget is not None and row.budget != row.most:
            axes.plot([row.budget] * 2, ends, color="#808080", linestyle=":", linewidth=1.6)
        if row.most is not None:
            axes.plot([row.most] * 2, ends, color="#000000", linewidth=1.6)
        if row.planned is not None:
            axes.plot(row.planned, place, "D", color="#000000", mfc="white", markersize=5)
    axes.set_yticks([sum(heights) / len(heights) for heights in middles.values()], list(middles))
    axes.set_xlim(left=0)
    axes.set_xlabel("GB of device memory at the peak")
    note = f"{captions.origin(_records(checks))}; most reserved by the allocator, and its context"
    keys: list[Patch | Line2D] = [
        Patch(color=style.colour, label=f"{style.label}, measured") for style in looks.values()
    ]
    keys += [
        Line2D([], [], color="#000000", marker="D", mfc="white", linestyle="", label="planned"),
        Line2D([], [], color="#000000", label="at most accepted"),
        Line2D([], [], color="#808080", linestyle=":", label="allocator's limit"),
    ]
    frame(figure, title, f"{note}\ncompletions x new tokens each; random weights", keys)
    return figure
