"""Worked solutions in the careful format: right, and refused where there are none."""

from __future__ import annotations

import dataclasses

import pytest

from repro.data.generator import generate_problems
from repro.data.problem import DataError, Problem
from repro.data.prompts import template_named
from repro.data.worked import worked_completion


def test_a_solution_is_the_careful_completion_of_its_template() -> None:
    problem = Problem(id="a", question="?", answer="36", solution="12 * 3 = 36.\n#### 36")
    one = "<think>First 12 * 3 = 36</think>\n<answer>36</answer>"
    assert worked_completion(problem, "tiny") == one
    plain = dataclasses.replace(problem, solution="4 + 8 = 12\n12 * 3 = 36\n#### 36")
    assert worked_completion(plain, "tiny") == (
        "<think>First 4 + 8 = 12, then 12 * 3 = 36</think>\n<answer>36</answer>"
    )


def test_every_generated_problem_is_worked_to_its_own_answer() -> None:
    prefix = template_named("tiny").working_prefix
    for problem in generate_problems("train", 60):
        text = worked_completion(problem, "tiny")
        assert prefix is not None
        assert text.startswith(prefix)
        assert text.endswith(f"<answer>{problem.answer}</answer>")


def test_what_cannot_be_worked_is_refused() -> None:
    problem = Problem(id="a", question="?", answer="36", solution="12 * 3 = 36.\n#### 35")
    with pytest.raises(DataError, match=r"'a'.*needs equations"):
        worked_completion(problem, "tiny")
    with pytest.raises(DataError, match="needs equations"):
        worked_completion(dataclasses.replace(problem, solution=None), "tiny")
    with pytest.raises(ValueError, match="'paper' has no careful format"):
        worked_completion(dataclasses.replace(problem, solution="#### 36"), "paper")
