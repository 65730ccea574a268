"""Questions that occur twice."""

from __future__ import annotations

from repro.data.problem import Problem
from repro.data.repeats import repeat_counts, repeated_questions, shared_questions


def _named(*questions: str) -> list[Problem]:
    """Return problems with these questions, numbered."""
    return [Problem(id=str(i), question=text, answer="1") for i, text in enumerate(questions)]


def test_a_question_repeats_whatever_its_case_and_white_space() -> None:
    problems = _named("How many?", "And now?", "how  MANY?", "How many?")
    pairs = [(later.id, first.id) for later, first in repeated_questions(problems)]
    assert pairs == [("2", "0"), ("3", "0")]


def test_a_test_question_that_is_trained_on_is_found_with_its_twin() -> None:
    [(test, train)] = shared_questions(_named("a?", "b?", "b?"), _named("c?", " B?"))
    assert (test.question, train.id) == (" B?", "1")


def test_counts_are_of_each_split_and_of_both() -> None:
    counts = repeat_counts(_named("a?", "a?", "b?"), _named("b?", "c?", "c?", "c?"))
    assert counts == {"train": 1, "test": 2, "shared": 1}
