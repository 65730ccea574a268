"""The proxy tier's problems: right by an independent reading, disjoint, always the same."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from repro.data.generator import generate_problems, split_of
from repro.data.load import load_problems
from repro.data.problem import digest_of_problems
from repro.data.proxy_problems import (
    LEVELS,
    UNSEEN_LEVELS,
    generate_leveled_problems,
    iterate_leveled_problems,
)
from repro.spec.config import DataConfig

# What each sentence about the asked-for thing does to its owner's count, most special first.
_READINGS = (
    (
        r"^(?:At first )?(?:On Monday )?\w+ (?:has|starts with|owns|has collected|counts) (\d+)$",
        "=",
    ),
    (r"^There are (\d+) in \w+'s (?:bag|box)$", "="),
    (r"(\d+) times", "*"),
    (r"^For each of those, \w+ has (\d+)$", "*"),
    (r"into (\d+) equal piles|equally among (\d+) people|only one in (\d+) of", "/"),
    (r"\b(?:loses|sells|leaves|uses up|puts) (\d+)\b", "-"),
    (r"^(\d+) of \w+'s", "-"),
    (r"\b(?:buys|finds|picks up another|wins|sends|receives) (\d+)\b", "+"),
    (r"\band (\d+) more$", "+"),
)


def answer_by_reading(question: str) -> int:
    """Solve a question from its English alone, as a reader would."""
    *sentences, asked = [part.strip() for part in re.findall(r"[^.?]+[.?]", question)]
    body = " ".join(sentences)
    thing = next(t for t in LEVELS[1].things if re.search(rf"\b{t}\b", asked))
    name = next(n for n in LEVELS[1].names if re.search(rf"\b{n}\b", asked))
    value = None
    for sentence in sentences:
        if not re.search(rf"\b{thing}\b", sentence):
            assert re.search(r"also has|has|buys|sees|children|minutes|dollars|each", sentence)
            continue
        value = _after(value, sentence.rstrip("."), name, thing)
    assert value is not None, body
    return value


def _after(value: int | None, sentence: str, name: str, thing: str) -> int:
    plain = re.sub(rf" (?:more )?{thing}\b", "", sentence)
    number = int(re.search(r"\d+", sentence)[0])
    if value is not None:
        match = re.search(r"^(\w+) has \d+ (more|fewer) \w+ than (\w+)$", sentence)
        if match:
            first, word, _ = match.groups()
            return value + number if (first == name) == (word == "more") else value - number
        match = re.search(r"^(?:Then )?(\w+) (gives|gets|takes) \d+ \w+ (to|from) (\w+)$", sentence)
        if match:
            who, verb, _, whom = match.groups()
            receives = whom if verb == "gives" else who
            return value + number if receives == name else value - number
    for pattern, kind in _READINGS:
        if re.search(pattern, plain):
            if kind == "=":
                assert value is None, sentence
                return number
            assert value is not None, sentence
            if kind == "/":
                assert value % number == 0, sentence
                return value // number
            return {"+": value + number, "-": value - number, "*": value * number}[kind]
    raise AssertionError(sentence)


@pytest.mark.parametrize("level", LEVELS | UNSEEN_LEVELS)
def test_answers_are_what_a_reader_of_the_question_computes(level):
    for problem in generate_leveled_problems("train", 300, (level,), seed=11):
        assert problem.answer == str(answer_by_reading(problem.question)), problem.question


def test_the_worked_solution_is_right_arithmetic_and_ends_in_the_answer():
    for problem in generate_leveled_problems("test", 250, seed=3):
        *lines, last = problem.solution.splitlines()
        assert len(lines) in LEVELS[problem.level].levels
        for line in lines:
            left, right = line.removesuffix(".").split(" = ")
            assert eval(left) == int(right), line
        assert last == f"#### {problem.answer}"


def test_levels_have_more_operations_and_larger_numbers():
    for level, config in LEVELS.items():
        values = []
        for _, problem in islice(iterate_leveled_problems("train", (level,), 5), 300):
            assert problem.level in config.levels
            values += [problem.start, *(step.after for step in problem.steps)]
        assert min(values) >= 1
        assert 0.9 * config.max_value < max(values) <= config.max_value
    assert [config.levels for config in LEVELS.values()] == [(2,), (3,), (4,), (5, 6), (7, 8)]


def test_a_level_that_no_policy_saw_is_drawn_where_it_is_named_alone():
    usual = generate_leveled_problems("train", 200)
    assert {problem.level for problem in usual} == {1, 2, 3, 4, 5}
    numbers = [int(n) for p in usual for n in re.findall(r"\d+", f"{p.question} {p.solution}")]
    assert max(numbers) <= 999
    unseen = generate_leveled_problems("train", 200, (6,))
    assert {problem.level for problem in unseen} == {6}
    larger = [p for p in unseen if re.search(r"\b1\d{3}\b", f"{p.question} {p.solution}")]
    assert 80 < len(larger) < 140
    with pytest.raises(ValueError, match=r"level \[7\] is asked for"):
        generate_leveled_problems("train", 1, (6, 7))


def test_every_wording_occurs():
    text = " ".join(p.question for p in generate_leveled_problems("train", 3000, seed=5))
    config = LEVELS[5]
    stories = (config.starts, config.additions, config.subtractions, config.multiplications)
    comparisons = (config.compare_starts, config.compare_additions, config.compare_subtractions)
    rest = (config.compare_multiplications, config.divisions, config.distractors, config.questions)
    for template in (t for group in (*stories, *comparisons, *rest) for t in group):
        pattern = re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(template))
        assert re.search(pattern, text), template


def test_a_thing_and_a_name_are_single_words_in_the_plural():
    for word in (*LEVELS[1].names, *LEVELS[1].things):
        assert re.fullmatch(r"[A-Za-z]+", word)
    assert len(set(LEVELS[1].names)) == len(LEVELS[1].names)
    assert len(set(LEVELS[1].things)) == len(LEVELS[1].things)


def test_splits_are_disjoint_across_seeds_and_a_longer_list_begins_the_same():
    of = {
        split: {
            p.question for seed in (1, 2) for p in generate_leveled_problems(split, 400, seed=seed)
        }
        for split in ("train", "development", "test")
    }
    assert not of["train"] & of["test"]
    assert not of["train"] & of["development"]
    assert not of["development"] & of["test"]
    assert all(
        split_of(q, LEVELS[1]) == split for split, questions in of.items() for q in questions
    )
    long, short = (generate_leveled_problems("test", count, seed=4) for count in (50, 20))
    assert long[:20] == short
    assert len({problem.id for problem in long}) == 50


def test_the_data_source_gives_levels_in_turn():
    config = DataConfig(source="generated_steps", levels=(2, 5), test_problems=6)
    assert [problem.level for problem in load_problems(config, "test")] == [2, 5] * 3
    with pytest.raises(ValueError, match=r"level \[9\] is asked for"):
        generate_leveled_problems("test", 1, (9,))
    with pytest.raises(ValueError, match="have no end"):
        load_problems(DataConfig(source="generated_steps"), "test")


@pytest.mark.parametrize(
    ("split", "count", "levels", "seed", "digest"),
    [
        (
            "train",
            2000,
            (),
            2025,
            "834b2a083b65a58850f4a133077e582405ada1a7949bea925745fda77341c365",
        ),
        ("test", 300, (), 2025, "1b156deb6139ae8215566aa41b091f3318261596582d8a5b6e8fa6fd38dde880"),
        (
            "development",
            200,
            (3, 5),
            7,
            "147bf11b576acfef012cc5a2037ec0caa953ffc5e2159a98d8bd6134087a5395",
        ),
    ],
)
def test_the_smoke_tier_s_problems_never_change(split, count, levels, seed, digest):
    # Blessed records rest on these very problems: widening the generator must not touch them.
    assert digest_of_problems(generate_problems(split, count, levels, seed)) == digest
