"""Counts for a run besides its steps, summed over all its starts.

Grades, killed graders and peak memory are counted by the process; a run that is resumed in another
process would have only the counts of its last start. So each checkpoint saves them
(`repro.rl.rollout_receipts.Tally`), and a resumed run continues from them.

Easy to get wrong: adding a checkpoint's grades to those of the new process. Each start evaluates
the initial policy again, which the checkpoint has already counted; so its grades replace those that
the new process has counted until then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from repro.measure.device_state import peak_bytes
from repro.reward.grader import GraderPool


class RunTally:
    """Grades, killed graders, peak memory and seconds of one run.

    Parameters
    ----------
    inputs
        Digests of the run's inputs, by name; they must be the same in every start.
    began
        What `time.perf_counter` said when this process began with the run.
    """

    def __init__(self, pool: GraderPool, inputs: Mapping[str, str], began: float) -> None:
        self._began, self._seconds_before = began, 0.0
        self._inputs, self._pool = dict(inputs), pool
        # A pool may have served other runs before this one.
        self._killed_before = -pool.workers_killed
        self._uncounted, self._grades_before = pool.counters.copy(), Counter[str]()
        self._peak_before = 0

    def counts(self) -> dict[str, Any]:
        """Return the counts of all starts, as JSON values.

        They are the grades by status, the graders that were killed for being late, peak memory in
        bytes and wall seconds, loading included; beside them the digests of the run's inputs.
        """
        return {
            "grades": dict(self._grades_before + (self._pool.counters - self._uncounted)),
            "workers_killed": self._killed_before + self._pool.workers_killed,
            "peak_bytes": max(self._peak_before, peak_bytes()),
            "seconds": self._seconds_before + time.perf_counter() - self._began,
            "inputs": self._inputs,
        }

    def go_on_from(self, counts: Mapping[str, Any]) -> None:
        """Continue an earlier start's counts; `ValueError` if files or problems have changed."""
        before, now = counts.get("inputs") or self._inputs, self._inputs
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"{name} has SHA-256 {now.get(name)}; it had {before.get(name)} when the run's "
                    "checkpoint was written: put it back, or remove the run's folder to start again"
                )
        self._uncounted, self._grades_before = self._pool.counters.copy(), Counter(counts["grades"])
        self._killed_before += counts["workers_killed"]
        self._peak_before = counts["peak_bytes"]
        self._seconds_before = counts.get("seconds", 0.0)
