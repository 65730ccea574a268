"""One run on several devices: `--ranks N` starts N processes for it, torchrun brings its own.

Each rank carries out the run by its procedure, whose work `repro.distributed` divides; only
the first rank writes. `Ranked` runs in a worker that has N devices; ranks are the workers of a pool
of its own. If one dies, fails or does not start, it is named and the others are ended. `InPlace`
replaces the worker pool in the first of torchrun's processes; the others `follow` it. Torch's
elastic agent, tried for `Ranked`, ended later after a killed rank and took SIGTERM, our stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.evidence.environment import capture_environment
from repro.evidence.procedure import NOTE, WARNING, PeerLostError, Progress, RunContext, Stopped
from repro.run import carry_out as recording
from repro.run.shared_work import failures_of
from repro.run.worker import UNDER_WAY, CarryOut, EndedError, Event, Task, on_stopping, outcome_of
from repro.run.workers import WorkerPool
from repro.spec.checks import require
from repro.spec.config import RunConfig
from repro.spec.tier import cuda_devices

if TYPE_CHECKING:
    from repro.distributed import Ranks

# Seconds for ranks that are asked to stop: how many they have is for the pool of all runs to say.
_LET_END = 1e6
# As `repro.distributed` reads it, which imports torch.
_STALL = "REPRO_STALL_TIMEOUT"
# Sent by the first rank to the others instead of a run: it ends with runs left, or other starts are
# at all that is left. A signal that reached one of the others alone is their answer.
LEFT, _WAIT, _STOP = "left", "wait", "stop"


def ranks_of(run: RunConfig) -> int:
    """Return how many ranks a run's scale asks for, whatever the command line says."""
    ranks: int = getattr(run.scale, "ranks", 1)
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """Carries out a run by several processes of this host, one per visible device.

    There are `ranks`, or more if the scale asks for more. They wait `stall` seconds for one another
    and call `body` on the run, by default `repro.run.carry_out.carry_out`.
    """

    ranks: int
    stall: float
    body: CarryOut | None = None

    def __call__(self, runs: Sequence[RunConfig], records: Path, context: RunContext) -> list[Path]:
        """Carry out a run and write its record; see `repro.run.carry_out`.

        Raises `EndedError` when a rank failed, died, or did not come: its number, and how it ended.
        """
        world = max(self.ranks, *map(ranks_of, runs))
        if world == 1:
            paths: list[Path] = (self.body or recording.carry_out)(runs, records, context)
            return paths
        (run,) = runs
        devices = [device_of_rank(rank) for rank in range(world)]
        if devices[0] is None and len(cuda_devices()) >= world:
            devices = [str(rank) for rank in range(world)]
        how = world, records / "workers.log", context.threads, _LET_END
        with tempfile.TemporaryDirectory() as place:
            tasks = [
                Task(run=run, folder=context.folder, runs=records, variables=variables)
                for variables in self._variables(world, place)
            ]
            with _RankPool(
                *how,
                devices=devices,
                carry_out=self.body,
                alone=True,
                should_stop=context.should_stop,
            ) as pool:
                finished = _followed(pool.execute(tasks), context.progress)
        if finished < world:
            raise Stopped
        return []

    def _variables(self, world: int, place: str) -> Iterator[dict[str, str]]:
        """Yield the environment of each rank, which meets the others in the folder `place`."""
        for rank in range(world):
            yield {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "REPRO_RANKS_MEET": f"file://{place}/meet",
                _STALL: str(self.stall),
                # All ranks are on this host.
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
                "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
            }


def _followed(events: Iterable[Event], progress: Progress) -> int:
    """Pass on the first rank's progress; return how many ranks finished, if none was lost."""
    finished, reached = 0, "before its first step"
    for event in events:
        rank = event.task.variables["RANK"]
        if event.kind == "finished":
            finished += 1
        elif event.kind not in (*UNDER_WAY, "stopped"):
            place = f"rank {rank} on {socket.gethostname()} ({reached})"
            raise EndedError(event.kind, f"{place}: {event.text}")
        elif rank == "0" and event.kind in ("progress", WARNING, NOTE):
            progress(event.text, event.values)
            if event.kind == "progress":
                step = event.values.get("step")
                reached = event.text if step is None else f"{event.text}, step {step:.0f} done"
    return finished


class _RankPool(WorkerPool):
    """Workers that are the ranks of one run: with any of them the run is lost."""

    def _given_back(self, failed: Event, waiting: deque[Task]) -> Event:
        return dataclasses.replace(failed, kind="lost")


