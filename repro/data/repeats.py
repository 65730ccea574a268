"""Questions that occur twice, in one split or in training and test: counted, named and reported.

Two questions are the same if they differ in white space and case alone, as where a folder is
divided.
"""

from __future__ import annotations

from collections.abc import Sequence

from repro.data.problem import Problem, hash_of

Pair = tuple[Problem, Problem]


def repeated_questions(problems: Sequence[Problem]) -> list[Pair]:
    """Return each problem whose question came before, with the first that has it."""
    first: dict[str, Problem] = {}
    pairs = []
    for problem in problems:
        earlier = first.setdefault(hash_of("question", problem.question), problem)
        if earlier is not problem:
            pairs.append((problem, earlier))
    return pairs


def shared_questions(train: Sequence[Problem], test: Sequence[Problem]) -> list[Pair]:
    """Return each test problem whose question is trained on, with the training problem."""
    trained = {hash_of("question", problem.question): problem for problem in reversed(train)}
    pairs = ((problem, trained.get(hash_of("question", problem.question))) for problem in test)
    return [(problem, twin) for problem, twin in pairs if twin is not None]


def repeat_counts(train: Sequence[Problem], test: Sequence[Problem]) -> dict[str, int]:
    """Return, for a run's record, how many questions repeat in each split and across both."""
    return {
        "train": len(repeated_questions(train)),
        "test": len(repeated_questions(test)),
        "shared": len(shared_questions(train, test)),
    }
