"""Tables: empty columns left out, devices side by side, no row hidden by another."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from repro.judge.check import Checked
from repro.report.tables import bars_table, in_cell, side_by_side, table
from repro.report.verdict_words import stated_bars, word
from repro.run.places import expected_folder
from repro.spec.tier import Tier

EXPECTED = expected_folder(None)
Of = Callable[..., Checked]
DEVICES = ("nvidia_h100_80gb_hbm3", "nvidia_h200")


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
        "nvidia_h100": [(("x",), ("1",)), (("y",), ("2",))],
        "nvidia_h200": [(("y",), ("3",)), (("z",), ("4",))],
    }
    lines = side_by_side(["what"], ["measured"], parts)
    assert cells(lines[0]) == ["what", "measured, H100", "measured, H200"]
    assert [cells(line) for line in lines[2:-1]] == [
        ["x", "1", ""],
        ["y", "2", "3"],
        ["z", "", "4"],
    ]
    alone = side_by_side(["what"], ["measured"], {"nvidia_h200": parts["nvidia_h200"]})
    assert cells(alone[0]) == ["what", "measured"]


def test_a_row_that_would_hide_another_is_refused() -> None:
    line = (("x",), ("1",))
    with pytest.raises(ValueError, match=r"two rows of NVIDIA H200 are both \('x',\)"):
        side_by_side(["what"], ["measured"], {"nvidia_h200": [line, line]})


def test_bars_of_two_devices_stand_in_one_row_each(blessed_of: Of) -> None:
    checks = [blessed_of("memory_budgets", device=name) for name in DEVICES]
    words = [[word(bar.verdict) for bar in stated_bars(one, EXPECTED)] for one in checks]
    lines = bars_table(checks, EXPECTED)
    heads, _, *rows = [cells(row.replace("\\|", "/")) for row in lines[:-1]]
    places = [heads.index(f"verdict, {device}") for device in ("H100", "H200")]
    assert len(rows) > 0
    assert [[row[place] for row in rows] for place in places] == words


def test_a_target_without_bars_has_no_table_of_them(blessed_of: Of) -> None:
    assert bars_table([blessed_of("figure4", Tier.SMOKE)], EXPECTED) == []