class InPlace(WorkerPool):
    """Carries out tasks in this process, the first of torchrun's, one at a time.

    A run that fails ends the job, because the ranks are then at different places; the same command
    goes on, with other runs first. Where all that is left is with other starts, all ranks wait, to
    take over from one that dies.
    """

    def __init__(self, ranks: Ranks, *how: Any, **more: Any) -> None:
        super().__init__(*how, **more)
        self._ranks = ranks

    def execute(self, tasks: Sequence[Task]) -> Iterator[Event]:
        """Yield the events of each task, in turn; a signal lets all ranks stop after a step."""
        waiting = deque(sorted(tasks, key=lambda task: failures_of(task.run, task.runs)))
        while waiting and not self._asked_to_stop:
            task, elsewhere = self._next_free(waiting)
            yield from elsewhere
            if task is None and waiting:
                self._tell(_WAIT)
                time.sleep(self.look_seconds)
            if task is None:
                continue
            self._tell(task.run.digest())
            yield Event(task=task, kind="started")
            kind, text = outcome_of(task, self.threads, _quietly, lambda: self._asked_to_stop)
            if kind == "lost":
                yield Event(task=task, kind="stopped", text=text)
                raise SystemExit(text)
            # Where a signal reached another rank alone, all have stopped for it.
            self._asked_to_stop = self._asked_to_stop or kind == "stopped"
            yield Event(task=task, kind=kind, text=text)
            if kind not in ("finished", "stopped"):
                raise SystemExit(f"rank 0: {text}")

    def _tell(self, text: str) -> None:
        """Say to the other ranks what comes next, before they miss this one; hear if all stop."""
        try:
            self._asked_to_stop = _STOP in self._ranks.objects(text) or self._asked_to_stop
        except PeerLostError as lost:
            raise SystemExit(str(lost)) from lost


def follow(ranks: Ranks, tasks: Sequence[Task], threads: int) -> bool:
    """Carry out the first rank's runs together with it; return whether runs are left."""
    asked: list[int] = []
    by_digest = {task.run.digest(): task for task in tasks}
    with on_stopping(lambda number, frame: asked.append(number)):
        try:
            while (told := ranks.objects(_STOP if asked else "")[0]) in by_digest or told == _WAIT:
                if told == _WAIT:
                    continue
                kind, text = outcome_of(by_digest[told], threads, _quietly, lambda: bool(asked))
                if kind not in ("finished", "stopped"):
                    raise SystemExit(f"rank {ranks.rank}: {text}")
        except PeerLostError as lost:  # between two runs
            raise SystemExit(str(lost)) from lost
    return told == LEFT


def _quietly(text: str, values: dict[str, float]) -> None:
    """Pass on warnings only; the progress of a run is in its metrics.jsonl."""
    if WARNING in values:
        sys.stderr.write(f"{text}\n")


def device_of_rank(local: int) -> str | None:
    """Return the visible device of a host's rank of this number; None hides none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return dict(enumerate(visible.split(","))).get(local, "")


def join_torchrun(stall: float) -> Ranks:
    """Join torchrun's group, whose hosts must have the same source and packages."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = device_of_rank(local)
    os.environ[_STALL] = str(stall)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = str(local) if device is None else device
    from repro.distributed import Ranks

    try:
        ranks = Ranks.joined()
    except PeerLostError as lost:
        raise SystemExit(str(lost)) from lost
    own = identity_of(f"rank {ranks.rank} ({socket.gethostname()})")
    own |= {"command line": " ".join(sys.argv[1:])}
    require_alike(ranks.objects(own))
    return ranks


def leave_torchrun() -> None:
    """Leave the group; ended with the process instead, its threads now and then abort that."""
    from torch import distributed

    distributed.destroy_process_group()


def refused_by_any(ranks: Ranks, own: str) -> str:
    """Return the first rank's sentence on why nothing starts, else the others'; empty for none."""
    texts = ranks.objects(own)
    others = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    return texts[0] or "; ".join(others)


def refused_folder(ranks: Ranks, runs: Path) -> str:
    """Return the same as `refused_by_any` where hosts do not share the folder of records."""
    with contextlib.ExitStack() as until_all_have_looked:
        own, name = "", "nothing"
        if ranks.first:
            try:
                runs.mkdir(parents=True, exist_ok=True)
                folder = tempfile.TemporaryDirectory(prefix=".ranks-", dir=runs)
                name = Path(until_all_have_looked.enter_context(folder)).name
            except OSError as error:
                own = f"--runs {runs}: {error}"
        if not (own or (runs / ranks.objects(name)[0]).exists()):
            own = f"--runs {runs}: {socket.gethostname()} does not see the first rank's; needs to"
        return refused_by_any(ranks, own)


def require_alike(identities: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ValueError` where identities differ in more than the place."""
    first = identities[0]
    for other in identities:
        for name in first.keys() - {"place"}:
            require(
                other.get(name) == first[name],
                f"{name} is {other.get(name)} on {other['place']} and {first[name]} on "
                f"{first['place']}; all need the same",
            )


def identity_of(place: str) -> dict[str, Any]:
    """Return what must be the same on all ranks and hosts, and the name of this place."""
    environment = capture_environment()
    return {
        "place": place,
        "source": environment["source_sha256"],
        "Python": environment["python"],
        **environment["packages"],
    }
