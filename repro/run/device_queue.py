"""Which planned runs go together on one device, and on which devices.

Many small runs are carried out at once as one batched model. A unit of work is an ensemble; the
queue hands them, longest first, to one worker process per device, which sees only its own device
(`CUDA_VISIBLE_DEVICES`). Length is counted, not estimated: training steps times rows per step.

A worker that dies gives its runs back to the queue once; each run's record is written as soon as it
is done, so nothing that finished is done again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from repro.evidence.record import run_folder
from repro.run.carry_out import carried_together, is_ensemble
from repro.run.worker import Task
from repro.spec.arm import require
from repro.spec.config import RunConfig, TrainScale, digest_of
from repro.spec.step_scale import StepScale
from repro.spec.tier import REAL_CHECKPOINTS, Tier, cuda_devices

RETRIES = 1
# Without a device, runs are few and small.
_HOST_BYTES = 64 * 2**30
# Whose runs, or ensembles, take a device each.
SPREAD_TIERS = REAL_CHECKPOINTS
RunGroup = tuple[RunConfig, ...]
Grouping = Callable[[Sequence[RunConfig], int], Sequence[RunGroup]]


def visible_devices(named: str | None) -> tuple[str, ...]:
    """Return the devices to fill, as `CUDA_VISIBLE_DEVICES` names them.

    `named` says how many (`2`) or which (`0,3`); None takes all that this process may use. Raises
    `ValueError` if more are asked for than there are.
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
    """Return the runs or ensembles of a plan, the same on any machine.

    Devices are `named` by number or name and need not be here; None takes those that are. One goes
    on each unless so many `workers` are asked for. Raises `ValueError` if none is named, or several
    for a tier whose runs share one; as `require_workers`.
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


def devices_to_fill(tier: Tier, named: str | None) -> tuple[str, ...]:
    """Return the devices that a tier's runs fill; `ValueError` if named ones cannot be filled."""
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
    """Raise `ValueError` if several runs would share a device that a single run fills."""
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


def fitting_memory() -> int:
    """Return the bytes that an ensemble may fill: the smallest device's, or the host's."""
    return min((device.memory_bytes for device in cuda_devices()), default=_HOST_BYTES)


def tasks_of(
    pending: Sequence[RunConfig], runs: Path, *, workers: int, grouping: Grouping | None = None
) -> list[Task]:
    """Return the tasks of runs without a record, longest first: ensembles, then the other runs.

    `grouping` makes ensembles of runs and of the memory of one; None takes the suite's own.
    """
    together = [run for run in pending if is_ensemble(run)]
    if together and grouping is None:
        from repro.rl.stacked.grouping import group_runs

        grouping = partial(group_runs, devices=workers)
    groups = grouping(together, fitting_memory()) if together and grouping else ()
    groups = sorted(groups, key=lambda group: sum(map(rows_of, group)), reverse=True)
    alone = sorted((run for run in pending if not is_ensemble(run)), key=_place)
    return [_task(tuple(group), runs) for group in groups] + [
        Task(run=group[0], folder=run_folder(group[0], runs), runs=runs, also=group[1:])
        for group in carried_together(alone)
    ]


def _place(run: RunConfig) -> tuple[bool, int]:
    """Return what runs are ordered by: others' baselines first, then the longest."""
    scale, arm = run.scale, run.arm
    is_baseline = isinstance(scale, StepScale) and arm.weight_format == scale.baseline
    return not (is_baseline and arm.training == "lora"), -rows_of(run)


def rows_of(run: RunConfig) -> int:
    """Return the rows that a run trains on, over all its steps; 0 where it trains on none."""
    if run.procedure == "evaluate" or not isinstance(run.scale, TrainScale):
        return 0
    rows: int = run.scale.steps * run.scale.prompts_per_rollout * run.scale.group_size
    return rows


def _task(group: RunGroup, runs: Path) -> Task:
    name = digest_of([run.digest() for run in group])[:12]
    folder = runs / group[0].tier / ".ensembles" / name
    return Task(run=group[0], folder=folder, runs=runs, also=group[1:])
