"""The problems of a plan, opened once before anything starts.

A broken line stops the plan, not each run; golds that can never be paid are named, and all of them
unpayable is an error; copies of a question that are paid, and questions that occur twice or in
training and test, are counted. Problems of the package's own generators need none of this and are
not opened. Public sets are opened where a user named them: those of a target's own scale may have
to be fetched first.
"""

from __future__ import annotations

from collections.abc import Sequence

from repro.data.load import is_available, is_generated, load_problems
from repro.data.problem import DataError, Problem
from repro.data.repeats import repeat_counts
from repro.reward.golds import unpayable
from repro.reward.grader import GraderPool
from repro.reward.restating import paid_copies
from repro.spec.config import DataConfig, RunConfig, TrainScale

# Where so many are named, the rest is counted.
_NAMED = 5


def data_lines(plan: Sequence[RunConfig], named: bool) -> list[str]:
    """Open the problems of a plan and return what there is to say of them, a line each.

    Parameters
    ----------
    named
        Whether a user named the data, so that public sets are opened as well as folders.

    Raises
    ------
    DataError
        If they are missing or broken, or no gold of a split can be paid; it names file and line.
    """
    scales = [run.scale for run in plan if isinstance(run.scale, TrainScale)]
    # Without a test split of its own, what is trained on is asked nothing.
    trained = {scale.data: scale.accuracy_over == "split" for scale in scales}
    asked = {item.data for scale in scales for item in scale.test_sets} - set(trained)
    lines: list[str] = []
    with GraderPool(workers=1) as pool:
        for data in sorted(trained, key=repr):
            if _is_opened(data, named):
                train = load_problems(data, "train")
                test = load_problems(data, "test") if trained[data] else []
                splits = {"train": train} | ({"test": test} if test else {})
                lines += _lines(data.source, splits, pool)
                lines += _repeat_lines(data.source, train, test)
        for data in sorted(asked, key=repr):
            if _is_opened(data, named):
                test = load_problems(data, "test")
                lines += _lines(data.source, {"test": test}, pool)
                lines += _repeat_lines(data.source, [], test)
    return lines


def _is_opened(data: DataConfig, named: bool) -> bool:
    """Say whether problems are opened before the start."""
    if is_generated(data.source) or not is_available(data.source):
        return False
    return named or ":" in data.source


def _lines(source: str, splits: dict[str, list[Problem]], pool: GraderPool) -> list[str]:
    """Return a line per gold that can never be paid.

    Raises
    ------
    DataError
        If none of a split can be.
    """
    lines = []
    for split, problems in splits.items():
        places = unpayable([problem.answer for problem in problems], pool)
        named = [problems[place] for place in places[:_NAMED]]
        lines += [
            f"  {problem.where}: gold {problem.answer!r} can never be paid; its problem is dropped"
            for problem in named
        ]
        if len(places) == len(problems):
            raise DataError(
                f"{source}: no gold of its {len(problems)} {split} problems can be paid; the first "
                f"is {problems[0].answer!r} ({problems[0].where}), and numbers or formulas are "
                "needed (docs/grading.md)"
            )
        lines += _copy_lines(f"{source}, {split}", problems, pool)
        if len(places) > _NAMED:
            lines.append(
                f"  {source}: {len(places)} of {len(problems)} {split} golds can never be paid"
            )
    return lines


def _copy_lines(where: str, problems: list[Problem], pool: GraderPool) -> list[str]:
    """Return a line if a copy of some question is paid."""
    questions = [problem.question for problem in problems]
    paid = paid_copies(questions, [problem.answer for problem in problems], pool)
    if not paid:
        return []
    place, copy = paid[0]
    return [
        f"  {where}: a copy of the question is paid in {len(paid)} of {len(problems)} problems "
        f"({len(paid) / len(problems):.2%}), first in {problems[place].where}: {copy[:80]!r}"
    ]


def _repeat_lines(source: str, train: list[Problem], test: list[Problem]) -> list[str]:
    """Return a line if questions occur twice, in a split or in both."""
    counts = repeat_counts(train, test)
    if not any(counts.values()):
        return []
    return [
        f"  {source}: repeated questions: {counts['train']} in train, {counts['test']} in test, "
        f"{counts['shared']} of the test split are trained on"
    ]
