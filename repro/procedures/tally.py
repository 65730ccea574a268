"""Counts for a run besides its steps, summed over all its starts.

Grades, killed graders and peak memory are counters of the process; a run that is stopped and goes
on in another would show those of its last start alone. So they are read into each checkpoint
(`repro.rl.rollout_receipts.Tally`) and counted on from it.

Easy to get wrong: adding a checkpoint's grades to those of the new process. A start asks the policy
before training again; that was counted when the checkpoint was written, so its grades take the
place of what this process has counted until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from repro.evaluate.scale_evaluator import ScaleEvaluator
from repro.measure.memory_use import peak_bytes
from repro.reward.grader import GraderPool


class RunTally:
    """Grades, killed graders and peak memory of one run.

    Parameters
    ----------
    inputs
        Digests of what the run is made of, by name; every start must have the same.
    """

    def __init__(
        self,
        evaluation: ScaleEvaluator,
        pool: GraderPool,
        number: int = 0,
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        self._inputs = dict(inputs or {})
        self._evaluation, self._pool, self._number = evaluation, pool, number
        # A pool may have served other runs before this one.
        self._killed_before = -pool.workers_killed
        self._peak_before = 0

    @property
    def grades(self) -> dict[str, int]:
        """How many grades of each status the run was given."""
        return self._evaluation.grades(self._number)

    @property
    def workers_killed(self) -> int:
        """How many graders were killed for being late, in every start."""
        return self._killed_before + self._pool.workers_killed

    @property
    def peak_bytes(self) -> int:
        """Most memory that any start used."""
        return max(self._peak_before, peak_bytes())

    def counts(self) -> dict[str, Any]:
        """Return all of it, as JSON values."""
        counts: dict[str, Any] = {
            "grades": self.grades,
            "workers_killed": self.workers_killed,
            "peak_bytes": self.peak_bytes,
        }
        return counts | ({"inputs": self._inputs} if self._inputs else {})

    def go_on_from(self, counts: Mapping[str, Any]) -> None:
        """Count on from an earlier start; `ValueError` if that was on other files or problems."""
        _require_same(counts.get("inputs") or self._inputs, self._inputs)
        self._evaluation.evaluator.grades[self._number] = Counter(counts["grades"])
        self._killed_before += counts["workers_killed"]
        self._peak_before = counts["peak_bytes"]


def _require_same(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{name} has SHA-256 {now.get(name)}; it had {before.get(name)} when the run's "
                "checkpoint was written: put it back, or remove the run's folder to start again"
            )
