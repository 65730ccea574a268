"""What a copy of the question earns, on real sets and on problems like MATH's."""

from __future__ import annotations

import json
import random
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


# Questions that hold an expression equal, or near, to the answer, and their answers; `_numbers`
# draws what stands in braces.
MADE: tuple[Made, ...] = (
    ("Simplify $\\sqrt{{{root}}}$.", "{small}\\sqrt{{{prime}}}"),
    ("Rationalize the denominator of $\\frac{{1}}{{\\sqrt{{{prime}}}}}$.",
     "\\frac{{\\sqrt{{{prime}}}}}{{{prime}}}"),
    ("Expand the product ${{(x+{small})(x+{large})}}$.", "x^2+{sum}x+{product}"),
    ("Factor $x^2+{sum}x+{product}$.", "(x+{small})(x+{large})"),
    ("Expand ${small}(x+{other})$.", "{small}x+{times}"),
    ("Simplify ${small}y + {other}y$.", "{plus}y"),
    ("Simplify $x^{{{small}}} \\cdot x^{{{other}}}$.", "x^{{{plus}}}"),
    ("Simplify $({small}x)^2$.", "{square}x^2"),
    ("Simplify $\\frac{{{top_times}}}{{{bottom_times}}}$ to lowest terms.",
     "\\frac{{{top}}}{{{bottom}}}"),
    ("Compute $\\frac{{1}}{{{top}}} + \\frac{{1}}{{{bottom}}}$ as a common fraction.",
     "\\frac{{{top_plus}}}{{{top_product}}}"),
    ("What is ${large} \\cdot {small} + {large}^2$?", "{evaluated}"),
    ("Write ${hundreds}_{{10}}$ in base ${base}$.", "{digits}_{base}"),
    ("Find the sum ${seven}_7 + {seven_too}_7$ in base $7$.", "{seven_sum}_7"),
    ("Compute ${small}\\frac{{1}}{{3}} + {large}\\frac{{1}}{{3}}$ as a mixed number.",
     "{sum}\\frac{{2}}{{3}}"),
    ("A rectangle has sides ${small}$ cm and ${large}$ cm. What is ${small} \\cdot {large}$ in "
     "cm$^2$?", "{product}\\text{{ cm}}^2"),
    ("Write ${small}x - y + {other} = 0$ in slope-intercept form.", "y={small}x+{other}"),
    ("Find all roots of $x^2-{sum}x+{product} = 0$.", "{small}, {large}"),
    ("Rationalize $\\frac{{{conjugate}}}{{{prime} - \\sqrt{{{prime}}}}}$.",
     "{prime}+\\sqrt{{{prime}}}"),
    ("Simplify $\\frac{{x^2-{square}}}{{x-{small}}}$.", "x+{small}"),
    ("Compute $\\sin {angle}^\\circ$.", "{sine}"),
    ("Evaluate $\\log_{{{small}}} {power}$.", "{exponent}"),
    ("Write $\\frac{{{large}}}{{20}}$ as a percent.", "{percent}\\%"),
    ("Express $0.\\overline{{{ninths}}}$ as a common fraction.", "\\frac{{{ninths}}}{{9}}"),
    ("Solve ${small}x > {times}$. Give an interval.", "({other}, \\infty)"),
)  # fmt: skip


def _numbers(rng: random.Random) -> dict[str, int | str]:
    """Return the numbers of a question and of its answer, by name."""
    small, other, large = rng.randint(2, 9), rng.randint(2, 9), rng.randint(10, 19)
    prime, exponent = rng.choice([3, 5, 7, 11]), rng.randint(2, 5)
    top, bottom = rng.choice([(2, 3), (3, 4), (5, 7), (4, 9), (8, 15), (11, 20)])
    angle, sine = rng.choice([("30", "\\frac{1}{2}"), ("60", "\\frac{\\sqrt{3}}{2}")])
    hundreds, base = rng.randint(100, 900), rng.randint(5, 9)
    first, second = rng.randint(30, 200), rng.randint(30, 200)
    return {
        "small": small, "other": other, "plus": small + other, "times": small * other,
        "square": small**2, "root": small**2 * prime, "prime": prime,
        "large": large, "sum": small + large, "product": small * large, "percent": 5 * large,
        "evaluated": large * small + large**2, "conjugate": prime**2 - prime,
        "top": top, "bottom": bottom, "top_plus": top + bottom, "top_product": top * bottom,
        "top_times": top * small, "bottom_times": bottom * small,
        "angle": angle, "sine": sine, "exponent": exponent, "power": small**exponent,
        "ninths": rng.choice([1, 2, 4, 5, 7, 8]),
        "hundreds": hundreds, "base": base, "digits": _digits(hundreds, base),
        "seven": _digits(first, 7), "seven_too": _digits(second, 7),
        "seven_sum": _digits(first + second, 7),
    }  # fmt: skip


def _problems_like_math(count: int) -> list[Made]:
    """Return problems whose question holds an expression equal, or near, to the answer."""
    rng, made = random.Random(0), []
    for number in range(count):
        (question, gold), values = MADE[number % len(MADE)], _numbers(rng)
        made.append((question.format(**values), gold.format(**values)))
    return made


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
