"""Written numbers and what may be compared with a gold; pairs are in test_equality."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.reward.expression import comparable, tidy
from repro.reward.quantities import read_quantity


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
def test_a_written_number_has_an_exact_value_and_a_unit(text, value, unit):
    quantity = read_quantity(text)
    assert (quantity.value, quantity.unit) == (value, unit)


@given(st.fractions(max_denominator=10**6), st.sampled_from(["", "\\text{ cm}", "\\%"]))
@settings(max_examples=200, deadline=None)
def test_any_fraction_is_read_as_itself(value, unit):
    quantity = read_quantity(f"\\frac{{{value.numerator}}}{{{value.denominator}}}{unit}")
    assert (quantity.value, quantity.reduced) == (value, value.denominator > 1)


def test_what_is_no_written_number_is_not_read():
    texts = ["", "9+9", "1/0", "1/2/3", "1e3", "7,00", "1_000", "\u0661", "\\frac{1}{0}", "-"]
    texts += ["\\frac{x}{2}", "1 2", "(18)", "3m", "3 xy", "2n", "nan", "9" * 500]
    # What changes a number is no unit.
    texts += ["18\\text{ thousand}", "18\\text{ or 19}", "18x", "18+1", "18\\text{ squared}"]
    assert [text for text in texts if read_quantity(text, words=True) is not None] == []


def test_a_gold_that_may_not_be_compared_with_itself_is_at_fault():
    for gold in ("\\frac{1}{", "}{", "x\x00", "\\boxed{1}\\boxed{2}", "x\ud800"):
        assert comparable(gold, gold) is None, gold


def test_a_long_answer_is_read_in_linear_time():
    looks = ("\\mathbf{" * 1000, "x" + " \\," * 2600 + "x", "{" * 4000 + "}" * 4000, "*" * 8000)
    start = time.process_time()
    for text in looks:
        comparable("x+1", tidy(text))
    assert time.process_time() - start < 0.5
    for text in ("1" * 8000, "1," * 4000, "{" * 8000, "$" * 8000, "\\boxed{" * 1000, "=" * 8000):
        assert comparable("18", tidy(text)) is None
        comparable("x+1", tidy(text))
