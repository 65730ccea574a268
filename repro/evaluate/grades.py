"""Grades of completions, and their means per problem.

The released evaluation forgets the adapter, compares first characters only and cuts answers short
(docs/paper_and_code.md, row 16). Here the grader is the one that paid the rewards, and what is
beside accuracy (format, working, truncation, the lenient reading) is always reported with it.

Easy to get wrong: taking samples of one problem for independent ones. Intervals are over problems.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from repro.data.problem import Problem
from repro.evaluate.questions import Question
from repro.evidence.record import Estimate
from repro.evidence.statistics import mean_interval
from repro.reward.answers import format_ok, lenient_answer
from repro.reward.grader import GraderPool
from repro.rollout.sampler import Completion

_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """One completion.

    Attributes
    ----------
    accuracy
        1 or 0 by the strict reading that pays the reward; None where the gold cannot be read.
    lenient
        The same when the answer may stand in any usual form.
    format_ok, works, truncated
        Whether it has the strict format, shows working, and hit the length limit.
    tokens
        Its length.
    """

    accuracy: float | None
    lenient: float | None
    format_ok: bool
    works: bool
    truncated: bool
    tokens: int

    @property
    def correct(self) -> bool:
        """Whether the strict reading is right."""
        return self.accuracy == 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A run's graded completions.

    Attributes
    ----------
    problems
        Those whose gold can be read, in the order asked.
    groups
        The completions of each.
    dropped
        How many problems were left out.
    """

    problems: list[Problem]
    groups: list[list[Graded]]
    dropped: int

    @property
    def accuracy(self) -> list[float]:
        """Percent of strictly right completions, per problem."""
        return self._means("accuracy")

    def estimates(self) -> dict[str, Estimate]:
        """Return the metrics, each with its 95 % interval over problems."""
        shares = {
            "accuracy": "accuracy",
            "accuracy_lenient": "lenient",
            "format_rate": "format_ok",
            "working_rate": "works",
            "truncation_rate": "truncated",
        }
        percents = {name: estimate(self._means(of), "percent") for name, of in shares.items()}
        tokens = estimate(self._means("tokens", scale=1.0), "tokens")
        return percents | {"completion_tokens_mean": tokens}

    def _means(self, field: str, scale: float = 100.0) -> list[float]:
        return [
            scale * sum(float(getattr(one, field) or 0.0) for one in group) / len(group)
            for group in self.groups
        ]


def estimate(values: Sequence[float], unit: str) -> Estimate:
    """Return the mean of independent values with its 95 % t interval."""
    interval = mean_interval(values)
    return Estimate(
        value=interval.value,
        unit=unit,
        low=interval.low,
        high=interval.high,
        n=len(values),
        method="mean over problems, 95 % t interval",
    )


def answers_of(
    asked: Sequence[Question],
    texts: Sequence[str],
    completions: Sequence[Completion],
    pool: GraderPool,
) -> Answers:
    """Grade completions, equally many of each question in order.

    Parameters
    ----------
    texts
        Of the completions, forced openings included.
    """
    samples = len(texts) // max(1, len(asked))
    golds = [question.problem.answer for question in asked for _ in range(samples)]
    strict = pool.grade(list(zip(golds, texts, strict=True)))
    read = [lenient_answer(text) for text in texts]
    lenient = pool.grade_answers(list(zip(golds, read, strict=True)))
    graded = [
        Graded(
            accuracy=strictly.accuracy,
            lenient=leniently.accuracy,
            format_ok=format_ok(text),
            works=shows_working(text),
            truncated=completion.finish_reason == "length",
            tokens=len(completion.token_ids),
        )
        for strictly, leniently, text, completion in zip(
            strict, lenient, texts, completions, strict=True
        )
    ]
    problems, groups = [], []
    for number, question in enumerate(asked):
        group = graded[number * samples : (number + 1) * samples]
        if all(one.accuracy is not None for one in group):
            problems.append(question.problem)
            groups.append(group)
    return Answers(problems=problems, groups=groups, dropped=len(asked) - len(groups))


def shows_working(text: str) -> bool:
    """Return whether there is anything between the thinking tags."""
    match = _THINKING.search(text)
    return match is not None and bool(match.group(1).strip())
