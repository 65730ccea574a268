"""In which order planned runs are carried out, and on which devices.

The queue hands runs, longest first, to one worker process per device, which sees only its own
device (`CUDA_VISIBLE_DEVICES`). Length is counted, not estimated: training steps times rows per
step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from repro.evidence.record import run_folder
from repro.run.carry_out import carried_together
from repro.run.worker import Task
from repro.spec.checks import require
from repro.spec.config import RunConfig, TrainScale
from repro.spec.step_scale import StepScale
from repro.spec.tier import REAL_CHECKPOINTS, Tier, cuda_devices

RETRIES = 1
# Whose runs take a device each.
SPREAD_TIERS = REAL_CHECKPOINTS


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
    """Return how many runs of a plan go at once, the same on any machine.

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


def tasks_of(pending: Sequence[RunConfig], runs: Path) -> list[Task]:
    """Return the tasks of runs without a record, longest first."""
    return [
        Task(run=group[0], folder=run_folder(group[0], runs), runs=runs, also=group[1:])
        for group in carried_together(sorted(pending, key=_place))
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
