"""One run on several devices: `--ranks N` starts N processes for it, torchrun brings its own.

Each rank carries out the run by its procedure, whose work `repro.distributed` divides; only
the first rank writes. `Ranked` runs in a worker that has N devices and starts the ranks; if one
dies, fails or does not start, it is named and the others are ended. `InPlace` replaces the worker
pool in the first of torchrun's processes; the others `follow` it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from repro.evidence.environment import capture_environment
from repro.evidence.procedure import NOTE, WARNING, PeerLostError, Progress, Stopped
from repro.evidence.record import record_path
from repro.run import carry_out as recording
from repro.run.worker import (
    STOPPING,
    UNDER_WAY,
    CarryOut,
    EndedError,
    Event,
    Task,
    outcome_of,
    work,
)
from repro.run.workers import WorkerPool, ending_of, send, start_process
from repro.spec.checks import require
from repro.spec.config import RunConfig
from repro.spec.tier import cuda_devices

if TYPE_CHECKING:
    from repro.distributed import Ranks

# How long a rank that lost another waits for the launcher to find and name that one.
_NAMING_SECONDS = 3.0
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

    def __call__(
        self,
        runs: Sequence[RunConfig],
        folder: Path,
        records: Path,
        progress: Progress,
        should_stop: Callable[[], bool],
        threads: int,
    ) -> list[Path]:
        """Carry out a run and write its record; see `repro.run.carry_out`.

        Raises `EndedError` when a rank failed, died, or did not come: its number, and how it ended.
        """
        world = max(self.ranks, *map(ranks_of, runs))
        if world == 1:
            body = self.body or recording.carry_out
            paths: list[Path] = body(runs, folder, records, progress, should_stop, threads)
            return paths
        (run,) = runs
        task = Task(run=run, folder=folder, runs=records)
        started: list[tuple[BaseProcess, Connection]] = []
        with tempfile.TemporaryDirectory() as place:
            try:
                for rank in range(world):
                    started.append(self._start(rank, world, Path(place) / "meet", records, threads))
                    send(started[rank][1], task)
                self._follow(started, progress, should_stop)
            finally:
                for process, pipe in started:
                    process.kill()
                    process.join()
                    pipe.close()
        return []

    def _start(
        self, rank: int, world: int, meeting: Path, records: Path, threads: int
    ) -> tuple[BaseProcess, Connection]:
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "REPRO_RANKS_MEET": f"file://{meeting}",
            _STALL: str(self.stall),
        }
        log, device = records / "workers.log", device_of_rank(rank)
        if device is None and len(cuda_devices()) >= world:
            device = str(rank)
        return start_process(
            lambda pipe: (variables, pipe, log, threads, device, self.body),
            _work_as_rank,
            f"repro-rank-{rank}",
        )

    def _follow(
        self,
        started: Sequence[tuple[BaseProcess, Connection]],
        progress: Progress,
        should_stop: Callable[[], bool],
    ) -> None:
        """Pass on the first rank's progress until all have ended; raise if one ends differently."""
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(started)}
        asked, stopped, lost, reached = False, False, None, "before its first step"
        until = float("inf")
        while pipes:
            if not asked and should_stop():
                asked = True
                for pipe in pipes:
                    send(pipe, "stop")
            for item in wait(list(pipes), timeout=0.2):
                ready = cast(Connection, item)
                rank = pipes[ready]
                try:
                    event: Event = ready.recv()
                except (EOFError, ConnectionResetError):
                    raise EndedError("lost", _ended(rank, started[rank][0], reached)) from None
                if event.kind == "progress" and rank == 0:
                    step = event.values.get("step")
                    reached = event.text if step is None else f"{event.text}, step {step:.0f} done"
                    progress(event.text, event.values)
                elif event.kind in (WARNING, NOTE) and rank == 0:
                    progress(event.text, {event.kind: 1.0})
                elif event.kind in ("finished", "stopped", "lost"):
                    del pipes[ready]
                    stopped = stopped or event.kind == "stopped"
                    if event.kind == "lost" and (lost is None or rank == 0):
                        # The others know only that the first, which names the missing, gave up.
                        lost, until = event.text, min(until, time.monotonic() + _NAMING_SECONDS)
                elif event.kind not in UNDER_WAY:
                    raise EndedError(event.kind, f"rank {rank} ({reached}): {event.text}")
            if lost is not None and (not pipes or time.monotonic() > until):
                raise EndedError("lost", f"{lost} ({reached})")
        if stopped:
            raise Stopped


def _ended(rank: int, process: BaseProcess, reached: str) -> str:
    """Return a sentence on a rank that ended without an event."""
    process.join()
    how = ending_of(process.exitcode)
    return f"rank {rank} on {socket.gethostname()} ended by {how} ({reached})"


def _work_as_rank(
    variables: Mapping[str, str],
    pipe: Connection,
    log: Path,
    threads: int,
    device: str | None,
    body: CarryOut | None,
) -> None:
    """Carry out one task in a worker process as one rank of its run."""
    os.environ.update(variables)
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # all ranks are on this host
    work(pipe, log, threads, device, True, body)


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
        waiting = deque(sorted(tasks, key=_failures))
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
            kind, text = outcome_of(
                task, self._threads, _quietly, lambda: self._asked_to_stop, None
            )
            if kind == "lost":
                time.sleep(_NAMING_SECONDS)
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
            self._asked_to_stop = _STOP in self._ranks.texts(text) or self._asked_to_stop
        except PeerLostError as lost:
            raise SystemExit(str(lost)) from lost


def _failures(task: Task) -> int:
    path = record_path(task.run, task.runs)
    return len([*path.parent.glob(f"{path.stem}.failed-*.json")])


def follow(ranks: Ranks, tasks: Sequence[Task], threads: int) -> bool:
    """Carry out the first rank's runs together with it; return whether runs are left."""
    asked: list[int] = []
    previous = {n: signal.signal(n, lambda number, frame: asked.append(number)) for n in STOPPING}
    by_digest = {task.run.digest(): task for task in tasks}
    try:
        while (told := ranks.texts(_STOP if asked else "")[0]) in by_digest or told == _WAIT:
            if told == _WAIT:
                continue
            kind, text = outcome_of(by_digest[told], threads, _quietly, lambda: bool(asked), None)
            if kind == "lost":
                time.sleep(_NAMING_SECONDS)
            if kind not in ("finished", "stopped"):
                raise SystemExit(f"rank {ranks.rank}: {text}")
    except PeerLostError as lost:  # between two runs
        raise SystemExit(str(lost)) from lost
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
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
    require_alike([json.loads(text) for text in ranks.texts(json.dumps(own))])
    return ranks


def leave_torchrun() -> None:
    """Leave the group; ended with the process instead, its threads now and then abort that."""
    from torch import distributed

    distributed.destroy_process_group()


def refused_by_any(ranks: Ranks, own: str) -> str:
    """Return the first rank's sentence on why nothing starts, else the others'; empty for none."""
    texts = ranks.texts(own)
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
        seen = (runs / ranks.texts(name)[0]).exists()
        if not (own or seen):
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
