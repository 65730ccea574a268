"""The plan as text: which runs a command would start, and what they would need, before they start.

Times and memory come from the blessed records of the same tier where there are any, else from the
scale's stated cost; the text says which. Where nobody has timed a run, it says that instead of
guessing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from repro.evidence.environment import capture_environment, device_of
from repro.evidence.record import Record, find_record, read_record
from repro.evidence.store import blessed_records
from repro.measure.rollout_plan import not_fitting
from repro.models.memory_plan import CONTEXT_BYTES
from repro.run.disk import free_bytes, size
from repro.run.ensemble_cost import ensemble_seconds, likely_groups, queue_seconds, unmeasured
from repro.run.preflight import is_published, memory_of, preflight, startable_arms
from repro.run.proxy_options import making
from repro.run.select import Selection
from repro.spec.config import RunConfig, TrainScale
from repro.spec.target import Cost
from repro.spec.throughput import ThroughputScale
from repro.spec.tier import REAL_CHECKPOINTS, cuda_devices
from repro.targets.rates import lacking_rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Seconds and bytes of a run by arm, and where they come from."""

    seconds: dict[str, float | None]
    memory_bytes: int
    basis: str


def plan_text(
    selection: Selection,
    runs: list[RunConfig],
    folder: Path,
    expected: Path,
    workers: int = 1,
    devices: int = 1,
) -> str:
    """Return the plan of `runs` as lines of text.

    Parameters
    ----------
    folder
        Where the records are and will be.
    workers, devices
        Runs side by side, and the devices that they fill, for the total time.
    """
    cost = selection.source.costs[selection.tier]
    done = {run.digest() for run in runs if find_record(run, folder) is not None}
    left = [run for run in runs if run.digest() not in done]
    estimates = estimate(selection, cost, expected)
    lines = [
        f"{selection.target.name} at the {selection.tier.value} tier: {len(runs)} runs "
        f"({len(done)} recorded, {len(left)} to do)",
        f"  {selection.target.statement}",
    ]
    missing = selection.tier.missing()
    if missing:
        lines.append(f"  This machine cannot run it: {missing}.")
    for name in cost.lacking():
        lines.append(f"  It needs the policy {name}; first: {making(name)}")
    unchosen = lacking_rates(selection.source, selection.tier)
    if unchosen:
        lines.append(f"  It cannot start: {unchosen}.")
    lines += _arm_lines(runs, done, estimates, together=cost.together is not None)
    ensembles = _ensemble_time(left, cost, workers, devices)
    lines += _totals(runs, left, estimates, cost, workers, ensembles)
    lines += _preflight_lines(left)
    # What cannot start here takes no disk, unless nothing can: then the plan is for elsewhere.
    arms = [run.arm.name for run in left] if missing else startable_arms(left)
    disk = cost.disk_of(arms, workers)
    lines += _disk_lines(disk, free_bytes(folder))
    lines += _prediction_lines(selection, left, expected)
    lines += _not_fitting_lines(left)
    lines += _measured_lines(selection, runs, folder, cost)
    lines.append(f"  records   {folder}")
    return "\n".join(lines)


def _prediction_lines(selection: Selection, left: list[RunConfig], expected: Path) -> list[str]:
    """Return a line where the time is of arms that nothing blessed has timed; else none."""
    homes = {selection.source.name, *(home.name for home, _ in selection.source.shared.values())}
    timed = {
        (record.target, record.arm)
        for name in homes
        for record in blessed_records(expected, selection.tier, name)
    }
    never = list(dict.fromkeys(r.arm.name for r in left if (r.target, r.arm.name) not in timed))
    if not never:
        return []
    listed = "all arms" if len(never) == len({run.arm.name for run in left}) else ", ".join(never)
    granted = "".join(f"; {item}" for item in unmeasured(left))
    return [f"  a prediction: no blessed run of {listed}{granted}"]


