"""Carry out runs: from a run's procedure to its record.

A procedure (`repro.evidence.procedure`) is named by its target and found here by that name; its
module is imported when it is first needed, so that nothing above pays for torch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from repro.evidence.environment import capture_environment, steady_now
from repro.evidence.origins import grouped_by
from repro.evidence.procedure import Measured, RunContext
from repro.evidence.provenance import source_at_start
from repro.evidence.record import failed_record, record_of
from repro.run.analysis_plan import plan_inputs
from repro.spec.checks import require
from repro.spec.config import RunConfig
from repro.spec.tier import Tier, cuda_devices

_PROCEDURES = {
    "train": "repro.procedures.train:train_and_evaluate",
    "evaluate": "repro.procedures.train:evaluate_untrained",
    "dose": "repro.procedures.dose:measure_dose",
    "pretrain": "repro.procedures.pretrain:pretrain_policy",
    "operation": "repro.measure.operation:measure_operations",
    "throughput": "repro.measure.throughput:measure_seeds",
    "step_time": "repro.measure.step_time:measure_steps",
}

# Procedures that carry out all runs of one arm together, because loading takes longest. Each takes
# several runs that differ only in their seed, and returns what each has measured.
_TOGETHER = ("throughput",)


def launched_ranks() -> int:
    """Return how many processes carry out this one's run, itself included; 1 where it is alone."""
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "")
    require(size.isdigit() and int(size) > 0, f"WORLD_SIZE is {size!r}; needs 1 or more")
    number = rank.isdigit() and int(rank) < int(size)
    require(
        size == "1" or number,
        f"WORLD_SIZE is {size} and RANK {rank!r}; torchrun sets both: leave WORLD_SIZE out",
    )
    return int(size)


def carried_together(runs: Sequence[RunConfig]) -> list[tuple[RunConfig, ...]]:
    """Return the runs in the groups in which they are carried out, in the order of their first."""

    def shared(run: RunConfig) -> str:
        return (replace(run, seed=0) if run.procedure in _TOGETHER else run).digest()

    return [tuple(group) for group in grouped_by(runs, shared).values()]


def procedure_named(name: str) -> Any:
    """Return the procedure called `name`, importing its module."""
    module, function = _PROCEDURES[name].split(":")
    return getattr(importlib.import_module(module), function)


def carry_out(runs: Sequence[RunConfig], records: Path, context: RunContext) -> list[Path]:
    """Carry out runs that go together, and write their records into `records`; return the paths.

    Of several ranks only the first writes.
    """
    source_at_start()  # before a procedure is imported: what is on the disk now is what will run
    started = steady_now()
    measure = _measure_watched if runs[0].tier == Tier.SYSTEMS.value else _measure
    measured = measure(runs, context)
    if launched_ranks() > 1 and os.environ["RANK"] != "0":
        return []
    environment = capture_environment()
    paths = []
    for run, measurement in zip(runs, measured, strict=True):
        left_out = measurement.facts.get("not_run")
        if left_out and not measurement.metrics:
            reason = "; ".join(f"{part} {sentence}" for part, sentence in left_out.items())
            paths.append(failed_record(run, reason, environment, started).write(records))
        else:
            paths.append(keep(run, measurement, started, records, environment))
    return paths


def _measure_watched(runs: Sequence[RunConfig], context: RunContext) -> list[Measured]:
    """Measure on a device whose memory is free, and add the device's state to the facts."""
    from repro.measure.device_state import between, device_state, require_clean

    if cuda_devices():
        require_clean()
    before = device_state()
    measured = _measure(runs, context)
    device = {"device": between(before, device_state())}
    return [replace(item, facts=item.facts | device) for item in measured]


def keep(
    run: RunConfig, measured: Measured, started: datetime, runs: Path, environment: dict[str, Any]
) -> Path:
    """Write the record of `run`'s results into `runs`, with its plans' digests; return its path."""
    planned = replace(measured, inputs=measured.inputs | plan_inputs(run))
    return record_of(run, planned, environment=environment, started=started).write(runs)


def _measure(runs: Sequence[RunConfig], context: RunContext) -> list[Measured]:
    procedure = procedure_named(runs[0].procedure)
    if runs[0].procedure in _TOGETHER:
        measured: list[Measured] = procedure(runs, context)
        return measured
    (run,) = runs
    return [procedure(run, context)]
