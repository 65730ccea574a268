"""The paper's tables and figures in its own panels: measured lines or bars, its numbers over them.

An open mark is the paper's. A value that it gives without a step (a plateau, a peak) is a dashed
stroke at the end, a step without a value a triangle at the foot. What was not measured is said.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isnan
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from figures import captions, curves
from figures.panels import METHODS, PICTURES, Panel, Series
from figures.style import (
    COLOURS,
    GREY,
    Style,
    frame,
    legend_key,
    name_ends,
    new_figure,
    tidy,
    write_beside,
)
from repro.evidence.estimate import Interval, mean_interval
from repro.evidence.paper import PaperCell, every_cell, read_paper
from repro.evidence.store import csv_text
from repro.judge.check import Checked
from repro.models.memory_plan import checkpoint_bytes
from repro.report.systems_rates import absent_because, comparisons, place_in_paper
from repro.spec.checks import require
from repro.spec.claim import Metric
from repro.spec.schedule import sigma_of_stage
from repro.spec.shapes import shape_named
from repro.spec.tier import Tier
from repro.spec.whole_files import replace_text
from repro.targets import find

Found = Mapping[str, Checked]
_MARKERS = dict(zip(COLOURS, "v^DosP", strict=True))
_NEEDLESS = re.compile(r"^(mark|step of the|step where it) | by step \d+$")
# What a picture needs to be understood, beside its origin.
NOTES = {
    "figure15": "the paper's exponential points fall to 5e-4 by stage 6; its Eq. 8, computed here, "
    "reaches that at stage 10",
}
_COMPUTED, _NOT_RUN, _NO_MEMORY = "computed", "not run", "out of memory"
_OPEN: dict[str, Any] = {"marker": "o", "mfc": "white"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What is drawn at one place, by the `paper` or `here`: a row of the CSV file.

    `place` is a bar's label or how the paper says where, `x` the step if it gives one; `y` is None
    of a step alone and of what was not run or ran out of memory; `n` counts what `counted` says,
    seeds or timed repeats, and `origin` is the place in the paper, or target, arm and device of the
    records, or says why there is no value.
    """

    panel: str
    series: str
    source: str
    model: str
    place: str = ""
    x: float | None = None
    y: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    counted: str = "seeds"
    unit: str
    colour: str
    origin: str


def by_target(own: Iterable[Checked], blessed: Iterable[Checked]) -> Found:
    """Return each target's records: own ones, else an H100's, as the paper's card, else any.

    Those of policies made here are left out.
    """
    cards = sorted(blessed, key=lambda checked: "h100" not in checked.evidence.device)
    found: dict[str, Checked] = {}
    for checked in [*own, *cards]:
        if checked.evidence.count and checked.selection.tier is not Tier.SMOKE:
            found.setdefault(checked.selection.target.name, checked)
    return found


def marks_of(name: str, found: Found, expected: Path) -> list[list[Mark]]:
    """Return the marks of each panel of a picture."""
    panels = PICTURES[name]
    known = {row for panel in panels for series in panel.series for row in series.rows}
    drawn = []
    for panel in panels:
        groups = [[found[one] for one in names.split() if one in found] for names in panel.runs]
        files = panel.files or (name,)
        cells = [c for f in files for c in every_cell(expected, f) if _belongs(c, panel, f)]
        if panel.series:
            printed = [mark for cell in cells for mark in _points(panel, cell, known)]
            drawn.append([*_lines(panel, groups), *printed])
        else:
            drawn.append(_bars(panel, cells, groups, expected))
    return drawn


def _belongs(cell: PaperCell, panel: Panel, file: str) -> bool:
    if panel.quantity and not (cell.quantity == panel.quantity and cell.arm):
        return False
    printed_in = file.replace("table", "Table ").replace("figure", "Fig. ")
    begins = cell.row.startswith(panel.cells) or cell.column.startswith(panel.cells)
    return begins and printed_in in cell.place


def _points(panel: Panel, cell: PaperCell, known: set[str]) -> Iterator[Mark]:
    """Yield a cell's marks: for each series that its row names, else one of the whole panel."""
    row, place = (text.removeprefix(panel.cells).strip() for text in (cell.row, cell.column))
    x, y = (cell.value, None) if cell.unit == "steps" else (None, cell.value)
    word, _, number = place.rpartition(" ")
    if word in ("step", "stage"):
        x = float(number)
    elif word == "step of reward":
        y = float(number)
    elif place == "start":
        x = 0.0
    unit = f"difference of {cell.unit}" if cell.quantity == "difference" else cell.unit
    named = {part for part in row.split(", ") if part in known}
    whole = Series(name=row, arm="", rows=(), colour="bf16")
    for series in [s for s in panel.series if named & {*s.rows}] if named else [whole]:
        look = {"series": series.name, "colour": series.colour}
        yield _printed(panel, cell, place=place, x=x, y=y, unit=unit, **look)


