"""Which planned runs go together on one device, and on which devices.

Small runs are carried out many at once as one batched model. A unit of work is an ensemble; the
queue hands one after another, the longest first, to one worker process per device, which sees its
own device alone (`CUDA_VISIBLE_DEVICES`). How long one is, is counted and not estimated: training
steps times the rows of a step. Where there are fewer ensembles than workers, the longest are
halved.

A worker that dies gives its runs back to the queue once; each run's record is written as soon as it
is done, so nothing that finished is done again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from repro.evidence.record import run_folder
from repro.run.carry_out import is_ensemble
from repro.run.worker import Task
from repro.spec.arm import require
from repro.spec.config import RunConfig, TrainScale, digest_of
from repro.spec.tier import REAL_CHECKPOINTS, Tier, cuda_devices

RETRIES = 1
# Whose runs, or ensembles, take a device each.
SPREAD_TIERS = REAL_CHECKPOINTS
Group = tuple[RunConfig, ...]
Grouping = Callable[[Sequence[RunConfig], int], Sequence[Group]]


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


def planned_workers(tier: Tier, named: str | None, workers: int | None = None) -> int:
    """Return the runs or ensembles side by side that a plan is of, on any machine.

    Parameters
    ----------
    named
        Devices by number or name, which need not be here; None takes those that are, at least one.
    workers
        How many are asked for; None takes one per device.

    Raises
    ------
    ValueError
        If it names none, or several for a tier whose runs share one; as `require_workers`.
    """
    if named is None:
        devices = len(visible_devices(None)) if tier in SPREAD_TIERS else 0
    else:
        parts = [part for part in named.split(",") if part]
        devices = int(named) if named.isdigit() else len(parts)
        require(devices > 0, f"--devices {named}: needs a number such as 2, or 0,1")
        _require_spread(tier, named, devices)
    planned = workers or devices or 1
    require_workers(tier, planned, devices)
    return planned


def devices_of(tier: Tier, named: str | None) -> tuple[str, ...]:
    """Return the devices that a tier's runs fill; none named for tiers that share one device.

    Raises
    ------
    ValueError
        If devices are named that are not there, or for a tier that does not fill several.
    """
    if tier in SPREAD_TIERS:
        return visible_devices(named)
    _require_spread(tier, named, 1 if named in (None, "1") else 2)
    return ()


def _require_spread(tier: Tier, named: str | None, count: int) -> None:
    require(
        count == 1 or tier in SPREAD_TIERS,
        f"--devices {named}: runs of the {tier.value} tier do not spread over devices; needs 1",
    )


def require_workers(tier: Tier, workers: int, devices: int) -> None:
    """Raise `ValueError` where runs side by side would share a device that one of them fills."""
    require(
        workers == 1 or tier is not Tier.SYSTEMS,
        f"--workers {workers}: measurements on one device run one at a time; needs 1",
    )
    most = max(1, devices)
    require(
        workers <= most or tier not in REAL_CHECKPOINTS,
        f"--workers {workers}: a run of the {tier.value} tier takes a device for itself, out of "
        f"{devices}; needs at most {most}",
    )


def fitting_memory(memory_bytes: int) -> int:
    """Return the memory that an ensemble may fill: what is planned, or the smallest device's."""
    return min([memory_bytes, *(device.memory_bytes for device in cuda_devices())])


def ensemble_tasks(
    pending: Sequence[RunConfig],
    runs: Path,
    *,
    workers: int,
    memory: Mapping[str, int],
    grouping: Grouping | None = None,
) -> list[Task]:
    """Return the tasks of runs that go many at once, longest first; other runs get a task each.

    Parameters
    ----------
    pending
        Runs without a record.
    runs
        Folder of the records.
    memory
        By checkpoint: bytes that an ensemble of its runs may fill of a device.
    grouping
        What makes ensembles of runs and of the memory of one; None takes the suite's own.
    """
    together = [run for run in pending if is_ensemble(run)]
    alone = [run for run in pending if not is_ensemble(run)]
    if together and grouping is None:
        from repro.rl.stacked.grouping import group_runs

        grouping = group_runs
    groups: list[Group] = []
    for checkpoint in dict.fromkeys(run.scale.checkpoint for run in together):
        fitting = fitting_memory(memory[checkpoint])
        alike = [run for run in together if run.scale.checkpoint == checkpoint]
        groups += [tuple(group) for group in (grouping(alike, fitting) if grouping else ())]

    return [_task(group, runs) for group in spread(groups, workers)] + [
        Task(run=run, folder=run_folder(run, runs), runs=runs)
        for run in sorted(alone, key=rows_of, reverse=True)
    ]


def spread(groups: Sequence[Group], workers: int) -> list[Group]:
    """Return the groups longest first, the longest halved until every worker has one.

    A half keeps a seed's runs together as far as it goes: arms are compared within a seed.
    """
    parts = sorted(groups, key=_rows_of_group, reverse=True)
    while parts and len(parts) < workers and len(parts[0]) > 1:
        by_seed = sorted(parts.pop(0), key=lambda run: run.seed)
        middle = len(by_seed) // 2
        parts += [tuple(by_seed[:middle]), tuple(by_seed[middle:])]
        parts.sort(key=_rows_of_group, reverse=True)
    return parts


def _rows_of_group(group: Group) -> int:
    return sum(map(rows_of, group))


def rows_of(run: RunConfig) -> int:
    """Return the rows that a run trains on, over all its steps; 0 where it trains on none."""
    if run.procedure == "evaluate" or not isinstance(run.scale, TrainScale):
        return 0
    rows: int = run.scale.steps * run.scale.prompts_per_rollout * run.scale.group_size
    return rows


def _task(group: Group, runs: Path) -> Task:
    name = digest_of([run.digest() for run in group])[:12]
    folder = runs / group[0].tier / ".ensembles" / name
    return Task(run=group[0], folder=folder, runs=runs, also=group[1:])
