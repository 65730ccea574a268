"""A problem's own solution as a completion in the careful format of the policy's templates.

The solutions of the generators are equations, one per line, and `#### ANSWER` at the end. Training
on them is supervised fine-tuning towards the habit that reinforcement learning has to find.
"""

from __future__ import annotations

from repro.data.problem import DataError, Problem
from repro.data.prompts import template_named

_ANSWER = "#### "


def worked_completion(problem: Problem, template: str) -> str:
    """Return the completion that works the problem without a mistake, the end token not included.

    Raises
    ------
    ValueError
        When the template has no careful format.
    DataError
        When the problem has no solution of equations that ends in its answer.
    """
    working = template_named(template).working
    if working is None:
        raise ValueError(
            f"prompt template {template!r} has no careful format; worked solutions need one that "
            "has (tiny)"
        )
    *lines, last = (problem.solution or "").split("\n")
    if not lines or last != f"{_ANSWER}{problem.answer}":
        raise DataError(
            f"problem {problem.id!r}: its solution ends in {last!r}; it needs equations line by "
            f"line and then {_ANSWER + problem.answer!r}"
        )
    return working([line.removesuffix(".") for line in lines], problem.answer)
