"""Formats and extraction."""

import time

import pytest

from repro.reward.answers import extract_answer, format_ok, lenient_answer


def test_every_reading_takes_linear_time_on_repeated_tags():
    # The released expression needs minutes on the first of these.
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
def test_an_answer_is_the_content_of_the_only_block(text, answer):
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
        ("The answer is:\n73", "73"),
        ("**The answer is:**\n\n73 acres", "73\\text{ acres}"),
        ("**The answer is:** 73 acres", "73\\text{ acres}"),
        ("The answer is **73** or **74**.", "73 or 74"),
        ("#### **42**", "42"),
        ("The answer is 2**3", "2**3"),
        ("The answer is 17. No, the answer is 18.", "18"),
        ("Final Answer: 73", "73"),
        ("**Final Answer:** 73", "73"),
        ("**Final Answer**: $73$.", "73"),
        ("### Final Answer\n73", "73"),
        ("Answer = 73", "73"),
        ("The answer is\n$$73$$", "73"),
        ("The answer is:\n\\[\n73\n\\]", "73"),
        ("The answer is\n\n73 apples.", "73"),
        ("The answer is thus $73$.", "73"),
        ("So therefore 73.", "73"),
        ("Therefore, 73 apples. Good.", "73"),
        ("\\therefore 73", "73"),
        ("Therefore, 73 came and 5 left.", None),
        ("Thus 73 times 2 is 146", None),
        ("Hence 73 or 74", None),
        ("therefore 73 + 5 = 78", None),
        ("Final Answer: 73 or 74", "73 or 74"),
        ("Answer choices: 73", None),
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
def test_the_lenient_answer_is_the_last_claim_and_never_the_last_number(text, answer):
    assert lenient_answer(text) == answer
