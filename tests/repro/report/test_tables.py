"""Tables: empty columns left out, devices side by side, no row hidden by another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from repro.judge.check import Checked
from repro.report.tables import (
    Line,
    bar_rows,
    bars_table,
    device_of,
    grouped,
    in_cell,
    side_by_side,
    table,
)
from repro.report.verdicts import stated_bars, word
from repro.run.places import expected_folder
from repro.spec.tier import Tier

EXPECTED = expected_folder(None)
Of = Callable[..., Checked]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_a_table_leaves_out_empty_columns_and_keeps_bars_of_text() -> None:
    lines = table(["a", "b", "c"], [["1", "", "|x|"], ["2", "", ""]])
    assert lines == ["| a | c |", "|---|---|", "| 1 | \\|x\\| |", "| 2 |  |", ""]
    assert table(["a"], []) == []


def test_a_cell_is_one_line() -> None:
    assert in_cell("mean exp |a - b|\nover rows") == "mean exp \\|a - b\\| over rows"


def test_devices_stand_side_by_side_where_their_rows_agree() -> None:
    parts = {
        "nvidia_h100": [Line(common=("x",), own=("1",)), Line(common=("y",), own=("2",))],
        "nvidia_h200": [Line(common=("y",), own=("3",)), Line(common=("z",), own=("4",))],
    }
    lines = side_by_side(["what"], ["measured"], parts)
    assert cells(lines[0]) == ["what", "measured, H100", "measured, H200"]
    assert [cells(line) for line in lines[2:-1]] == [
        ["x", "1", ""],
        ["y", "2", "3"],
        ["z", "", "4"],
    ]


def test_devices_stand_one_below_the_other_where_columns_would_be_too_many() -> None:
    own = ("1", "2", "3", "4", "5")
    parts = {
        "nvidia_h100": [Line(common=("x", "y", "z"), own=own)],
        "nvidia_h200": [Line(common=("x", "y", "z"), own=own[::-1])],
    }
    lines = side_by_side(["a", "b", "c"], ["d", "e", "f", "g", "h"], parts)
    assert cells(lines[0]) == ["a", "b", "c", "device", "d", "e", "f", "g", "h"]
    assert [cells(line) for line in lines[2:-1]] == [
        ["x", "y", "z", "H100", *own],
        ["x", "y", "z", "H200", *own[::-1]],
    ]


def test_one_device_is_not_named() -> None:
    parts = {"nvidia_h200": [Line(common=("x",), own=("1",))]}
    assert cells(side_by_side(["what"], ["measured"], parts)[0]) == ["what", "measured"]


def test_a_row_that_would_hide_another_is_refused_unless_names_tell_them_apart() -> None:
    line = Line(common=("x",), own=("1",))
    with pytest.raises(ValueError, match=r"two rows of NVIDIA H200 are both \('x',\)"):
        side_by_side(["what"], ["measured"], {"nvidia_h200": [line, line]})
    named = [Line(common=("x",), own=(own,), name=own) for own in ("1", "2")]
    assert len(side_by_side(["what"], ["measured"], {"nvidia_h200": named})) == 5


def test_checks_of_one_target_are_grouped_by_device(
    blessed: list[Checked], on_other_device: Of
) -> None:
    checks = [item for checked in blessed for item in (checked, on_other_device(checked))]
    groups = grouped(checks)
    assert len(groups) == sum(item.evidence.count > 0 for item in blessed) > 20
    assert {tuple(group) for group in groups} >= {("nvidia_h200", "nvidia_h100")}
    assert all(device_of(item) == device for group in groups for device, item in group.items())


def test_bars_of_two_devices_stand_in_one_row_each(blessed_of: Of, on_other_device: Of) -> None:
    checked = blessed_of("memory_budgets")
    group = {"nvidia_h200": checked, "nvidia_h100": on_other_device(checked)}
    bars = stated_bars(checked, EXPECTED)
    head, _, *rows, _ = [cells(row.replace("\\|", "/")) for row in bars_table(group, EXPECTED)]
    assert len(rows) == len(bars) > 0
    columns = [column for column, name in enumerate(head) if "verdict" in name]
    said = [[row[column] for row in rows] for column in columns]
    assert said == 2 * [[word(bar.verdict) for bar in bars]]
    counts = [line for line in bar_rows(group, EXPECTED) if line.startswith("Stated bars on ")]
    assert [line.split(":")[0] for line in counts] == [
        "Stated bars on NVIDIA H200", "Stated bars on NVIDIA H100",
    ]  # fmt: skip


def test_a_target_without_bars_has_no_line_about_them(blessed_of: Of) -> None:
    assert bar_rows({"nvidia_h200": blessed_of("figure4", Tier.SMOKE)}, EXPECTED) == []
    assert bar_rows({}, Path()) == []
