"""Receipts of a run that was stopped are those of the whole run, not of its last start."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro.evidence.procedure import Measured, Stopped
from repro.procedures import tally as module
from repro.procedures.tally import RunTally
from repro.procedures.train import train_and_evaluate
from tests.repro.procedures.test_together import SCALE, make_run, silent

RUN = dataclasses.replace(make_run(0), scale=dataclasses.replace(SCALE, test_sets=()))


class Board:
    """Has been graded as it is told."""

    def __init__(self, *grades: dict[str, int]) -> None:
        self.evaluator = SimpleNamespace(grades=[Counter(own) for own in grades])

    def grades(self, number: int) -> dict[str, int]:
        """Return a copy of a run's."""
        return dict(self.evaluator.grades[number])


def tally_of(grades: dict[str, int], killed: int) -> tuple[RunTally, Any, Any]:
    board: Any = Board({"ok": 100}, grades)
    pool: Any = SimpleNamespace(workers_killed=0)
    tally = RunTally(board, pool, 1)
    pool.workers_killed = killed
    return tally, board, pool


def test_counts_go_on_from_those_of_the_start_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "peak_bytes", lambda: 700)
    first, board, _ = tally_of({"ok": 5, "wrong": 3}, killed=2)
    counts = first.counts()
    assert counts == {"grades": {"ok": 5, "wrong": 3}, "workers_killed": 2, "peak_bytes": 700}
    # The second start has asked again what was asked before training, and lost a grader in it.
    monkeypatch.setattr(module, "peak_bytes", lambda: 600)
    second, board, pool = tally_of({"ok": 4}, killed=1)
    second.go_on_from(counts)
    board.evaluator.grades[1].update(["timeout"])
    pool.workers_killed += 1
    assert second.counts() == {
        "grades": {"ok": 5, "wrong": 3, "timeout": 1}, "workers_killed": 4, "peak_bytes": 700,
    }  # fmt: skip
    assert board.grades(0) == {"ok": 100}


def test_graders_killed_under_another_run_are_not_this_one_s() -> None:
    pool: Any = SimpleNamespace(workers_killed=3)
    assert RunTally(Board({}), pool).workers_killed == 0  # type: ignore[arg-type]


def test_a_stopped_run_has_the_receipts_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(folder: str, stops: list[bool]) -> Measured:
        answers = iter([*stops, *[False] * 100])
        return train_and_evaluate(
            RUN,
            folder=tmp_path / folder,
            progress=silent,
            should_stop=lambda: next(answers),
            threads=1,
        )

    whole = start("whole", [])
    with monkeypatch.context() as patch:
        patch.setattr(module, "peak_bytes", lambda: 2**50)
        with pytest.raises(Stopped):
            start("parts", [False, False, True])
    rest = start("parts", [])
    assert rest.series == whole.series
    for effects in (rest.effects, whole.effects):
        effects.pop("seconds")
    assert rest.effects == whole.effects
    assert sum(rest.effects["grades"].values()) > 0
    assert rest.metrics["peak_bytes"].value == 2**50
