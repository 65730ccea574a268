"""Golds that can never be paid, named before a run starts.

A gold is payable if the gold itself, written as the answer, is paid. What fails that (broken
LaTeX, a gold that is the prompt's own placeholder, one that the algebra cannot read) would give
every completion nothing, or drop its problem, for a whole run.
"""

from __future__ import annotations

from collections.abc import Sequence

from repro.reward.answers import ANSWER_CLOSE, ANSWER_OPEN, extract_answer
from repro.reward.grader import GraderPool


def unpayable(golds: Sequence[str], pool: GraderPool) -> list[int]:
    """Return the places of the golds that can never be paid, in order."""
    answers = [extract_answer(f"{ANSWER_OPEN}{gold}{ANSWER_CLOSE}") for gold in golds]
    grades = pool.grade_answers(list(zip(golds, answers, strict=True)))
    return [place for place, grade in enumerate(grades) if grade.status != "ok"]
