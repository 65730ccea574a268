"""What a copy of the question earns, on real sets and on problems like MATH's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from math import gcd
from pathlib import Path

import pytest

from repro.reward.grader import GraderPool
from repro.reward.restating import copies, paid_copies

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
FILES = ("gsm8k/train", "gsm8k/test", "svamp/test", "mawps/train", "mawps/test")
MOST = 0.002
Made = tuple[str, str]


def _digits(value: int, base: int) -> str:
    """Return a number's digits in a base up to ten."""
    return "" if value == 0 else _digits(value // base, base) + str(value % base)


def _root(rng: random.Random) -> Made:
    outside, inside = rng.randint(2, 19), rng.choice([2, 3, 5, 6, 7, 10, 11, 13])
    return f"Simplify $\\sqrt{{{outside**2 * inside}}}$.", f"{outside}\\sqrt{{{inside}}}"


def _denominator(rng: random.Random) -> Made:
    prime = rng.choice([2, 3, 5, 7, 11])
    return (
        f"Rationalize the denominator of $\\frac{{1}}{{\\sqrt{{{prime}}}}}$.",
        f"\\frac{{\\sqrt{{{prime}}}}}{{{prime}}}",
    )


def _expand(rng: random.Random) -> Made:
    a, b = rng.randint(1, 9), rng.randint(10, 19)
    return f"Expand the product ${{(x+{a})(x+{b})}}$.", f"x^2+{a + b}x+{a * b}"


def _factor(rng: random.Random) -> Made:
    a, b = rng.randint(1, 9), rng.randint(10, 19)
    return f"Factor $x^2+{a + b}x+{a * b}$.", f"(x+{a})(x+{b})"


def _distribute(rng: random.Random) -> Made:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return f"Expand ${a}(x+{b})$.", f"{a}x+{a * b}"


def _like_terms(rng: random.Random) -> Made:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return f"Simplify ${a}y + {b}y$.", f"{a + b}y"


def _powers(rng: random.Random) -> Made:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return f"Simplify $x^{{{a}}} \\cdot x^{{{b}}}$.", f"x^{{{a + b}}}"


def _square(rng: random.Random) -> Made:
    a = rng.randint(2, 12)
    return f"Simplify $({a}x)^2$.", f"{a * a}x^2"


def _cancel(rng: random.Random) -> Made:
    while True:
        top, bottom, factor = rng.randint(1, 20), rng.randint(2, 30), rng.randint(2, 12)
        if gcd(top, bottom) == 1:
            break
    question = f"Simplify $\\frac{{{top * factor}}}{{{bottom * factor}}}$ to lowest terms."
    return question, f"\\frac{{{top}}}{{{bottom}}}"


def _add_fractions(rng: random.Random) -> Made:
    a, b = rng.choice([(2, 3), (3, 4), (5, 7), (4, 9)])
    return (
        f"Compute $\\frac{{1}}{{{a}}} + \\frac{{1}}{{{b}}}$ as a common fraction.",
        f"\\frac{{{a + b}}}{{{a * b}}}",
    )


def _evaluate(rng: random.Random) -> Made:
    a, b = rng.randint(2, 40), rng.randint(2, 40)
    return f"What is ${a} \\cdot {b} + {a}^2$?", str(a * b + a * a)


def _base(rng: random.Random) -> Made:
    value, base = rng.randint(100, 900), rng.choice([5, 6, 7, 8, 9])
    return f"Write ${value}_{{10}}$ in base ${base}$.", f"{_digits(value, base)}_{base}"


def _base_sum(rng: random.Random) -> Made:
    a, b = rng.randint(30, 200), rng.randint(30, 200)
    question = f"Find the sum ${_digits(a, 7)}_7 + {_digits(b, 7)}_7$ in base $7$."
    return question, f"{_digits(a + b, 7)}_7"


def _mixed(rng: random.Random) -> Made:
    a, b = rng.randint(1, 5), rng.randint(6, 9)
    question = f"Compute ${a}\\frac{{1}}{{3}} + {b}\\frac{{1}}{{3}}$ as a mixed number."
    return question, f"{a + b}\\frac{{2}}{{3}}"


def _unit(rng: random.Random) -> Made:
    a, b = rng.randint(2, 30), rng.randint(2, 30)
    question = f"A rectangle has sides ${a}$ cm and ${b}$ cm. What is ${a} \\cdot {b}$ in cm$^2$?"
    return question, f"{a * b}\\text{{ cm}}^2"


def _slope(rng: random.Random) -> Made:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return f"Write ${a}x - y + {b} = 0$ in slope-intercept form.", f"y={a}x+{b}"


def _roots_of(rng: random.Random) -> Made:
    a, b = rng.randint(1, 9), rng.randint(10, 19)
    return f"Find all roots of $x^2-{a + b}x+{a * b} = 0$.", f"{a}, {b}"


def _conjugate(rng: random.Random) -> Made:
    a = rng.choice([3, 6, 7, 8, 10])
    question = f"Rationalize $\\frac{{{a * a - a}}}{{{a} - \\sqrt{{{a}}}}}$."
    return question, f"{a}+\\sqrt{{{a}}}"


def _rational(rng: random.Random) -> Made:
    a = rng.randint(2, 19)
    return f"Simplify $\\frac{{x^2-{a * a}}}{{x-{a}}}$.", f"x+{a}"


def _trigonometric(rng: random.Random) -> Made:
    angle, value = rng.choice([("30", "\\frac{1}{2}"), ("60", "\\frac{\\sqrt{3}}{2}")])
    return f"Compute $\\sin {angle}^\\circ$.", value


def _logarithm(rng: random.Random) -> Made:
    a, b = rng.randint(2, 9), rng.randint(2, 5)
    return f"Evaluate $\\log_{{{a}}} {a**b}$.", str(b)


def _percent(rng: random.Random) -> Made:
    a = rng.randint(1, 19)
    return f"Write $\\frac{{{a}}}{{20}}$ as a percent.", f"{5 * a}\\%"


def _repeating(rng: random.Random) -> Made:
    a = rng.choice([1, 2, 4, 5, 7, 8])
    return f"Express $0.\\overline{{{a}}}$ as a common fraction.", f"\\frac{{{a}}}{{9}}"


def _inequality(rng: random.Random) -> Made:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return f"Solve ${a}x > {a * b}$. Give an interval.", f"({b}, \\infty)"


MAKERS: tuple[Callable[[random.Random], Made], ...] = (
    *(_root, _denominator, _expand, _factor, _distribute, _like_terms, _powers, _square, _cancel),
    *(_add_fractions, _evaluate, _base, _base_sum, _mixed, _unit, _slope, _roots_of, _conjugate),
    *(_rational, _trigonometric, _logarithm, _percent, _repeating, _inequality),
)


def _problems_like_math(count: int) -> list[Made]:
    """Return problems whose question holds an expression equal, or near, to the answer."""
    rng = random.Random(0)
    return [MAKERS[i % len(MAKERS)](rng) for i in range(count)]


def test_a_copy_of_a_question_like_those_of_math_is_not_paid(pool: GraderPool) -> None:
    questions, golds = zip(*_problems_like_math(960), strict=True)
    paid = paid_copies(questions, golds, pool)
    assert len(paid) < MOST * len(questions), [(questions[i], copy) for i, copy in paid[:5]]


def test_the_golds_of_those_problems_are_paid_and_hedges_on_them_are_not(pool: GraderPool) -> None:
    made = _problems_like_math(240)
    golds = [gold for _, gold in made]
    others = golds[1:] + golds[:1]
    assert {g.status for g in pool.grade_answers([(gold, gold) for gold in golds])} == {"ok"}
    hedges = [
        (gold, form.format(gold=gold, other=other))
        for gold, other in zip(golds, others, strict=True)
        for form in (
            "It is not ${gold}$. Hm",
            "Either ${other}$. Or ${gold}$. So",
            "{other} \\text{{ or }} {gold}",
            "{gold}, {other}",
            "{other} = {gold}",
            "\\{{{gold}, {other}\\}}",
            "{gold} \\text{{ probably}}",
        )
        if gold != other
    ]
    paid = [
        pair
        for pair, grade in zip(hedges, pool.grade_answers(hedges), strict=True)
        if grade.status == "ok"
    ]
    assert not paid


@pytest.mark.skipif(not SHARED.is_dir(), reason="no folder of real problems beside the repository")
@pytest.mark.parametrize("name", FILES)
def test_a_copy_of_a_real_question_is_paid_in_less_than_a_fifth_of_a_percent(
    name: str, pool: GraderPool
) -> None:
    # A question may hold U+2028, at which `str.splitlines` would cut it in two.
    with (SHARED / f"{name}.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    paid = paid_copies([row["question"] for row in rows], [row["answer"] for row in rows], pool)
    assert len(paid) < MOST * len(rows), [(rows[i]["id"], copy) for i, copy in paid[:5]]


def test_copies_are_the_text_its_last_sentence_its_formulas_and_its_arithmetic() -> None:
    question = "Ann has 3 + 4 pens. Simplify $\\sqrt{8} = y$."
    assert copies(question) == [
        question,
        "Simplify $\\sqrt{8} = y$.",
        "\\sqrt{8} = y",
        "\\sqrt{8}",
        "y",
        "3 + 4",
    ]
