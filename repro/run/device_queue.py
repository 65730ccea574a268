"""Which planned runs go together on one device, and on which devices.

Small runs are carried out many at once as one batched model. A unit of work is an ensemble; the
queue hands one after another, the longest first, to one worker process per device, which sees its
own device alone (`CUDA_VISIBLE_DEVICES`). Where devices would wait for one another, ensembles are
cut, as far as the cost model says that the last of them then ends earlier: a cut is not free, for
an ensemble's steps take a time that does not depend on how many runs it has. Several workers to a
device share its memory equally, and it gets as many ensembles.

A worker that dies gives its runs back to the queue once; each run's record is written as soon as it
is done, so nothing that finished is done again. A device that no longer answers is left out
(`repro.run.device_health`), and its runs go to the others.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from repro.evidence.record import run_folder
from repro.run.carry_out import is_ensemble
from repro.run.ensemble_cost import ends_of, ensemble_seconds
from repro.run.worker import Task
from repro.spec.arm import require
from repro.spec.config import RunConfig, digest_of
from repro.spec.target import TogetherCost
from repro.spec.tier import REAL_CHECKPOINTS, Tier, cuda_devices

RETRIES = 1
# Whose runs, or ensembles, take a device each.
SPREAD_TIERS = (Tier.PROXY, *REAL_CHECKPOINTS)
Group = tuple[RunConfig, ...]
Grouping = Callable[[Sequence[RunConfig], int], Sequence[Group]]
# Ends within this factor are alike: predictions are no better than that.
_ABOUT = 1.03
# Where a group may be cut in two, beside equal parts: so that a part can fill another's gap.
_EIGHTHS = range(1, 8)


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


def planned_workers(tier: Tier, named: str | None, workers: int | None = None) -> tuple[int, int]:
    """Return the runs or ensembles side by side that a plan is of, and devices, on any machine.

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
    return planned, max(1, devices)


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


def sharing(workers: int, devices: int) -> int:
    """Return how many of the workers share a device, at most."""
    return -(-workers // max(1, devices))


def fitting_memory(memory_bytes: int, shared_by: int = 1) -> int:
    """Return the memory that an ensemble may fill: what is planned, or a worker's of a device.

    Where there is no device, what is planned stands for one's memory.
    """
    devices = [device.memory_bytes for device in cuda_devices()] or [memory_bytes]
    return min(memory_bytes, min(devices) // shared_by)


def ensemble_tasks(
    pending: Sequence[RunConfig],
    runs: Path,
    *,
    devices: int,
    costs: Mapping[str, TogetherCost],
    grouping: Grouping | None = None,
    shared_by: int = 1,
) -> list[Task]:
    """Return the tasks of runs that go many at once, longest first; other runs get a task each.

    Parameters
    ----------
    pending
        Runs without a record.
    runs
        Folder of the records.
    devices
        How many will be filled.
    costs
        By checkpoint: what ensembles of its runs need.
    grouping
        What makes ensembles of runs and of the memory of one; None takes the suite's own.
    shared_by
        How many workers share each device.
    """
    together = [run for run in pending if is_ensemble(run)]
    alone = [run for run in pending if not is_ensemble(run)]
    if together and grouping is None:
        from repro.rl.stacked.grouping import group_runs

        grouping = group_runs
    groups: list[Group] = []
    for checkpoint in dict.fromkeys(run.scale.checkpoint for run in together):
        memory = fitting_memory(costs[checkpoint].memory_bytes, shared_by)
        alike = [run for run in together if run.scale.checkpoint == checkpoint]
        groups += [tuple(group) for group in (grouping(alike, memory) if grouping else ())]

    def seconds(group: Group) -> float:
        return ensemble_seconds(group, costs[group[0].scale.checkpoint])

    return [_task(group, runs) for group in cut(groups, devices * shared_by, seconds)] + [
        Task(run=run, folder=run_folder(run, runs), runs=runs) for run in alone
    ]


def cut(groups: Sequence[Group], devices: int, seconds: Callable[[Group], float]) -> list[Group]:
    """Return the groups, cut so that the last device ends early, longest first.

    One cut after another is tried, each the best after those before it; of these ways the one of
    fewest cuts is taken whose end is about the earliest. A cut keeps a seed's runs together as far
    as it goes: arms are compared within a seed.

    Parameters
    ----------
    seconds
        Predicted time of a group.
    """
    ways = [[(seconds(group), group) for group in groups]]
    for _ in range(2 * devices if devices > 1 else 0):
        last = ways[-1]
        following = [
            [*last[:place], *last[place + 1 :], *((seconds(part), part) for part in parts)]
            for place, (_, group) in enumerate(last)
            for parts in _cuts(group, devices)
        ]
        if following:
            ways.append(min(following, key=lambda way: _ends(way, devices)))
    latest = [_ends(way, devices)[0] for way in ways]
    chosen = next(n for n, end in enumerate(latest) if end <= _ABOUT * min(latest))
    return [group for _, group in sorted(ways[chosen], key=lambda item: -item[0])]


def _ends(timed: Sequence[tuple[float, Group]], devices: int) -> list[float]:
    """Return when each device ends, the last first."""
    return sorted(ends_of([time for time, _ in timed], devices), reverse=True)


def _cuts(group: Group, devices: int) -> list[list[Group]]:
    """Return the ways of cutting a group: in equal parts, and in two of any eighths."""
    by_seed = tuple(sorted(group, key=lambda run: run.seed))
    size = len(by_seed)
    places: set[tuple[int, ...]] = {(size * eighths // 8,) for eighths in _EIGHTHS}
    places |= {
        tuple(size * part // parts for part in range(1, parts)) for parts in range(2, devices + 1)
    }
    ways = []
    for inner in sorted(places):
        edges = (0, *inner, size)
        ways.append([by_seed[a:b] for a, b in itertools.pairwise(edges)])
    return [parts for parts in ways if all(parts)]


def _task(group: Group, runs: Path) -> Task:
    name = digest_of([run.digest() for run in group])[:12]
    folder = runs / Tier.PROXY.value / ".ensembles" / name
    return Task(run=group[0], folder=folder, runs=runs, also=group[1:])
