"""Tables: empty columns left out, each cell on one line; the counts of verdicts by kind."""

from repro.report.tables import in_cell, table
from repro.report.verdict_words import Kind, count_rows, counted, of_kind
from repro.run.places import expected_folder
from repro.spec.tier import Tier


def test_a_table_leaves_out_empty_columns_and_keeps_bars_of_text():
    lines = table(["a", "b", "c"], [["1", "", "|x|"], ["2", "", ""]])
    assert lines == ["| a | c |", "|---|---|", "| 1 | \\|x\\| |", "| 2 |  |", ""]
    assert table(["a"], []) == []


def test_a_cell_is_one_line():
    assert in_cell("mean exp |a - b|\nover rows") == "mean exp \\|a - b\\| over rows"


def test_kinds_are_counted_apart_and_every_claim_once(checks_of):
    smoke = [item for item in checks_of() if item.selection.tier is Tier.SMOKE]
    lines = count_rows(smoke, expected_folder(None))
    for kind in (Kind.PAPER, Kind.MACHINERY):
        verdicts = [verdict for checked in smoke for verdict in of_kind(checked, kind)]
        assert f"| {kind.value} | {counted(verdicts)} |" in lines
