"""Bars of the memory that a GRPO step takes at its peak.

The diamond on a bar is what the plan said before the run, a black stroke what this suite accepts at
most, a dotted grey one what the allocator was allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from figures import captions
from figures.style import frame, legend_key, looks_of, new_figure, tidy
from repro.evidence.origins import grouped_by
from repro.judge.check import Checked
from repro.report.verdict_words import stated_bars

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
    bars = {(b.arm, b.metric): b for one in checks for b, _ in stated_bars(one, expected)}
    arms = list(looks_of(checks))
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
                words = f"{point['model'].upper()}, {point['prompts'] * point['group']} x "
                words += f"{point['completion_tokens']}, rank {rank}"
                if slots := point.get("slots"):
                    words += f", {slots} row{'s' * (slots > 1)} at once"
                planned = records[0].value(f"predicted_bytes_{name}")
                most = None if bar is None else bar.accept[1]
                row = MemoryRow(
                    arm=arm,
                    size=int(point["model"].rstrip("b")),
                    point=words,
                    measured=max(peaks) / _GB,
                    planned=planned and planned / _GB,
                    budget=point["budget_bytes"] / _GB or None,
                    most=most and most / _GB,
                )
                rows.append(row)
    by_point = grouped_by(rows, lambda row: row.point).items()
    peak = {point: max(row.measured for row in of) for point, of in by_point}
    return sorted(
        rows, key=lambda row: (-row.size, -peak[row.point], row.point, arms.index(row.arm))
    )


def memory(checks: Sequence[Checked], expected: Path, title: str) -> Figure | None:
    """Return the figure of device memory at the peak, planned and measured."""
    rows, looks = memory_rows(checks, expected), looks_of(checks)
    if not rows:
        return None
    figure = new_figure(9.5, 1.9 + 0.34 * len(rows))
    axes = figure.subplots()
    axes.invert_yaxis()
    tidy(axes, "x")
    gaps = (1.0 if one.point == other.point else 1.7 for one, other in pairwise(rows))
    places = list(accumulate(gaps, initial=0.0))
    records = [record for checked in checks for record in checked.evidence.every_record()]
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
    note = f"{captions.origin(records)}; most reserved by the allocator, and its context"
    keys: list[Patch | Line2D] = [
        Patch(color=style.colour, label=f"{style.label}, measured") for style in looks.values()
    ]
    keys += [
        legend_key("planned", "#000000", marker="D", mfc="white", linestyle=""),
        legend_key("at most accepted", "#000000"),
        legend_key("allocator's limit", "#808080", linestyle=":"),
    ]
    frame(figure, title, f"{note}\ncompletions x new tokens each; random weights", keys)
    return figure
