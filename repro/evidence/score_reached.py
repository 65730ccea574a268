"""When a run first reached a score on held-out problems: `python -m repro.evidence.score_reached`.

    python -m repro.evidence.score_reached expected/records/mini/DEVICE/TARGET.csv 35

names it for every run of a stored file. Tests lie along the run and at its end; the first at or
above the percentage counts, so that the steps are an upper bound. A run that ended at a score has
its seconds from a cold start, tests included. Of others it is the steps times the mean seconds of a
step: loading and tests are not in it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from repro.evidence.record import Record
from repro.evidence.store import read_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The first test at or above a percentage; `percent` is what it gave of right greedy answers.

    `seconds` are from a cold start where the run ended there (`cold`), else of training alone.
    """

    seconds: float
    percent: float
    steps: int
    cold: bool

    def text(self) -> str:
        """Return the sentence that a run ends with."""
        since = "from a cold start" if self.cold else "of training"
        return (
            f"{self.seconds:.0f} seconds {since} to {self.percent:.1f} % (greedy, held-out), "
            f"{self.steps} steps"
        )


def score_reached(record: Record, percent: float) -> Reached | None:
    """Return when a run first reached a percentage of right greedy answers; None if it did not."""
    series = record.series
    steps, scores = series.get("test_steps", []), series.get("test_accuracy_greedy", [])
    tested = list(zip(steps, scores, strict=True))
    made = int(record.facts.get("optimizer_steps", 0))
    tested.append((float(made), record.value("accuracy_greedy")))
    for place, (step, score) in enumerate(tested):
        if step and score is not None and score >= percent:
            waited = series.get("test_seconds", [])[place : place + 1]
            seconds = waited[0] if waited else (record.value("train_seconds") or 0.0) * step / made
            return Reached(
                seconds=seconds or 0.0, percent=score, steps=int(step), cold=bool(waited)
            )
    return None


def main() -> int:
    """Print a line for each run of a stored file; return the exit status."""
    try:
        path, percent = Path(sys.argv[1]), float(sys.argv[2])
    except (IndexError, ValueError):
        sys.exit("needs a stored CSV file and a percentage, such as 35")
    for record in read_stored(path):
        reached = score_reached(record, percent)
        text = reached.text() if reached else f"did not reach {percent:g} % at a test"
        sys.stdout.write(f"{record.arm}, seed {record.seed}: {text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
