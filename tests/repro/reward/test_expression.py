"""Which answers may be compared with a gold."""

from __future__ import annotations

import time

from repro.reward.expression import comparable, tidy


def test_a_number_is_compared_in_one_spelling_and_only_with_a_written_number() -> None:
    assert comparable("18", "36/2") is None
    assert comparable("0.5", "1/2") == ("\\frac{1}{2}", "\\frac{1}{2}")
    assert comparable("\\frac{1}{2}", "0.5") == ("\\frac{1}{2}", "\\frac{1}{2}")
    assert comparable("\\frac{1}{2}", "1-0.5") is None
    assert comparable("18", "19") is None


def test_a_name_is_dropped_and_an_equation_is_compared_with_an_equation() -> None:
    assert comparable("18", "x = 18") == ("18", "18")
    assert comparable("18", "19 = 18") is None
    assert comparable("x+1", "y = x+1") == ("x+1", "x+1")
    assert comparable("x+1", "2 = x+1") is None
    assert comparable("y = x+1", "z = x+1") is None
    assert comparable("x^2+y^2=1", "x^2+y^2") is None


def test_a_gold_that_may_not_be_compared_with_itself_is_at_fault() -> None:
    for gold in ("\\frac{1}{", "}{", "x\x00", "\\boxed{1}\\boxed{2}", "x\ud800"):
        assert comparable(gold, gold) is None, gold


def test_a_long_answer_is_read_in_linear_time() -> None:
    looks = ("\\mathbf{" * 1000, "x" + " \\," * 2600 + "x", "{" * 4000 + "}" * 4000, "*" * 8000)
    start = time.process_time()
    for text in looks:
        comparable("x+1", tidy(text))
    assert time.process_time() - start < 0.5
    for text in ("1" * 8000, "1," * 4000, "{" * 8000, "$" * 8000, "\\boxed{" * 1000, "=" * 8000):
        assert comparable("18", tidy(text)) is None
        comparable("x+1", tidy(text))
