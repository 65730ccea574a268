"""Tables: empty columns left out, each cell on one line; the counts of verdicts by kind."""

from repro.report.tables import in_cell, table


def test_a_table_leaves_out_empty_columns_and_keeps_bars_of_text():
    lines = table(["a", "b", "c"], [["1", "", "|x|"], ["2", "", ""]])
    assert lines == ["| a | c |", "|---|---|", "| 1 | \\|x\\| |", "| 2 |  |", ""]
    assert table(["a"], []) == []


def test_a_cell_is_one_line():
    assert in_cell("mean exp |a - b|\nover rows") == "mean exp \\|a - b\\| over rows"
