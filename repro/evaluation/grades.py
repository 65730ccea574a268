"""Grades of completions, and their means per problem.

The grader is the one that paid the rewards, and what is beside accuracy (format, working,
truncation, the lenient reading) is always reported with it.

Of n samples per problem follow mean@n, and unbiased pass@k and maj@k for k <= n
(`repro.evidence.at_k`), by the strict and by the lenient reading. What votes in maj@k is the
answer's tidied text: `70,000` and `70000` are two candidates, and both may be right. Intervals are
over problems: samples of one problem are not independent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from repro.data.problem import Problem
from repro.evidence.at_k import VOTING_SAMPLES
from repro.evidence.derived import SHARES, at_k_metrics, mean_of_problems, share_of
from repro.evidence.record import Estimate
from repro.reward.answers import THINK_CLOSE, THINK_OPEN


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
    surprisal
        Minus the sum of its tokens' log-probabilities as sampled, nats; its mean over completions
        is the entropy of what was sampled.
    answer, lenient_answer
        What votes in maj@k: the tidied answer of each reading, None without one.
    """

    accuracy: float | None
    lenient: float | None
    format_ok: bool
    works: bool
    truncated: bool
    tokens: int
    surprisal: float
    answer: str | None
    lenient_answer: str | None


# Tally -> the field of `Graded`.
_TALLIED = {
    "right": "accuracy",
    "right_lenient": "lenient",
    "format": "format_ok",
    "working": "works",
    "truncated": "truncated",
}
# Ending of a metric's name -> the fields of `Graded`: the grade, and what votes.
_READINGS = {"": ("accuracy", "answer"), "_lenient": ("lenient", "lenient_answer")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A run's graded completions, in groups by problem, in the order asked.

    Problems whose gold cannot be read are left out, and counted as `dropped`.
    """

    problems: list[Problem]
    groups: list[list[Graded]]
    dropped: int

    @property
    def accuracy(self) -> list[float]:
        """Percent of strictly right completions, per problem."""
        return self._means("accuracy")

    def surprisal(self) -> dict[str, float]:
        """Return `entropy_sum`, nats, and `tokens`: their quotient is the entropy a token."""
        every = [one for group in self.groups for one in group]
        return {
            "entropy_sum": sum(one.surprisal for one in every),
            "tokens": sum(one.tokens for one in every),
        }

    def estimates(self, ks: Sequence[int] = ()) -> dict[str, Estimate]:
        """Return the metrics, each with its 95 % interval over problems.

        With `ks`, each at most the number of samples per problem, they have mean@n, and pass@k and
        maj@k of each k, by both readings.
        """
        tallies = self.tallies()
        named = {"right": "accuracy"} | SHARES
        percents = {metric: share_of(tuple(tallies[part])) for part, metric in named.items()}
        tokens = mean_of_problems(self._means("tokens", scale=1.0), "tokens")
        return percents | {"completion_tokens_mean": tokens} | at_k_metrics(tallies, ks)

    def tallies(self) -> dict[str, Any]:
        """Return the tallies of the answers, from which a record shows its accuracies.

        They are `dropped`, `tokens` (of all completions graded), and for each grade how many
        problems had 0, 1, ... of their samples so. Of several samples per problem also `votes` and
        `votes_lenient`: for each way in which samples voted, the `problems` that have it and the
        counts of each `right` and each `wrong` answer; samples without an answer make up the rest.
        None of more than `VOTING_SAMPLES`.
        """
        samples = max(map(len, self.groups), default=0)
        tallies: dict[str, Any] = {}
        for name, field in _TALLIED.items():
            hits = [int(total) for total in self._sums(field)]
            tallies[name] = [hits.count(number) for number in range(samples + 1)]
        tallies |= {"dropped": self.dropped, "tokens": int(sum(self._sums("tokens")))}
        for ending, (grade, voting) in _READINGS.items():
            if 2 <= samples <= VOTING_SAMPLES:
                ways = Counter(_votes(group, grade, voting) for group in self.groups)
                tallies[f"votes{ending}"] = [
                    {"problems": count, "right": list(right), "wrong": list(wrong)}
                    for (right, wrong), count in sorted(ways.items())
                ]
        return tallies

    def _sums(self, field: str) -> list[float]:
        return [sum(float(getattr(one, field) or 0.0) for one in group) for group in self.groups]

    def _means(self, field: str, scale: float = 100.0) -> list[float]:
        sums = zip(self._sums(field), self.groups, strict=True)
        return [scale * total / len(group) for total, group in sums]


def _votes(
    group: Sequence[Graded], grade: str, voting: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the votes for each right answer and for each wrong one, most votes first."""
    votes: Counter[str] = Counter()
    correct: dict[str, bool] = {}
    for one in group:
        answer = getattr(one, voting)
        if answer is not None:
            votes[answer] += 1
            correct[answer] = getattr(one, grade) == 1.0
    counts = {
        flag: tuple(sorted((votes[a] for a in votes if correct[a] is flag), reverse=True))
        for flag in (True, False)
    }
    return counts[True], counts[False]


def shows_working(text: str) -> bool:
    """Say whether there is anything between the thinking tags."""
    # An expression would search the rest of the text once for every opening tag.
    _, opened, rest = text.partition(THINK_OPEN)
    thinking, closed, _ = rest.partition(THINK_CLOSE)
    return bool(opened and closed and thinking.strip())
