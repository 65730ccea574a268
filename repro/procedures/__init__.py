"""Procedures: each carries out one run and yields what was measured, from which a record is made.

A procedure is named by its target and found here by that name; its module is imported when it is
first needed, so that nothing above pays for torch. It gets the resolved configuration, its own
folder, a way to tell its progress and a way to be stopped; it returns `Measured` or raises.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from repro.evidence.environment import capture_environment
from repro.evidence.record import Estimate, record_of
from repro.spec.config import RunConfig

Progress = Callable[[str, dict[str, float]], None]


class Stopped(Exception):  # noqa: N818 - not an error: the run was asked to stop and can go on
    """The run was asked to stop, and left a checkpoint to go on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one run came to.

    Attributes
    ----------
    metrics
        By metric name, each with unit, interval, n and method.
    series
        One value a step, None where a step has none.
    effects
        What was really done: the guard against runs in which nothing happened.
    inputs
        SHA-256 of what went in: checkpoint, problems, prompt template.
    """

    metrics: dict[str, Estimate]
    series: dict[str, list[float | None]] = field(default_factory=dict)
    effects: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)


class Procedure(Protocol):
    """Carries out one run."""

    def __call__(
        self,
        run: RunConfig,
        *,
        folder: Path,
        progress: Progress,
        should_stop: Callable[[], bool],
        threads: int,
    ) -> Measured:
        """Return what was measured; raise `Stopped` when asked to stop."""


_PROCEDURES = {
    "train": "repro.procedures.train:train_and_evaluate",
    "evaluate": "repro.procedures.train:evaluate_untrained",
    "pretrain": "repro.procedures.pretrain_run:pretrain_policy",
    "operation": "repro.procedures.operation:measure_operations",
    "throughput": "repro.procedures.throughput:measure_throughput",
    "step_time": "repro.procedures.step_time:measure_steps",
}


def procedure_named(name: str) -> Procedure:
    """Return the procedure called `name`, importing its module.

    Raises
    ------
    ValueError
        If there is none.
    """
    if name not in _PROCEDURES:
        known = ", ".join(sorted(_PROCEDURES))
        raise ValueError(f"there is no procedure {name!r}; the procedures are {known}")
    module, function = _PROCEDURES[name].split(":")
    found: Procedure = getattr(importlib.import_module(module), function)
    return found


def carry_out(
    run: RunConfig,
    folder: Path,
    runs: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Path:
    """Carry out `run` and write its record into `runs`; return the record's path."""
    started = datetime.now(UTC)
    procedure = procedure_named(run.procedure)
    measured = procedure(
        run, folder=folder, progress=progress, should_stop=should_stop, threads=threads
    )
    record = record_of(
        run,
        metrics=measured.metrics,
        series=measured.series,
        effects=measured.effects,
        inputs=measured.inputs,
        environment=capture_environment(),
        started=started,
    )
    return record.write(runs)