def _printed(panel: Panel, cell: PaperCell, **drawn: Any) -> Mark:
    """Return the paper's mark of a cell; `drawn` says of which series, where and how."""
    origin = f"{cell.place} ({cell.confidence})"
    return Mark(panel=panel.title, source="paper", model=panel.model, origin=origin, **drawn)


def _lines(panel: Panel, groups: Sequence[Sequence[Checked]]) -> list[Mark]:
    """Return the curves of the first targets that have any."""
    if panel.metric == "sigma":
        return [mark for series in panel.series for mark in _schedule(panel, series)]
    for checks in groups:
        marks = [
            _along(panel, series, point, _model(checked), _origin(checked, arm), len(runs))
            for checked in checks
            for arm, (points, runs) in curves.training_points(checked, panel.metric).items()
            for series in panel.series
            if series.arm == arm
            for point in points
        ]
        if marks:
            return marks
    return []


def _along(
    panel: Panel, series: Series, point: curves.Point, model: str, origin: str, n: int
) -> Mark:
    return Mark(
        panel=panel.title,
        series=series.name,
        source="here",
        model=model,
        x=point.place,
        y=point.mean.value,
        low=point.mean.low,
        high=point.mean.high,
        n=n,
        unit=panel.unit,
        colour=series.colour,
        origin=origin,
    )


def _schedule(panel: Panel, series: Series) -> list[Mark]:
    """Return sigma by stage as runs have it, but from the figure's 5e-2; stage 0 has no noise."""
    noise = find("figure15").arm(series.arm).noise
    assert noise is not None
    noise = dataclasses.replace(noise, sigma_start=5e-2)
    sigmas = {stage: sigma_of_stage(noise, stage) for stage in range(1, noise.num_stages)}
    points = [curves.Point(place=x, mean=mean_interval([y])) for x, y in sigmas.items()]
    return [_along(panel, series, point, _COMPUTED, "Eq. 8", 1) for point in points]


def _model(checked: Checked) -> str:
    """Return `Qwen2.5-Coder-0.5B-Instruct on GSM8K`, or what systems records have instead."""
    scale = checked.evidence.every_record()[0].config["scale"]
    if "checkpoint" not in scale:
        return "its shapes with random weights"
    name = scale["checkpoint"].split(":")[0].split("/")[-1].removesuffix("-GGUF")
    source = scale["data"]["source"]
    return f"{name} on {'BigMath' if source == 'bigmath' else source.upper()}"


def _origin(checked: Checked, arm: str) -> str:
    return f"{checked.selection.target.name} {arm} {checked.evidence.device}"


def _bars(
    panel: Panel, cells: Sequence[PaperCell], groups: Sequence[Sequence[Checked]], expected: Path
) -> list[Mark]:
    """Return for each cell this suite's mark and, of the paper's models, the paper's."""
    if panel.files:
        ranked = {(int(c.column.rpartition(" ")[2]), c.arm): c for c in cells}
        cells = [dataclasses.replace(c, row=METHODS[c.arm]) for _, c in sorted(ranked.items())]
    drawn = [
        [mark for cell in cells for mark in _bar(panel, cell, checks, expected)]
        for checks in groups
    ]
    # The first of those with the most arms measured.
    best = max(drawn, key=_measured_marks, default=[])
    return best if panel.model or _measured_marks(best) else []


def _measured_marks(marks: Sequence[Mark]) -> int:
    return sum(mark.source == "here" and mark.n > 0 for mark in marks)


def _bar(panel: Panel, cell: PaperCell, checks: Sequence[Checked], to: Path) -> Iterator[Mark]:
    row = "" if panel.cells and cell.row.startswith(panel.cells) else cell.row
    place = f"{row} {cell.column.removeprefix(panel.cells).strip()}".strip()
    form = cell.arm.rpartition("_")[2]
    colour = {"full": "full", "aqn": "noise"}.get(form, cell.arm.partition("_")[0])
    y = None if isnan(cell.value) else cell.value
    look = {"series": cell.row, "colour": colour, "unit": panel.unit}
    mark = _printed(panel, cell, place=place, y=y, **look)
    if panel.model:
        yield mark
    here, model, origin = _measured(panel, cell, checks, to)
    mark = dataclasses.replace(mark, source="here", model=model, origin=origin, y=None)
    # Steps are timed again in one run; rates and accuracies are of seeds.
    if panel.metric in ("speedup", "step_seconds"):
        mark = dataclasses.replace(mark, counted="timed repeats")
    if here is not None:
        mark = dataclasses.replace(mark, y=here.value, low=here.low, high=here.high, n=here.n)
    yield mark


