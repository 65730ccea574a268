"""Written numbers and their units, read exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.reward.quantities import read_based, read_quantity


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("-\\$1{,}250.50", Fraction(-2501, 2), "dollar"),
        ("3\\frac{1}{2}\\text{ hours}", Fraction(7, 2), "hour"),
        ("\\frac{-3}{4}", Fraction(-3, 4), ""),
        ("1.5 \\times 10^{-3}", Fraction(3, 2000), ""),
        ("0.1\\overline{6}", Fraction(1, 6), ""),
        ("35\\%", Fraction(35), "percent"),
        ("45^\\circ", Fraction(45), "degree"),
        ("\\$18\\text{ per day}", Fraction(18), "dollar/day"),
    ],
)
def test_a_written_number_has_an_exact_value_and_a_unit(
    text: str, value: Fraction, unit: str
) -> None:
    quantity = read_quantity(text)
    assert quantity is not None
    assert (quantity.value, quantity.unit) == (value, unit)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9+9",
        "1/0",
        "1/2/3",
        "1e3",
        "7,00",
        "1_000",
        "\u0661",
        "\\frac{1}{0}",
        "\\frac{x}{2}",
        "1 2",
        "(18)",
        "3m",
        "3 xy",
        "2n",
        "nan",
        "9" * 500,
        "-",
    ],
)
def test_what_is_no_written_number_is_not_read(text: str) -> None:
    assert read_quantity(text, words=True) is None


@given(st.fractions(max_denominator=10**6), st.sampled_from(["", "\\text{ cm}", "\\%"]))
@settings(max_examples=200, deadline=None)
def test_any_fraction_is_read_as_itself(value: Fraction, unit: str) -> None:
    text = f"\\frac{{{value.numerator}}}{{{value.denominator}}}{unit}"
    quantity = read_quantity(text)
    assert quantity is not None
    assert quantity.value == value
    assert quantity.reduced == (value.denominator > 1)


def test_a_base_must_be_able_to_write_the_digits() -> None:
    assert read_based("2516_8") == (1358, 8)
    assert read_based("2519_8") is None
    assert read_based("x_1") is None
    assert read_based("3A_{16}") == (58, 16)
