"""Formats and extraction, against the released regular expression and by hand."""

from __future__ import annotations

import random
import re
import time

import pytest

from repro.reward.answers import (
    extract_answer,
    format_ok,
    lenient_answer,
    soft_format_ok,
)

PIECES = ["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "18", "so", "<think"]
# The expression as the fact sheet cites it from the released utils/rewards.py.
RELEASED_SOFT_FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def test_the_linear_soft_format_agrees_with_the_released_expression_on_random_texts() -> None:
    rng = random.Random(0)
    seen = set()
    for _ in range(20_000):
        text = "".join(rng.choices(PIECES, k=rng.randrange(12)))
        expected = RELEASED_SOFT_FORMAT.search(text) is not None
        assert soft_format_ok(text) == expected, text
        seen.add(expected)
    assert seen == {True, False}


def test_the_strict_format_implies_the_soft_one_and_an_answer() -> None:
    rng = random.Random(1)
    verdicts = {True: 0, False: 0}
    for _ in range(5_000):
        pieces = ["<think>", "so", "</think>", " ", "<answer>", "18", "</answer>"]
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(pieces))
            pieces[at : at + rng.randrange(2)] = [rng.choice(PIECES)]
        text = "".join(pieces)
        verdicts[format_ok(text)] += 1
        if format_ok(text):
            assert soft_format_ok(text)
            assert extract_answer(text) is not None
    assert min(verdicts.values()) > 500


def test_every_reading_takes_linear_time_on_repeated_tags() -> None:
    # The expression itself needs minutes on the first of these.
    for unit in (
        "<think></think><answer>",
        "<think>",
        "</think> ",
        "\\boxed{",
        "#### ",
        "</answer>",
    ):
        text = unit * (200_000 // len(unit))
        start = time.process_time()
        assert not format_ok(text)
        soft_format_ok(text)
        extract_answer(text)
        lenient_answer(text)
        assert time.process_time() - start < 1.0, unit


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think><answer> 18 </answer>", "18"),
        ("<answer>18</answer>", "18"),
        ("<answer>17</answer><answer>18</answer>", None),
        ("<answer>17<answer>18</answer>", None),
        ("<answer>17</answer>18</answer>", None),
        ("<answer>18", None),
        ("18</answer>", None),
        ("</answer>18<answer>", None),
        ("<think><answer>18</answer></think>", None),
        ("<answer>...</answer>", None),
        ("<answer>" + "1" * 9000 + "</answer>", None),
        ("18", None),
    ],
)
def test_an_answer_is_the_content_of_the_only_block(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 18", "18"),
        ("so \\boxed{\\frac{1}{2}}, done", "\\frac{1}{2}"),
        ("The answer is 18.", "18"),
        ("the answer is: $18 per day.", "$18\\text{ per day}"),
        ("The answer is 18 dollars", "18\\text{ dollars}"),
        ("The answer is 18 apples", "18"),
        ("The answer is 3 1/2 cups of tea", "3 1/2"),
        ("The answer is 18 thousand", "18 thousand"),
        ("The answer is 18.5 dollars. Good.", "18.5\\text{ dollars}"),
        ("\\boxed{18}. So the answer is as expected.", "18"),
        ("The answer is Evelyn", "Evelyn"),
        ("\\boxed{12 \\text{ apples}}", "12"),
        ("\\boxed{\\text{12 apples}}", "12"),
        ("\\boxed{12 \\text{ dozen}}", "12 \\text{ dozen}"),
        ("The answer is **73**.", "73"),
        ("**The answer is:** 73 acres", "73\\text{ acres}"),
        ("The answer is **73** or **74**.", "73 or 74"),
        ("#### **42**", "42"),
        ("The answer is 2**3", "2**3"),
        ("The answer is 17. No, the answer is 18.", "18"),
        ("#### 17\nThe answer is 18", "18"),
        ("The answer is 18\n#### 17", "17"),
        ("<answer>17</answer> no, \\boxed{18}", "18"),
        ("<answer>18", "18"),
        ("<answer>\\boxed{18}</answer>", "18"),
        ("<answer>#### 18</answer>", "18"),
        ("9 * 2 = 18", None),
        ("", None),
        ("\\boxed{18", None),
    ],
)
def test_the_lenient_answer_is_the_last_claim_and_never_the_last_number(
    text: str, answer: str | None
) -> None:
    assert lenient_answer(text) == answer