def _measured(
    panel: Panel, cell: PaperCell, checks: Sequence[Checked], expected: Path
) -> tuple[Interval | None, str, str]:
    """Return the value of a cell's arm here, its model and origin; QLoRA is by bitsandbytes."""
    column, weights = f"{cell.column} {panel.point}".lower().strip(), cell.arm.partition("_")[0]
    if panel.metric == "size":
        gigabytes = checkpoint_bytes(shape_named(column), weights) / 1e9  # type: ignore[arg-type]
        return Interval(value=gigabytes, low=None, high=None, n=1), _COMPUTED, "checkpoint_bytes"
    if panel.metric == "speedup" and cell.arm == "bf16_lora":
        return Interval(value=1.0, low=None, high=None, n=1), _COMPUTED, "by definition"
    place = column, cell.arm.removesuffix("_aqn")
    gain = cell.quantity == "rollout_ratio_printed"
    found = [
        (checked, arm.name, metric)
        for asked in panel.metric.split()
        for checked in checks
        for arm in checked.selection.target.arms
        for metric in checked.selection.target.metrics
        if (metric.name, arm.name) == (asked, cell.arm)
        or (metric.quantity == asked and place_in_paper(metric, arm) == place)
    ]
    found.sort(key=lambda one: "_bitsandbytes" not in one[1])
    for checked, arm, metric in found:
        interval = _interval(checked, arm, metric, expected if gain else None)
        if interval is not None:
            return interval, _model(checked), _origin(checked, arm)
    reasons = (absent_because(checked, arm, metric.name) for checked, arm, metric in found)
    return None, "", next(filter(None, reasons), _NOT_RUN)


def _interval(checked: Checked, arm: str, metric: Metric, expected: Path | None) -> Interval | None:
    """Return the mean over seeds, the median of timed repeats, or with `expected` a rate's gain."""
    if expected is not None:
        ratios = {(p.fast, p.model, p.place): p.ratio for p in comparisons(checked, expected)}
        return ratios.get((arm, metric.model, metric.batch))
    by_seed = checked.evidence.values(metric.name).get(arm, {})
    numbers = [*by_seed.values()]
    if any(isinstance(key, tuple) for key in by_seed):
        ends = {"low": min(numbers), "high": max(numbers)}
        return Interval(value=median(numbers), n=len(numbers), **ends)
    return mean_interval(numbers) if numbers else None


def draw(
    name: str, found: Found, expected: Path, *, every_panel: bool = False
) -> tuple[Figure, list[Mark]]:
    """Return a picture and its marks: of the panels with measurements, if any, unless every one."""
    panels = PICTURES[name]
    # As many side by side as make whole rows, five at most.
    columns = max(count for count in range(1, 6) if len(panels) % count == 0)
    pairs = zip(panels, marks_of(name, found, expected), strict=True)
    drawn = [(panel, marks) for panel, marks in pairs if marks]
    require(bool(drawn), f"{expected} has no numbers of {name}")
    measured = [(panel, marks) for panel, marks in drawn if _measured_marks(marks)]
    drawn = drawn if every_panel or not measured else measured
    every = [mark for _, marks in drawn for mark in marks]
    columns, curved = min(columns, len(drawn)), bool(panels[0].series)
    rows, most = ceil(len(drawn) / columns), max(len(_places(marks)) for _, marks in drawn)
    width, height = (3.7, 3.3) if curved else (3.3, 1.3 + 0.27 * most)
    figure = new_figure(max(6.4, width * columns), 1.0 + height * rows)
    grid = [*figure.subplots(rows, columns, squeeze=False).flat]
    ends = _common_ends(drawn) if curved else (0.0, 0.0)
    for index, (axes, (panel, marks)) in enumerate(zip(grid, drawn, strict=False)):
        if curved:
            _draw_curves(axes, panel, marks, ends)
        else:
            _draw_bars(axes, panel, marks)
        if not curved and index % columns and _places(marks) == _places(drawn[index - 1][1]):
            axes.tick_params(labelleft=False)
        _head(axes, panel, marks)
    for axes in grid[len(drawn) :]:
        axes.set_axis_off()
    origins = [mark.origin.split(" ") for mark in every]
    arms = {(words[0], words[1]) for words in origins if words[0] in found}
    shown = [found[target].evidence.records[arm] for target, arm in sorted(arms)]
    records = [record for by_seed in shown for record in by_seed.values()]
    note = f"{captions.origin(records)}; " if records else ""
    if curved and records:
        note += f"moving average over {curves.WINDOW} steps; "
    if any("random weights" in mark.model for mark in every):
        note += "products by this project's kernels, QLoRA's by bitsandbytes; "
    note += f"{NOTES[name]}; " if name in NOTES else ""
    title = read_paper(expected / "paper" / f"{name}.json")[0]["title"]
    frame(figure, title, f"{note}the paper: arXiv 2510.11696v1", _keys(panels, every))
    return figure, every