def _measured_lines(
    selection: Selection, runs: list[RunConfig], folder: Path, cost: Cost
) -> list[str]:
    """Return a line per recorded run on a published checkpoint: time and peak against the plan.

    The time is of the whole run, loading and evaluation included, in the process that ended it: of
    a run that went on from a checkpoint it is less. The planned peak depends on the device, so that
    without one it is not compared; a record's is the allocator's, without the driver's context.
    """
    if selection.tier not in REAL_CHECKPOINTS:
        return []
    lines = []
    for run in runs:
        path = find_record(run, folder)
        if path is None:
            continue
        record = read_record(path)
        seconds = _seconds_of(record)
        planned = cost.seconds_of_arm.get(run.arm.name)
        peak = record.value("peak_bytes")
        room = memory_of(run.arm, run.scale)[0] - CONTEXT_BYTES
        said = f"{seconds:.0f} s{_against(seconds, planned)}"
        if peak and cuda_devices():
            said += f"; peak {size(int(peak))}{_against(peak, room)}"
        lines.append(f"  measured  {run.arm.name} seed {run.seed}: {said}")
    return lines


def _against(measured: float, planned: float | None) -> str:
    return f" ({100 * (measured / planned - 1):+.1f} % against the plan)" if planned else ""


def _seconds_of(record: Record) -> float:
    begun, ended = map(datetime.fromisoformat, (record.started, record.finished))
    return (ended - begun).total_seconds()


def _preflight_lines(left: list[RunConfig]) -> list[str]:
    """Return a line per reason why arms cannot work here, and one on what is not here yet."""
    refused: dict[str, list[str]] = {}
    unchecked: dict[str, None] = {}
    for run in {run.arm.name: run for run in left}.values():
        said = preflight(run)
        if said.refusal:
            refused.setdefault(said.refusal, []).append(run.arm.name)
        unchecked |= dict.fromkeys(said.unchecked)
    lines = [f"  refused   {', '.join(arms)}: {reason}" for reason, arms in refused.items()]
    later = f"  later     {'; '.join(unchecked)}: looked at when they are here, before the weights"
    return [*lines, later] if unchecked else lines


def _not_fitting_lines(left: list[RunConfig]) -> list[str]:
    """Return a line per point of an arm that does not fit this device, if there is one."""
    devices = cuda_devices()
    arms = {run.arm.name: run for run in left if isinstance(run.scale, ThroughputScale)}
    if not devices:
        return []
    return [
        f"  not run   {cell} of {name}: {sentence}"
        for name, run in arms.items()
        for cell, sentence in not_fitting(run.scale, run.arm, devices[0].memory_bytes).items()
    ]


def _arm_lines(
    runs: list[RunConfig], done: set[str], estimates: Estimates, *, together: bool
) -> list[str]:
    by_arm: dict[tuple[str, str], list[RunConfig]] = {}
    for run in runs:
        by_arm.setdefault((run.target, run.arm.name), []).append(run)
    homes = Counter(arm for _, arm in by_arm)
    lines = []
    for (target, arm), of_arm in by_arm.items():
        seconds = estimates.seconds.get(arm)
        each = "not timed yet" if seconds is None else f"{duration(seconds)} each"
        each = "" if together else each
        finished = sum(run.digest() in done for run in of_arm)
        recorded = f", {finished} recorded" if finished else ""
        listed = ", ".join(str(run.seed) for run in of_arm)
        name = f"{target}.{arm}" if homes[arm] > 1 else arm
        lines.append(f"  {name:<26} {of_arm[0].procedure:<9} seeds {listed:<14} {each}{recorded}")
    return lines


