"""Numbers as text: units as people say them, spans, devices' names; the cells of a table."""

import pytest

from repro.evidence.verdicts.expectation import Expectation
from repro.report.numbers import bar_text, cell_text, device_heads, quantity, span
from repro.report.tables import table


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (35_304_833_024.0, "bytes", "32.9 GiB (35.3 GB)"),
        (1000.0, "bytes", "1000 B"),
        (9.812, "seconds", "9.81 s"),
        (0.0412, "seconds", "41.2 ms"),
        (12332.4, "tokens per second", "12,332 tokens/s"),
        (1.794, "ratio", "1.79x"),
        (88.23, "percent", "88.2"),
    ],
)
def test_a_quantity_is_printed_as_people_say_it(value, unit, text):
    assert quantity(value, unit) == text


def test_cells_carry_their_unit():
    assert cell_text([35.2e9], unit="bytes") == "32.8 GiB (35.2 GB) (n = 1)"
    assert cell_text([10.1, 10.0, 10.0], unit="seconds") == "10.0 ± 0.1 s (n = 3)"
    assert cell_text([2**31, 2**31 + 2**20, 2**31], unit="bytes") == "2 ± 0.0014 GiB (n = 3)"
    assert cell_text([80.0, 82.0, 84.0]) == "82.0 ± 5.0 (n = 3)"


@pytest.mark.parametrize(
    ("accept", "unit", "text"),
    [
        ((1.5, None), "ratio", "at least 1.5x"),
        ((None, 0.6), "ratio", "at most 0.6x"),
        ((1.0, 1.0), "ratio", "exactly 1x"),
        ((0.98, 1.02), "ratio", "0.98x to 1.02x"),
        # A table of bars has several units.
        ((88.234, None), "percent", "at least 88.23 %"),
        ((0.25, None), "nats", "at least 0.25 nats"),
    ],
)
def test_a_bar_is_said_by_its_bounds(accept, unit, text):
    bar = Expectation(arm="a", metric="m", accept=accept, source="derived", because="a reason")
    assert bar_text(bar, unit) == text


def test_heads_name_devices_by_their_models_where_these_differ():
    h100, h200 = "nvidia_h100_80gb_hbm3", "nvidia_h200"
    assert device_heads([h100, h200]) == {h100: "H100", h200: "H200"}
    pcie = "nvidia_h100_pcie"
    assert device_heads([h100, pcie]) == {h100: "NVIDIA H100 80GB HBM3", pcie: "NVIDIA H100 PCIE"}
    portable = f"{h200}_portable"
    assert device_heads(["", portable]) == {"": "CPU", portable: "H200, portable kernels"}


def test_a_span_names_one_number_once():
    said = [span(of) for of in ([1.204, None, 1.396], [2, 2], [None])]
    assert said == ["1.20 to 1.40x", "2.00x", ""]


def test_a_table_leaves_out_empty_columns_and_keeps_bars_of_text_and_a_cell_on_one_line():
    lines = table(["a", "b", "c"], [["1", "", "|x|\ny"], ["2", "", ""]])
    assert lines == ["| a | c |", "|---|---|", "| 1 | \\|x\\| y |", "| 2 |  |", ""]
    assert table(["a"], []) == []