def _places(marks: Sequence[Mark]) -> list[str]:
    return list(dict.fromkeys(mark.place for mark in marks))


def _common_ends(drawn: Sequence[tuple[Panel, Sequence[Mark]]]) -> tuple[float, float]:
    """Return where the y axes of panels of curves begin and end, which have one unit."""
    every = [mark for _, marks in drawn for mark in marks]
    shown = [mark for mark in every if not mark.unit.startswith("difference")]
    values = [y for m in shown for y in (m.y, m.low, m.high) if y is not None]
    values += [end for panel, _ in drawn for end in panel.y]
    return min(values), max(values)


def _head(axes: Axes, panel: Panel, marks: Sequence[Mark]) -> None:
    """Write the panel's title and models above it, and *not run* across curves that were not."""
    measured = [mark for mark in marks if mark.source == "here" and mark.n]
    counts: dict[str, set[int]] = {}
    for mark in measured:
        if mark.model != _COMPUTED:
            counts.setdefault(f"{mark.model}, {{}} {mark.counted}", set()).add(mark.n)
    here = [words.format(captions.listed(sorted(of), " to ")) for words, of in counts.items()]
    here = here or [_COMPUTED if measured else _NOT_RUN]
    lines = [panel.title, f"here: {'; '.join(here)}"]
    if panel.model and panel.model not in panel.title:
        lines.append(f"paper: {panel.model}")
    letters = 52 if panel.series else 34
    axes.set_title("\n".join(fill(line, letters) for line in lines), fontsize=8, loc="left")
    if panel.series and not measured:
        box = {"facecolor": "white", "edgecolor": GREY}
        look: dict[str, Any] = {"ha": "center", "fontsize": 16, "color": GREY, "bbox": box}
        axes.text(0.5, 0.5, _NOT_RUN, transform=axes.transAxes, **look)


def _draw_curves(
    axes: Axes, panel: Panel, marks: Sequence[Mark], ends: tuple[float, float]
) -> None:
    """Draw lines with their bands, and the paper's marks; `ends` are those of the y axis."""
    tidy(axes)
    for series in panel.series:
        line = [m for m in marks if m.series == series.name and m.source == "here"]
        # None becomes nan, which is not drawn.
        values = np.array([(m.x, m.y, m.low, m.high) for m in line], dtype=float).reshape(-1, 4)
        places, means, lows, highs = values.T
        axes.plot(places, means, color=COLOURS[series.colour], linewidth=1.6)
        axes.fill_between(
            places, lows, highs, color=COLOURS[series.colour], alpha=0.15, linewidth=0
        )
    low = panel.x[0]
    end = max([panel.x[1], *(mark.x for mark in marks if mark.x is not None)])
    axes.set_xlim(low - 0.02 * (end - low), end + 0.02 * (end - low))
    bottom, top = ends
    axes.set_ylim(bottom - 0.06 * (top - bottom), top + 0.06 * (top - bottom))
    late: list[tuple[Style, float, float]] = []
    for mark in (mark for mark in marks if mark.source == "paper"):
        late += _draw_papers(axes, mark, low, end)
    name_ends(axes, late, at=1.06 * end, gap=0.07)
    axes.set(xlabel="stage" if panel.metric == "sigma" else "training steps", ylabel=panel.unit)


