"""All comparisons for one question of `compare` or `regress`, and their joint result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from repro.judge.as_before import Comparison, MetricRow, RowVerdict, by_severity

Status = Literal["fine", "regressed", "could not judge"]

EXIT_STATUS: dict[Status, int] = {"fine": 0, "regressed": 1, "could not judge": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All comparisons for one question, and their joint result."""

    comparisons: tuple[Comparison, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def rows(self) -> list[MetricRow]:
        """All rows: regressed ones first, the largest losses first."""
        return by_severity([row for item in self.comparisons for row in item.rows])

    @property
    def every_problem(self) -> list[str]:
        """Each reason for which something could not be judged."""
        own = [problem for comparison in self.comparisons for problem in comparison.problems]
        return [*self.problems, *own]

    @property
    def status(self) -> Status:
        """A regression that is shown counts, whatever else could not be judged."""
        if any(comparison.worse for comparison in self.comparisons):
            return "regressed"
        return "could not judge" if self.every_problem or not self.rows else "fine"

    @property
    def exit_status(self) -> int:
        """0 fine, 1 regressed, 2 could not judge."""
        return EXIT_STATUS[self.status]

    def count(self, verdict: RowVerdict) -> int:
        """Return how many rows have a verdict."""
        return sum(comparison.counts().get(verdict, 0) for comparison in self.comparisons)
