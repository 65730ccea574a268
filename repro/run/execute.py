"""Carry out a plan: skip recorded runs, run the others on worker processes, record each result.

A run with a record of success is never run again. Several processes may be started on one folder of
records (`repro.run.shared_work`); each run is then carried out by one of them. A failed run leaves
a failure record with the reason in the same folder, and the next start tries it again. An
interrupted training run resumes from its checkpoint; an interrupted measurement starts over. If the
disk cannot be written to, the command stops without failing any run (`repro.run.disk`). Results
depend neither on the number of workers nor on which worker carries out a run.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from repro.evidence.environment import capture_environment
from repro.evidence.provenance import source_at_start
from repro.evidence.record import failed_record, read_record, record_path, standing_of
from repro.run.analysis_plan import write_plans
from repro.run.carry_out import launched_ranks
from repro.run.data_check import data_lines
from repro.run.disk import DiskError, require_writable
from repro.run.places import expected_folder, runs_folder
from repro.run.plan import plan_text
from repro.run.preflight import (
    disk_refusal,
    fetch_files,
    files_refusal,
    fit_runs,
    machine_refusal,
    refusal,
)
from repro.run.progress import Display, Outlasting
from repro.run.select import Selection, parse_arms, parse_seeds, selections_of
from repro.run.several_ranks.rank_processes import (
    LEFT,
    Ranked,
    follow,
    join_torchrun,
    leave_torchrun,
    ranks_of,
    refused_by_any,
    refused_folder,
)
from repro.run.several_ranks.room import Room, room_of
from repro.run.shared_work import RunLocks
from repro.run.unchanged import find_unchanged
from repro.run.worker import CarryOut, Event, Task, on_stopping, tasks_of
from repro.run.workers import WorkerPool
from repro.runlog.run_logger import LogOptions
from repro.spec.checks import all_of, require, tried
from repro.spec.config import RunConfig
from repro.spec.target import other_tiers
from repro.spec.tier import Tier, require_linux

if TYPE_CHECKING:
    from repro.distributed import Ranks

FINE, FAILED, INTERRUPTED = 0, 1, 130
# A selection of a user's own, and what is printed of it.
Own = tuple[Selection, str] | None
SHOWN = ("accuracy_greedy_start", "accuracy_greedy", "accuracy", "train_seconds")

_RETRIES = 1
# Seconds that a worker has to end its step and write its checkpoint; a step of 32B takes minutes.
_GRACE = 600.0


@dataclass(slots=True, kw_only=True)
class RunCounts:
    """Numbers of runs that were recorded before, finished now, failed, or are left to do."""

    before: int
    finished: int = 0
    failed: int
    left: int


def main_run(args: argparse.Namespace, own: Own = None) -> int:
    """Carry out the runs that the command line selects; return the exit status.

    It is 0 when every run is recorded, 1 when one failed, 130 when some are left. `own` is a
    selection in place of those that the line names, and what is printed of it.
    """
    require_linux()
    source_at_start()  # what the records of this start, and its plans, are of
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ or launched_ranks() > 1
    for flag, value, alone in (("ranks", args.ranks, 1), ("executor", args.executor, "workers")):
        require(
            value == alone or not torchrun,
            f"--{flag} {value}: torchrun starts the ranks already; leave one of both out",
        )
    seconds = args.stall_timeout
    require(0 < seconds < math.inf, f"--stall-timeout {seconds:g}: needs more than 0, and finite")
    joined = join_torchrun(seconds) if launched_ranks() > 1 else None
    console = Outlasting(soft_wrap=True, quiet=joined is not None and not joined.first)
    folder = runs_folder(args.runs)
    (batches,), refused = tried(partial(_prepared, args, folder, console, joined, own))
    # Of torchrun's ranks the first alone prints, so it must know why another cannot start.
    if joined is not None:
        refused = [refused_by_any(joined, "; ".join(refused)) or refused_folder(joined, folder)]
    require(not any(refused), "; ".join(refused))
    with LogOptions.of_line(args).passed_on():
        status = _carry_out(batches, folder, console, joined)
    if joined is not None:
        leave_torchrun()
    return status


def _prepared(
    args: argparse.Namespace, folder: Path, console: Console, joined: Ranks | None, own: Own
) -> list[_Batch]:
    """Print the plan and return its runs, and the room that they have."""
    expected, here = expected_folder(args.expected), args.executor != "ray"
    _, selections = all_of(
        partial(LogOptions.of_line, args), lambda: [own[0]] if own else selections_of(args)
    )
    batches: dict[Tier, _Batch] = {}
    for selection in selections:
        plan, tier = selection.plan(parse_seeds(args.seeds), parse_arms(args.arms)), selection.tier
        _, room, notes = all_of(
            partial(require_ready, selection, here=here, named=own is None),
            partial(room_of, args, tier, plan, joined, folder),
            partial(data_lines, plan, own is not None),
        )
        ranks, workers = room.ranks, room.workers
        left, _ = fit_runs(standing_of(plan, folder).left, partial(refusal, ranks=ranks))
        full = disk_refusal(selection.source.needs_at(tier), left, workers, folder)
        prefix = "" if own else f"{selection.target.name}, {tier.value} tier: "
        require(full is None, f"{prefix}{full}")
        others = "" if args.tier or own else other_tiers(selection.source, tier)
        text = own[1] if own else plan_text(selection, plan, folder, expected, workers, ranks)
        for part in filter(None, (others, text, room.idle, *notes)):
            console.print(part, highlight=False, markup=False)
        fetch_files(left if here else [], ranks)
        batch = batches.setdefault(tier, _Batch(room=room))
        batch.runs.update({run.digest(): run for run in plan})
    return list(batches.values())


def require_ready(selection: Selection, *, here: bool = True, named: bool = True) -> None:
    """Raise `ValueError`, perhaps `named`, unless the selection can run, `here` or elsewhere."""
    source, tier = selection.source, selection.tier
    missing = None
    if here:
        missing = machine_refusal(source, tier)
    elif tier not in source.scales:
        missing = source.not_runnable(tier)
    at = f", {tier.value} tier" if source.scales else ""
    prefix = f"{selection.target.name}{at}: " if named else ""
    require(missing is None, f"{prefix}{missing}")


@dataclass(slots=True, kw_only=True)
class _Batch:
    """The distinct runs of one tier, by digest, and the room that they have."""

    room: Room
    runs: dict[str, RunConfig] = field(default_factory=dict)


def _carry_out(batches: list[_Batch], folder: Path, console: Console, joined: Ranks | None) -> int:
    worst = FINE
    for batch in batches:
        plan = list(batch.runs.values())
        if joined is not None and not joined.first:
            if follow(joined, tasks_of(plan, folder), batch.room.threads):
                return INTERRUPTED
            continue
        for path in write_plans(plan, folder):
            console.print(f"wrote the analysis plan {path}", highlight=False)
        outcome = execute(plan, folder, room=batch.room, console=console)
        if joined is not None:
            joined.objects(LEFT if outcome.left else "")  # the other ranks return from `follow`
        worst = max(worst, FAILED if outcome.failed else FINE, INTERRUPTED * bool(outcome.left))
        if outcome.left:
            break
    return worst


def execute(
    plan: Sequence[RunConfig],
    runs: Path,
    *,
    room: Room,
    console: Console,
    carry_out: CarryOut | None = None,
) -> RunCounts:
    """Carry out every run of `plan` that has no record of success yet, in a room.

    `carry_out` replaces the default one, for tests.

    A run at whose place stands what `find_unchanged` refuses counts as failed; that is left alone.

    Raises `ValueError` if no run can be carried out and none is recorded, or the disk of the
    records cannot be used (`DiskError`).
    """
    standing = standing_of(plan, runs, find_unchanged)
    before = len(standing.recorded)
    pending, refused = fit_runs(
        standing.left, lambda run: refusal(run, room.ranks) or files_refusal(run)
    )
    refused = [f"Not run: {why}." for why in (*standing.blocked, *refused)]
    require(bool(pending or before) or not plan, "\n".join(refused))
    for sentence in refused:
        console.print(sentence, highlight=False, markup=False)
    counts = RunCounts(before=before, failed=len(standing.blocked), left=len(pending))
    if not pending:
        every = "All" if before == len(plan) else "Of all runs"
        console.print(f"{every} {before} runs are recorded in {runs}; nothing to do.")
        return counts
    require_writable(runs)
    if before:
        console.print(f"{before} of {len(plan)} runs are recorded already; {len(pending)} to do.")
    tasks = tasks_of(pending, runs.absolute())
    locks = RunLocks(runs, pending, lambda text: console.print(text, highlight=False, markup=False))
    grace = _GRACE
    if max(room.ranks, *map(ranks_of, pending)) > 1:
        carry_out = Ranked(ranks=room.ranks, stall=room.stall, body=carry_out)
        grace = max(grace, room.stall)
    pool = room.pool(
        room.workers,
        runs / "workers.log",
        room.threads,
        grace,
        devices=room.devices,
        retries=_RETRIES,
        carry_out=carry_out,
        # Measurements, and what leaves vLLM's memory, which ends with its process.
        alone=any(
            run.tier == Tier.SYSTEMS.value or getattr(run.scale, "sampler", "own") == "vllm"
            for run in plan
        ),
        claim=locks.take,
    )
    stopping = on_stopping(_asked_to_stop(pool, console))
    with locks, pool, Display(tasks, before, console) as display, stopping:
        faults = _follow(pool, tasks, locks, counts, display)
    if faults:
        raise DiskError(f"{faults[0]}; {counts.left} runs are left; rerun the command to continue")
    if counts.left:
        console.print(f"Interrupted: {counts.left} runs are left. Rerun the command to continue.")
    return counts


def _follow(
    pool: WorkerPool, tasks: Sequence[Task], locks: RunLocks, counts: RunCounts, display: Display
) -> list[str]:
    """Wait for all tasks to end; return errors of the disk."""
    faults = []
    for event in pool.execute(tasks):
        for fault in _conclude(event, counts):
            display.show(Event(task=event.task, kind="warning", text=fault))
        if event.kind in ("finished", "failed", "stopped", "disk"):
            locks.release(event.task)
        if event.kind == "disk":
            faults.append(event.text)
        display.show(event, _shown(event))
    return faults


def _conclude(event: Event, counts: RunCounts) -> list[str]:
    """Count an ended run; write a failure record, or remove a finished run's checkpoint.

    Returns why what stands at the place of a record is not the run's.
    """
    if event.kind not in ("finished", "failed", "elsewhere"):
        return []
    task = event.task
    standing = standing_of(task.every, task.runs)
    counts.finished += len(standing.recorded)
    counts.failed += len(task.every) - len(standing.recorded)
    counts.left -= len(task.every)
    if event.kind == "failed":
        # Some of a task's runs may have been recorded before its worker died: these are done.
        environment = capture_environment()
        for run in standing.left:
            failed_record(run, event.text, environment).write(task.runs)
    elif event.kind == "finished":
        shutil.rmtree(task.folder / "checkpoint", ignore_errors=True)
    return standing.blocked


def _shown(event: Event) -> dict[str, float]:
    task = event.task
    if event.kind != "finished" or task.run not in standing_of([task.run], task.runs).recorded:
        return {}
    record = read_record(record_path(task.run, task.runs))
    values = {name: record.value(name) for name in SHOWN}
    return {name: value for name, value in values.items() if value is not None}


def _asked_to_stop(pool: WorkerPool, console: Console) -> Callable[[int, FrameType | None], None]:
    """Return what lets workers stop after their current step, at a second signal at once."""
    asked: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked is None:
            asked = time.monotonic()
            console.print("Stopping: what trains writes a checkpoint. Once more to stop at once.")
            pool.stop()
        elif time.monotonic() - asked > 0.5:
            pool.close()
            raise KeyboardInterrupt

    return handle
