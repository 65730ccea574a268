"""The tables of `kernels/README.md`, from the blessed records of the target `kernels`.

A grid has a column per number of rows of x (M), so its devices are in rows; the other tables have
them in columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from repro.judge.check import Checked
from repro.report.numbers import bar_text, cell_text, device_heads, device_title
from repro.report.tables import (
    NOTHING,
    Line,
    bars_table,
    device_of,
    origin_text,
    side_by_side,
    table,
)
from repro.report.tidy import rendered
from repro.report.verdict_words import Bar, counted, stated_bars
from repro.spec.config import OperationScale
from repro.spec.tier import Tier
from repro.targets import kernel_speed

# Checks of the target by device.
ChecksByDevice = Mapping[str, Checked]
Bars = Mapping[tuple[str, str], Bar]
# A line of a grid: its label, the arm, and the metric of each column ("" leaves a cell empty).
GridLine = tuple[str, str, Sequence[str]]

_GRIDS = ("ratio_", "adapter_factor_", "portable_ratio_")


def kernel_rows(checks: Sequence[Checked], expected: Path) -> list[str]:
    """Return the measurements of the kernels as lines of Markdown."""
    own = [c for c in checks if c.selection.target.name == kernel_speed.KERNELS.name]
    group = {device_of(checked): checked for checked in own if checked.evidence.count}
    if not group:
        return NOTHING
    stated = {device: stated_bars(checked, expected) for device, checked in group.items()}
    bars = {bar.key: bar for of_device in stated.values() for bar in of_device}
    scale = kernel_speed.KERNELS.scales[Tier.SYSTEMS]
    assert isinstance(scale, OperationScale)
    grids = {
        "layers": (scale.rows, _by_block(scale.blocks, scale.rows, kernel_speed.ratio_name)),
        "backward": (
            scale.backward_rows,
            _by_block(scale.blocks, scale.backward_rows, kernel_speed.backward_name),
        ),
        "adapted": (
            scale.adapter_rows,
            _by_block(scale.blocks, scale.adapter_rows, kernel_speed.adapter_name),
        ),
        "portable": (kernel_speed.PORTABLE_ROWS, _portable_lines()),
    }
    not_met = ("contradicted", "inconclusive", "not run")
    tables = {
        **{name: _grid(group, bars, rows, grid) for name, (rows, grid) in grids.items()},
        "operations": _other_operations(group, bars),
        "not_met": bars_table([*group.values()], expected, *not_met),
    }
    return rendered(
        "kernels.md",
        counts={device_title(d): counted(b.verdict for b in of) for d, of in stated.items()},
        origins=[origin_text(checked) for checked in group.values()],
        rank=scale.adapter_rank,
        **{name: "\n".join(lines) for name, lines in tables.items()},
    )


def _by_block(
    blocks: Sequence[str], rows: Sequence[int], name: kernel_speed.Naming
) -> list[GridLine]:
    return [
        (f"{block.upper()} {arm.upper()}", arm, [name(block, count) for count in rows])
        for block in blocks
        for arm in kernel_speed.FORMATS
    ]


def _portable_lines() -> list[GridLine]:
    known = {metric.name for metric in kernel_speed.KERNELS.metrics}
    names = {
        format: [kernel_speed.portable_name(format, count) for count in kernel_speed.PORTABLE_ROWS]
        for format in kernel_speed.FORMATS
    }
    return [
        (f"7B {format.upper()}", "operations", [name if name in known else "" for name in columns])
        for format, columns in names.items()
    ]


def _grid(
    group: ChecksByDevice, bars: Bars, heads: Sequence[int], grid: Sequence[GridLine]
) -> list[str]:
    """Return a table over rows of x; below each line that has bars, `bar (goal)`."""
    rows, devices = [], device_heads(group)
    for label, arm, names in grid:
        for device, checked in group.items():
            title = f"{label}, {devices[device]}" if len(group) > 1 else label
            rows.append([title, *(_mean(checked, arm, name) for name in names)])
        stated = [bars.get((arm, name)) for name in names]
        # The bars of MXFP4 are those of NVFP4 less 5 %.
        if arm != "mxfp4" and sum(bar is not None for bar in stated) > 1:
            rows.append(["bar (goal)", *map(_bound, stated)])
    return table(["M", *map(str, heads)], rows)


def _mean(checked: Checked, arm: str, name: str) -> str:
    values = checked.evidence.values(name).get(arm, {}) if name else {}
    return f"{sum(values.values()) / len(values):.2f}" if values else ""


def _bound(bar: Bar | None) -> str:
    if bar is None:
        return ""
    (low, high), goal = bar.expectation.accept, bar.expectation.goal
    return f"{high if low is None else low:.3g}{'' if goal is None else f' ({goal:.3g})'}"


def _other_operations(group: ChecksByDevice, bars: Bars) -> list[str]:
    parts: dict[str, list[Line]] = {device: [] for device in group}
    for device, checked in group.items():
        for metric in checked.selection.target.metrics:
            values = checked.evidence.values(metric.name).get("operations", {})
            if not values or metric.name.startswith(_GRIDS):
                continue
            bar = bars.get(("operations", metric.name))
            ratio = metric.unit == "ratio" or bar is None
            bound = _bound(bar) if ratio or bar is None else bar_text(bar.expectation, metric.unit)
            mean = cell_text([*values.values()], n=False, unit=metric.unit).removesuffix(" x")
            parts[device].append(((metric.title, bound), (mean,)))
    return side_by_side(["operation", "bar (goal)"], ["mean ± 95 % interval"], parts)
