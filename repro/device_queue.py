"""Which planned runs go together on one device, and on which devices.

Small runs are carried out many at once as one batched model. A unit of work is an ensemble; the
queue hands one after another to a worker process a device, which sees its own device alone
(`CUDA_VISIBLE_DEVICES`). There are at least as many ensembles as devices where the runs allow it,
and the longest goes first. A worker that dies gives its runs back to the queue once; each run's
record is written as soon as it is done, so nothing that finished is done again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from repro.evidence.record import run_folder
from repro.procedures import is_ensemble
from repro.spec.config import RunConfig, digest_of, require
from repro.spec.tier import Tier, cuda_devices
from repro.workers import Task

RETRIES = 1
Grouping = Callable[[Sequence[RunConfig], int], Sequence[tuple[RunConfig, ...]]]


def visible_devices(named: str | None) -> tuple[str, ...]:
    """Return the devices to fill, as `CUDA_VISIBLE_DEVICES` names them.

    Parameters
    ----------
    named
        How many (`2`) or which (`0,3`); None takes all that this process may use.

    Raises
    ------
    ValueError
        If more are asked for than there are.
    """
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        every = tuple(part.strip() for part in allowed.split(",") if part.strip())
    else:
        every = tuple(str(index) for index in range(len(cuda_devices())))
    if named is None:
        return every
    if "," in named:
        chosen = tuple(part.strip() for part in named.split(",") if part.strip())
        unknown = sorted(set(chosen) - set(every))
        require(not unknown, f"--devices {named}: there is no {', '.join(unknown)}; found {every}")
        return chosen
    require(named.isdigit(), f"--devices {named}: needs a number such as 2, or 0,1")
    require(
        1 <= int(named) <= len(every), f"--devices {named}: this machine shows {len(every)} devices"
    )
    return every[: int(named)]


def fitting_memory(memory_bytes: int) -> int:
    """Return the memory that an ensemble may fill: what is planned, or all that devices have."""
    return min([memory_bytes, *(device.memory_bytes for device in cuda_devices())])


def ensemble_tasks(
    pending: Sequence[RunConfig],
    runs: Path,
    *,
    devices: int,
    memory_bytes: int,
    grouping: Grouping | None = None,
) -> list[Task]:
    """Return the tasks of runs that go many at once; other runs get a task each.

    Parameters
    ----------
    pending
        Runs without a record.
    runs
        Folder of the records.
    devices
        How many will be filled.
    memory_bytes
        Device memory of one ensemble.
    grouping
        What makes ensembles of runs; None takes the suite's own.
    """
    together = [run for run in pending if is_ensemble(run)]
    alone = [run for run in pending if not is_ensemble(run)]
    if together and grouping is None:
        from repro.ensemble.grouping import group_runs

        grouping = group_runs
    groups = [tuple(group) for group in grouping(together, memory_bytes)] if grouping else []
    groups = spread(groups, devices)
    return [_task(group, runs) for group in groups] + [
        Task(run=run, folder=run_folder(run, runs), runs=runs) for run in alone
    ]


def spread(groups: Sequence[tuple[RunConfig, ...]], devices: int) -> list[tuple[RunConfig, ...]]:
    """Return the groups, the largest halved until there is one a device, largest first."""
    found = sorted(groups, key=len, reverse=True)
    while found and len(found) < devices and len(found[0]) > 1:
        largest = found.pop(0)
        half = (len(largest) + 1) // 2
        found = sorted([*found, largest[:half], largest[half:]], key=len, reverse=True)
    return found


def _task(group: tuple[RunConfig, ...], runs: Path) -> Task:
    name = digest_of([run.digest() for run in group])[:12]
    folder = runs / Tier.PROXY.value / ".ensembles" / name
    return Task(run=group[0], folder=folder, runs=runs, also=group[1:])
