"""Where the runs of a plan go: how many at once, on which devices, with how many threads each.

Each launcher has its room: worker processes of this machine (which start the ranks of a run, where
it has several), torchrun's ranks, or the hosts of a Ray cluster.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from repro.run.carry_out import launched_ranks
from repro.run.disk import require_writable
from repro.run.several_ranks.rank_processes import InPlace, ranks_of
from repro.run.several_ranks.ray_pool import RayPool, join_cluster
from repro.run.workers import WorkerPool
from repro.spec.checks import require
from repro.spec.config import RunConfig
from repro.spec.tier import REAL_CHECKPOINTS, Tier, cuda_devices

if TYPE_CHECKING:
    from repro.distributed import Ranks

# Procedures that several ranks can carry out.
_DIVIDED = ("train", "evaluate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The room that a launcher has for runs.

    Attributes
    ----------
    workers
        How many runs go at once, on all hosts.
    threads
        Of a process, the same on all hosts: the order of sums depends on them.
    devices
        Those of each worker, as `CUDA_VISIBLE_DEVICES` names them; empty hides none.
    ranks, stall
        Processes of each run, and seconds that they wait for one another; a scale may ask for more
        processes.
    pool
        The launcher's: it makes what carries out the runs, from what `WorkerPool` is made of.
    idle
        A line of the plan on devices that no run takes; empty without any.
    """

    workers: int = 1
    threads: int = 1
    devices: tuple[str, ...] = ()
    ranks: int = 1
    stall: float = 600.0
    pool: Callable[..., WorkerPool] = WorkerPool
    idle: str = ""


def room_of(
    args: argparse.Namespace,
    tier: Tier,
    plan: Sequence[RunConfig],
    joined: Ranks | None,
    folder: Path,
) -> Room:
    """Return the room for the runs of a plan; `ValueError` where they have none.

    `joined` are torchrun's ranks, if any. `folder` is that of the records, which hosts share.
    """
    ranks = args.ranks if joined is None else joined.world
    processes = max([ranks, *map(ranks_of, plan)])
    cpus = len(os.sched_getaffinity(0))
    pool: Callable[..., WorkerPool] = WorkerPool
    devices, idle = tuple[str, ...](), ""
    if args.executor == "ray":
        for name, value in (("--workers", args.workers), ("--devices", args.devices)):
            require(value is None, f"{name} {value}: a Ray cluster has its own room; leave it out")
        require(tier is not Tier.SYSTEMS, "--executor ray: measurements take this machine's device")
        # `join_cluster` counts a host's devices.
        require_ranks(ranks, tier, ("",) * ranks, plan)
        require_writable(folder)
        needs = {"num_gpus" if tier in REAL_CHECKPOINTS else "num_cpus": ranks}
        hosts, pool = join_cluster(folder, needs), partial(RayPool, needs)
    else:
        devices = devices_to_fill(tier, args.devices)
        require_ranks(ranks, tier, devices, plan)
        at_once = 1
        if joined is not None:
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
            pool = partial(InPlace, joined)
        else:
            count, left = len(devices), len(devices) % ranks
            starts = range(0, count - left, ranks)
            devices = tuple(",".join(devices[at : at + ranks]) for at in starts)
            at_once = len(devices) or (max(1, cpus // ranks) if tier is Tier.SMOKE else 1)
            if left:
                idle = f"  idle      {left} of {count} devices: a run takes {ranks} (--ranks)"
        hosts = [(args.workers or at_once, cpus)]
        require_workers(tier, hosts[0][0], len(devices))
    # Of all hosts the one with the fewest CPUs for a process decides.
    shares = [has // max(2, runs * processes) for runs, has in hosts if runs]
    return Room(
        workers=sum(runs for runs, _ in hosts),
        threads=args.threads or (1 if tier is Tier.SMOKE else max(1, min(shares))),
        devices=devices,
        ranks=ranks,
        stall=args.stall_timeout,
        pool=pool,
        idle=idle,
    )


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
    chosen = tuple(part.strip() for part in named.split(",") if part.strip())
    if "," in named and chosen:
        unknown = sorted(set(chosen) - set(every))
        require(not unknown, f"--devices {named}: there is no {', '.join(unknown)}; found {every}")
        return chosen
    count = int(named) if named.isascii() and named.isdigit() and len(named) < 9 else 0
    require(count > 0, f"--devices {named}: needs a number such as 2, or 0,1")
    require(count <= len(every), f"--devices {named}: this machine shows {len(every)} devices")
    return every[:count]


def devices_to_fill(tier: Tier, named: str | None) -> tuple[str, ...]:
    """Return the devices that a tier's runs fill; `ValueError` if named ones cannot be filled."""
    if tier in REAL_CHECKPOINTS:
        return visible_devices(named)
    require(
        named in (None, "1"),
        f"--devices {named}: runs of the {tier.value} tier do not spread over devices; needs 1",
    )
    return ()


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


def require_ranks(
    ranks: int, tier: Tier, devices: Sequence[str], runs: Sequence[RunConfig]
) -> None:
    """Raise `ValueError` where runs cannot be carried out by so many ranks each."""
    require(ranks >= 1, f"--ranks {ranks}: needs 1 or more")
    if ranks == 1:
        return
    require(
        tier in REAL_CHECKPOINTS or tier is Tier.SMOKE,
        f"--ranks {ranks}: a measurement of the {tier.value} tier says itself how many it takes; "
        "needs 1",
    )
    for run in runs:
        require(
            run.procedure in _DIVIDED,
            f"--ranks {ranks}: {run.target} {run.arm.name} is a {run.procedure}; needs one of "
            f"{', '.join(_DIVIDED)}",
        )
        prompts = run.scale.prompts_per_rollout
        require(
            prompts >= ranks or run.procedure == "evaluate",
            f"--ranks {ranks}: {run.arm.name} has {prompts} prompts per rollout; needs {ranks}",
        )
    require(
        tier is Tier.SMOKE or len(devices) >= ranks or launched_ranks() > 1,
        f"--ranks {ranks}: there are {len(devices)} devices to fill; needs {ranks}",
    )
