"""Human-written problems whose solution is an equation, turned into worked steps.

MAWPS states its solutions as `X=(7.0+55.0)` or `56*9=x`. Where one side is the unknown alone, the
other side is computed operation by operation, exactly, and each becomes a step::

    x = (8.0-3.0)*2   ->   8 - 3 = 5.   5 * 2 = 10.

Equations of another form, divisions by zero, numbers that no short decimal writes, and equations
whose value is not the stated answer are left out, and counted by whoever asks.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from repro.data.problem import Problem

_SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_MOST_DECIMALS = 4


class _UnwritableError(ValueError):
    """The equation has no steps that can be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkedProblem:
    """A problem with its steps as text, `a + b = c`, and the answer as they write it."""

    problem: Problem
    steps: tuple[str, ...]
    answer: str


def worked_problems(problems: Sequence[Problem]) -> list[WorkedProblem]:
    """Return the problems whose equation gives steps and the stated answer, in order."""
    workings = (work_out(problem) for problem in problems)
    return [worked for worked in workings if worked is not None]


def work_out(problem: Problem) -> WorkedProblem | None:
    """Return a problem with steps, or None where its equation gives none."""
    sides = (problem.solution or "").split("=")
    unknown = [side.strip().lower() == "x" for side in sides]
    if len(sides) != 2 or sum(unknown) != 1:
        return None
    steps: list[str] = []
    try:
        value = _compute(ast.parse(sides[unknown.index(False)].strip(), mode="eval").body, steps)
        stated = Fraction(problem.answer.replace(",", ""))
        answer = decimal_text(value)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
    if not steps or value != stated:
        return None
    return WorkedProblem(problem=problem, steps=tuple(steps), answer=answer)


def _compute(node: ast.expr, steps: list[str]) -> Fraction:
    """Return an expression's value, adding a step for each of its operations in order."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        left, right = _compute(node.left, steps), _compute(node.right, steps)
        sign = _SIGNS[type(node.op)]
        value = {
            "+": lambda: left + right,
            "-": lambda: left - right,
            "*": lambda: left * right,
            "/": lambda: left / right,
        }[sign]()
        texts = [decimal_text(number) for number in (left, right, value)]
        steps.append(f"{texts[0]} {sign} {texts[1]} = {texts[2]}")
        return value
    raise _UnwritableError(ast.dump(node))


def decimal_text(value: Fraction) -> str:
    """Return a number as digits with at most four decimals.

    Raises
    ------
    ValueError
        When it is negative or needs more.
    """
    scaled = value * 10**_MOST_DECIMALS
    if value < 0 or scaled.denominator != 1:
        raise _UnwritableError(f"{value} is negative or has more than {_MOST_DECIMALS} decimals")
    whole, rest = divmod(scaled.numerator, 10**_MOST_DECIMALS)
    decimals = f"{rest:0{_MOST_DECIMALS}d}".rstrip("0")
    return f"{whole}.{decimals}" if decimals else str(whole)
