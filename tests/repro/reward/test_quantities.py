"""Written numbers and their units, read exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.reward.quantities import read_based, read_quantity, with_unit_marked
from repro.reward.units import read_unit


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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("\\text{ cm}^2", "\\text{ square centimeters}"),
        ("\\text{ ft}^{3}", "\\text{ cubic feet}"),
        ("\\text{ miles/hour}", "\\text{ miles per hour}"),
        ("\\%", "\\text{ percent}"),
        ("\\,\\mathrm{kg}", "\\text{ kilograms}"),
    ],
)
def test_spellings_of_a_unit_are_one(first: str, second: str) -> None:
    assert read_unit(first, words=False) == read_unit(second, words=False) != ""


@pytest.mark.parametrize(
    "rest", ["\\text{ thousand}", "\\text{ or 19}", "x", "+1", "\\text{ squared}"]
)
def test_what_changes_a_number_is_no_unit(rest: str) -> None:
    assert read_unit(rest, words=False) is None


def test_a_base_must_be_able_to_write_the_digits() -> None:
    assert read_based("2516_8") == (1358, 8)
    assert read_based("2519_8") is None
    assert read_based("x_1") is None
    assert read_based("3A_{16}") == (58, 16)


def test_plain_words_are_marked_as_a_unit_or_left_out() -> None:
    assert with_unit_marked("18 cm") == "18\\text{ cm}"
    assert with_unit_marked("18 apples") == "18"
    assert with_unit_marked("18 thousand") == "18 thousand"
    assert with_unit_marked("x + 1") == "x + 1"