def _ensemble_time(left: list[RunConfig], cost: Cost, workers: int, devices: int) -> str | None:
    """Return the predicted time of runs that go many at once, or None where they do not."""
    together = cost.together
    if together is None or not left:
        return None
    from repro.run.device_queue import ensemble_tasks, sharing

    shared_by = sharing(workers, devices)
    most = together.runs_together // shared_by
    tasks = ensemble_tasks(
        left,
        Path(),
        devices=devices,
        costs={run.scale.checkpoint: together for run in left},
        # Without the policy its shape is not known; the plan is then of likely sizes.
        grouping=(lambda runs, _: likely_groups(runs, most)) if cost.lacking() else None,
        shared_by=shared_by,
    )
    seconds = [ensemble_seconds(task.every, together, shared_by) for task in tasks]
    sizes = ", ".join(str(len(task.every)) for task in tasks)
    wall = together.begin_seconds + queue_seconds(seconds, devices * shared_by)
    busy = together.begin_seconds * min(devices, len(tasks)) + sum(seconds) / shared_by
    side = f", {shared_by} workers on each" * (shared_by > 1)
    return (
        f"{duration(wall)} on {devices} GPU(s){side}, {busy / 60:.0f} "
        f"GPU minutes; ensembles of {sizes} runs"
    )


def _totals(
    runs: list[RunConfig],
    left: list[RunConfig],
    estimates: Estimates,
    cost: Cost,
    workers: int,
    ensembles: str | None,
) -> list[str]:
    times = [estimates.seconds.get(run.arm.name) for run in left]
    known = [seconds for seconds in times if seconds is not None]
    basis = estimates.basis
    if ensembles is not None:
        time, basis = ensembles, cost.basis
    elif len(known) == len(times):
        side = f" with {workers} at a time" if min(workers, len(left)) > 1 else ""
        longest = max(known, default=0.0)
        time = f"{duration(max(longest, sum(known) / max(1, workers)))}{side}"
    else:
        time = "not known"
    absent = [item for item in cost.downloads if not item.present()]
    fetched = "; ".join(f"{item.name} ({size(item.nbytes)})" for item in absent) or "none"
    memory = estimates.memory_bytes * max(1, min(workers, len(left) or 1))
    planned = [
        memory_of(run.arm, run.scale)[0]
        for run in {run.arm: run for run in left or runs}.values()
        if isinstance(run.scale, TrainScale) and is_published(run.scale)
    ]
    if any(planned):
        memory = max(planned)  # of each device
    if ensembles is not None:
        memory = estimates.memory_bytes  # of each device
    return [
        f"  time      {time} ({basis})",
        f"  memory    {size(memory)}",
        f"  downloads {fetched}",
    ]


def _disk_lines(needed: int, free: int | None) -> list[str]:
    """Return what the runs need of the disk of the records, and what is free on it."""
    if free is None:
        return [f"  disk      {size(needed)}"]
    lines = [f"  disk      {size(needed)} of {size(free)} free"]
    if needed > free:
        lines.append(f"  It does not fit: the disk lacks {size(needed - free)}.")
    return lines


def estimate(selection: Selection, cost: Cost, expected: Path) -> Estimates:
    """Return the estimates for a selection: from blessed records if there are any.

    Those of this machine's kind of device count alone where there are some. Those of an earlier
    version of the target did something else and say nothing of its cost.
    """
    seconds: dict[str, float | None] = {
        arm.name: (
            cost.evaluate_seconds
            if selection.source.procedure_of(arm) == "evaluate"
            else cost.train_seconds
        )
        for arm in selection.source.arms
    }
    seconds |= cost.seconds_of_arm
    for arm, (_, recorded) in selection.source.shared.items():
        seconds.setdefault(recorded, seconds[arm])
    memory, basis = cost.memory_bytes, cost.basis
    blessed = [
        record
        for record in blessed_records(expected, selection.tier, selection.source.name)
        if record.target_version == selection.source.version
    ]
    here = device_of(capture_environment())
    blessed = [record for record in blessed if device_of(record.environment) == here] or blessed
    times: dict[str, list[float]] = {}
    for record in blessed:
        together = record.effects.get("repeats_together", 1)
        times.setdefault(record.arm, []).append(_seconds_of(record) / together)
        peak = record.value("peak_bytes")
        memory = max(memory, int(peak)) if peak else memory
    if times:
        seconds |= {arm: median(values) for arm, values in times.items()}
        devices = sorted({device_of(record.environment) or "a CPU" for record in blessed})
        basis = f"median of {len(blessed)} blessed records of {', '.join(devices)}"
    return Estimates(seconds=seconds, memory_bytes=memory, basis=basis)


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
