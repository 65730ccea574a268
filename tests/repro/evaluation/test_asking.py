"""Questions that a policy is asked: their parts, seeds and grades."""

import random
import re

import pytest

from repro.evaluation.asking import Evaluator, questions, seeds_of
from repro.evaluation.grades import shows_working
from repro.spec.config import SamplingConfig
from tests.repro.evaluation.small import Writer, problem

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=48)
SUMS = [problem(f"{n}+2?", str(n + 2)) for n in (1, 2, 3)]
RIGHT = "<think>\nsum.\n</think>\n<answer>{n}</answer>"
TEXTS = {
    "1+2?": RIGHT.format(n=3),
    "2+2?": "<think></think>\n<answer>5</answer>",
    "3+2?": "\n#### 5",
}


def asked(tokenizer, opening=""):
    return questions(SUMS, "tiny", tokenizer, max_prompt_tokens=99, opening=opening)


def test_completions_are_graded_by_every_reading(tokenizer, pool):
    evaluator = Evaluator(Writer(tokenizer, TEXTS), tokenizer, pool, 0)
    answers = evaluator.ask(asked(tokenizer), GREEDY, samples=1)
    graded = [group[0] for group in answers.groups]
    assert [one.accuracy for one in graded] == [True, False, False]
    assert [one.lenient for one in graded] == [1.0, 0.0, 1.0]
    assert [one.format_ok for one in graded] == [True, True, False]
    assert [one.works for one in graded] == [True, False, False]
    assert not any(one.truncated for one in graded)
    metrics = answers.estimates()
    assert metrics["accuracy"].value == pytest.approx(100 / 3)
    assert metrics["accuracy"].n == 3


def test_questions_are_asked_in_parts_of_the_sampler_s_rows(tokenizer, pool):
    writer = Writer(tokenizer, TEXTS)
    evaluator, shares = Evaluator(writer, tokenizer, pool, 7), list[float]()
    assert evaluator.rows_at_once >= 1319, "a sampler that queues its rows takes a whole test set"
    evaluator.on_part, evaluator.rows_at_once = shares.append, 4
    evaluator.ask(asked(tokenizer), GREEDY, samples=2)
    assert shares == [2 / 3, 1.0]
    assert [len(prompts) for prompts, _, _ in writer.requests] == [2, 1]
    seeds = [seed for _, own, _ in writer.requests for seed in own]
    assert seeds == seeds_of(asked(tokenizer), samples=2, seed=7)
    assert len(set(seeds)) == 6
    assert seeds != seeds_of(asked(tokenizer), samples=2, seed=7, stream="quality")


def test_a_forced_opening_is_part_of_prompt_and_text(tokenizer, pool):
    writer = Writer(tokenizer, TEXTS)
    (question, *_) = asked(tokenizer, "<think>\n")
    assert tokenizer.decode(question.prompt) == "1+2?\n<think>\n"
    answers = Evaluator(writer, tokenizer, pool, 0).ask([question], GREEDY, samples=1)
    ((graded,),) = answers.groups
    assert graded.accuracy
    assert graded.works
    assert graded.tokens < len(tokenizer(TEXTS["1+2?"])["input_ids"]) + 1


def test_problems_whose_gold_cannot_be_read_are_left_out(tokenizer, pool):
    broken = problem("what?", "\\frac{")
    writer = Writer(tokenizer, TEXTS | {"what?": RIGHT.format(n=1)})
    mixed = questions([broken, SUMS[0]], "tiny", tokenizer, max_prompt_tokens=99)
    answers = Evaluator(writer, tokenizer, pool, 0).ask(mixed, GREEDY, samples=2)
    assert answers.problems == [SUMS[0]]
    assert answers.dropped == 1
    assert answers.accuracy == [100.0]


def test_a_prompt_that_is_too_long_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"problem 1\+2\?: .*\d+ tokens; .* 2"):
        questions(SUMS, "tiny", tokenizer, max_prompt_tokens=2)


def test_working_is_what_stands_between_the_first_tags_however_many_there_are():
    expression = re.compile(r"<think>(.*?)</think>", re.DOTALL)
    rng = random.Random(0)
    seen = set()
    for _ in range(5_000):
        text = "".join(rng.choices(["<think>", "</think>", " ", "\n", "so"], k=rng.randrange(8)))
        match = expression.search(text)
        expected = match is not None and bool(match.group(1).strip())
        assert shows_working(text) == expected, text
        seen.add(expected)
    assert seen == {True, False}