def _draw_papers(
    axes: Axes, mark: Mark, low: float, end: float
) -> Iterator[tuple[Style, float, float]]:
    """Draw the paper's mark; yield what to name at the end of the axis."""
    colour, place = COLOURS[mark.colour], _NEEDLESS.sub("", mark.place)
    style: dict[str, Any] = {"color": colour, "mfc": "white", "markersize": 5.5, "zorder": 4}
    words: dict[str, Any] = {"fontsize": 7, "color": GREY}
    if mark.y is None:
        foot = (mark.x or 0.0, axes.get_ylim()[0])
        axes.plot(*foot, "^", clip_on=False, **style)
        write_beside(axes, place, foot, (0, 6), ha="center", **words)
    elif mark.unit.startswith("difference"):
        said = f"the paper, {mark.series}: {mark.y:+g} {place}"
        write_beside(axes, said, (0.03, 0.95), (0, 0), xycoords="axes fraction", **words)
    elif mark.x is not None:
        axes.plot(mark.x, mark.y, _MARKERS[mark.colour], **style)
    else:
        early = "early" in place
        start = low + (0.05 if early else 0.8) * (end - low)
        stretch = [start, start + 0.2 * (end - low)]
        axes.plot(stretch, [mark.y] * 2, color=colour, linestyle=(0, (3, 2)), linewidth=1.6)
        if early:
            write_beside(axes, place, (start, mark.y), (0, 4), **words)
        else:
            yield Style(label=place, colour=colour, line="-"), end, mark.y


def _draw_bars(axes: Axes, panel: Panel, marks: Sequence[Mark]) -> None:
    """Draw bars of what was measured and circles for the paper, both numbers behind them."""
    places = _places(marks)
    ends, words = dict.fromkeys(places, 0.0), dict.fromkeys(places, "")
    for mark in sorted(marks, key=lambda mark: mark.source):
        row = places.index(mark.place)
        ends[mark.place] = max(ends[mark.place], mark.high or mark.y or 0.0)
        if mark.source == "paper":
            words[mark.place] += f" ({_NO_MEMORY if mark.y is None else f'{mark.y:,g}'})"
            if mark.y is not None:
                axes.plot(mark.y, row, "o", color="black", mfc="white")
        elif mark.y is None:
            words[mark.place] = _NOT_RUN if mark.origin == _NOT_RUN else _NO_MEMORY
        else:
            axes.barh(row, mark.y, 0.7, color=COLOURS[mark.colour], alpha=0.8)
            if mark.low is not None and mark.high is not None:
                axes.plot([mark.low, mark.high], [row] * 2, color="black", linewidth=1.2)
            digits = 0 if mark.y >= 1000 else 1 if mark.y >= 10 else 2
            words[mark.place] = f"{mark.y:,.{digits}f}"
    for row, place in enumerate(places):
        write_beside(axes, words[place], (ends[place], row), (6, 0), va="center", fontsize=7.5)
    tidy(axes, "x")
    if panel.unit.startswith("times"):
        axes.axvline(1.0, color=GREY, linestyle=":", linewidth=1.2)
    axes.set_yticks(range(len(places)), places, fontsize=8)
    axes.set(ylim=(len(places) - 0.5, -0.5), xlabel=panel.unit)
    axes.set_xlim(0, 1.6 * (max(ends.values()) or 1.0))
    if "%" in panel.unit:
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 100])


def _keys(panels: Sequence[Panel], marks: Sequence[Mark]) -> list[Line2D | Patch]:
    """Return the legend: the series by their names in the paper, and whose marks are whose."""
    here = {mark.series: mark.model for mark in marks if mark.source == "here" and mark.n}
    if not panels[0].series:
        return [
            Patch(color=GREY, alpha=0.8, label="bar, first number: measured here"),
            legend_key("95 % t interval; of timed steps the range", "black"),
            legend_key("circle, (number): the paper", "black", linestyle="", **_OPEN),
        ]
    keys: list[Line2D | Patch] = []
    for series in {s.name: s for panel in panels for s in panel.series}.values():
        label = series.name if series.name in here or not here else f"{series.name}, not run"
        look = _OPEN | {"marker": _MARKERS[series.colour], "markersize": 5.5}
        keys.append(legend_key(label, COLOURS[series.colour], **look))
    if here:
        words = _COMPUTED if _COMPUTED in here.values() else "measured here, 95 % t interval"
        keys.append(legend_key(f"line: {words}"))
    open_mark = "open mark, dashed stroke: the paper"
    return [*keys, legend_key(open_mark, linestyle="", markersize=5.5, **_OPEN)]


def write_csv(marks: Sequence[Mark], path: Path) -> None:
    """Write exactly what is drawn, a row for each mark."""
    fields = [field.name for field in dataclasses.fields(Mark)]
    replace_text(path, csv_text(fields, map(dataclasses.astuple, marks)))
