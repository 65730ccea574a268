"""The same failure twice stops what shares it, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from repro.evidence.record import iterate_records
from repro.run.execute import execute
from repro.run.repeated import Alike, RepeatedFailures
from repro.run.worker import Event, Task
from repro.spec.config import RunConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find


def runs(*arms: str, seeds: int = 1) -> list[RunConfig]:
    return plan(find("table1"), Tier.SMOKE, seeds, arms)


def failed(run: RunConfig, text: str) -> Event:
    return Event(task=Task(run=run, folder=Path(), runs=Path()), kind="failed", text=text)


def test_two_arms_that_fail_alike_stop_the_target() -> None:
    failures = RepeatedFailures()
    first, second = runs("bf16_lora", "nvfp4_lora")
    assert failures.note(failed(first, "DataError: 12 problems\nTraceback")) is None
    alike = failures.note(failed(second, "DataError: 13 problems\nelsewhere"))
    assert alike == Alike(target="table1", arm=None, reason="DataError: 13 problems")
    assert alike.covers(Task(run=runs("mxfp4_lora")[0], folder=Path(), runs=Path()))
    assert "its other runs are not started" in alike.sentence


def test_two_seeds_of_an_arm_that_fail_alike_stop_the_arm() -> None:
    failures = RepeatedFailures()
    first, second = runs("bf16_lora", seeds=2)
    assert failures.note(failed(first, "ValueError: the gradient norm is nan")) is None
    alike = failures.note(failed(second, "ValueError: the gradient norm is nan"))
    assert alike is not None
    assert alike.arm == "bf16_lora"
    assert not alike.covers(Task(run=runs("nvfp4_lora")[0], folder=Path(), runs=Path()))


def test_failures_of_different_kinds_stop_nothing() -> None:
    failures = RepeatedFailures()
    first, second = runs("bf16_lora", "nvfp4_lora")
    assert failures.note(failed(first, "OutOfMemoryError: tried")) is None
    assert failures.note(failed(second, "DataError: none")) is None


def refuse(*_: Any) -> None:
    raise ValueError("there is no such split")


def test_a_target_whose_runs_fail_alike_is_not_tried_to_the_end(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    outcome = execute(
        runs("bf16", "nf4", "mxfp4", "nvfp4", seeds=3),
        tmp_path,
        workers=1,
        threads=1,
        console=console,
        carry_out=refuse,
    )
    assert (outcome.finished, outcome.left) == (0, 0)
    assert 2 <= outcome.failed <= 3  # one more may have begun
    assert "table1: two runs failed alike (ValueError: there is no such split)" in (
        console.export_text()
    )
    assert len(list(iterate_records(tmp_path, "smoke", "table1"))) == outcome.failed
