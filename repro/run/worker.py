"""The body of a worker process, and the values that it exchanges with its parent.

A worker takes tasks from its pipe, carries out their runs by their procedures, and reports how each
ended. After a measurement (`alone`), or when its device's context is broken, a worker ends with its
task, so that nothing is left behind for the next one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast, get_args

from repro.evidence.environment import SEGMENTED
from repro.evidence.procedure import NOTE, WARNING, PeerLostError, Progress, RunContext, Stopped
from repro.evidence.provenance import source_at_start
from repro.evidence.record import run_folder
from repro.run import carry_out as recording
from repro.run.disk import is_disk_fault, sentence_of
from repro.spec.config import RunConfig, TrainScale
from repro.spec.tier import REAL_CHECKPOINTS, Tier

# Events of a task that goes on, and those that end it.
_UnderWay = Literal["started", "progress", "warning", "note"]
_Ended = Literal["finished", "stopped", "failed", "returned", "lost", "disk", "elsewhere"]
EventKind = _UnderWay | _Ended
UNDER_WAY: tuple[EventKind, ...] = get_args(_UnderWay)
CarryOut = Callable[[Sequence[RunConfig], Path, RunContext], Any]
# How long a rank that lost another waits for the launcher to find and name that one.
_NAMING_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run, its own folder for checkpoints, and the folder of all records.

    `also` holds further runs that are carried out with it (`repro.run.carry_out.carried_together`):
    they stop as one. `attempt` counts the workers that died of it. `variables` are added to its
    worker's environment.
    """

    run: RunConfig
    folder: Path
    runs: Path
    also: tuple[RunConfig, ...] = ()
    attempt: int = 0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def every(self) -> tuple[RunConfig, ...]:
        """All runs of the task."""
        return (self.run, *self.also)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a worker says of its task.

    `returned` is a task that goes back into the queue, for its worker died. `lost` is one whose
    other processes are gone. `values` are progress numbers (`step`, `steps`, `reward`, ...).
    `text` is the phase, or the reason of a failure.
    `disk` is a task whose place cannot be written; `elsewhere` one that was recorded meanwhile.
    `last` says that the worker ends with this event: it takes one task alone, or can compute no
    more on its device.
    """

    task: Task
    kind: EventKind
    text: str = ""
    values: dict[str, float] = field(default_factory=dict)
    last: bool = False


def tasks_of(pending: Sequence[RunConfig], runs: Path) -> list[Task]:
    """Return the tasks of runs without a record, the longest first."""

    def rows(run: RunConfig) -> int:
        scale, trains = run.scale, run.procedure != "evaluate" and isinstance(run.scale, TrainScale)
        return scale.steps * scale.prompts_per_rollout * scale.group_size if trains else 0

    return [
        Task(run=group[0], folder=run_folder(group[0], runs), runs=runs, also=group[1:])
        for group in recording.carried_together(sorted(pending, key=rows, reverse=True))
    ]


class EndedError(Exception):
    """A task ended in a way that is known already: an event's kind, and its text."""

    def __init__(self, kind: EventKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def is_segmented(run: RunConfig) -> bool:
    """Whether a run's allocator gives segments that grow, in place of blocks of fixed sizes.

    A step's memory is measured without what a fragmented reserve adds to it, and a published model
    is trained with the same allocator. It reads its settings when torch is imported, which a task's
    procedure does first.
    """
    return run.procedure == "step_time" or Tier(run.tier) in REAL_CHECKPOINTS


# What asks a start to stop.
STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def on_stopping(handle: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Handle the signals that ask a start to stop, for the time of a block."""
    previous = {number: signal.signal(number, handle) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def work(
    pipe: Connection,
    log: Path,
    threads: int,
    device: str | None,
    alone: bool,
    carry_out: CarryOut | None,
) -> None:
    """Run tasks from `pipe` until None comes; the first one only where tasks run `alone`."""
    # A signal to the parent's group would end what a user's reward has started; one may reach each
    # process (a cluster's cancel). The parent says when to stop, so that each worker writes its
    # checkpoint first; they end with it anyhow.
    os.setpgid(0, 0)
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    source_at_start()  # before a procedure is imported: its modules are those of this state
    if device is not None:
        # Before torch is imported, which is when the driver is asked. The order is that of the
        # driver's own tool, whose numbers a record has.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    inbox = _Inbox(pipe)
    while (task := inbox.tasks.get()) is not None:
        os.environ |= task.variables
        if is_segmented(task.run):
            os.environ.setdefault(*SEGMENTED)
        if _carry_out(task, pipe, threads, inbox.stop, carry_out, alone):
            return


class _Inbox:
    """Reads the pipe on a thread, so that "stop" is heard while a run is under way.

    If the parent's end closes (it died, even by SIGKILL), this group ends at once: no orphans.
    """

    def __init__(self, pipe: Connection) -> None:
        self.stop = threading.Event()
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._pipe = pipe
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)
            if message == "stop":
                self.stop.set()
                continue
            self.tasks.put(message)
            if message is None:
                return


def _carry_out(
    task: Task,
    pipe: Connection,
    threads: int,
    stop: threading.Event,
    carry_out: CarryOut | None,
    alone: bool,
) -> bool:
    """Carry out a task and say how it ended; return whether the worker must end, too."""
    last = 0.0

    def progress(text: str, values: dict[str, float]) -> None:
        nonlocal last
        for kind in (WARNING, NOTE):
            if kind in values:
                pipe.send(Event(task=task, kind=cast(EventKind, kind), text=text, values=values))
                return
        now = time.monotonic()
        if now - last >= 0.2 or values.get("step") == values.get("steps"):
            last = now
            pipe.send(Event(task=task, kind="progress", text=text, values=values))

    pipe.send(Event(task=task, kind="started"))
    kind, text = outcome_of(task, threads, progress, stop.is_set, carry_out)
    ends = alone or kind == "lost" or (kind == "failed" and _device_lost())
    pipe.send(Event(task=task, kind=kind, text=text, last=ends))
    return ends


def _device_lost() -> bool:
    """Return whether the CUDA device of this process answers with an error, if it uses one.

    After a fatal error it does so for as long as the process lives.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def outcome_of(
    task: Task,
    threads: int,
    progress: Progress,
    should_stop: Callable[[], bool],
    carry_out: CarryOut | None = None,
) -> tuple[EventKind, str]:
    """Carry out a task; return the kind and text of the event that ends it."""
    context = RunContext(
        folder=task.folder, progress=progress, should_stop=should_stop, threads=threads
    )
    try:
        (carry_out or recording.carry_out)(task.every, task.runs, context)
    except Stopped:
        return "stopped", ""
    except EndedError as ended:
        return ended.kind, str(ended)
    except PeerLostError as lost:
        # Only the first rank knows which one is missing (`repro.distributed`): it speaks first.
        time.sleep(_NAMING_SECONDS * (1 if os.environ.get("RANK") == "0" else 2))
        return "lost", str(lost)
    except OSError as error:
        if is_disk_fault(error, task.runs):
            with contextlib.suppress(OSError):  # the log may be on the same disk
                traceback.print_exc()
            return "disk", sentence_of(error, task.runs)
        return "failed", _reason(error)
    except Exception as error:  # noqa: BLE001 - the failure of one run is data, recorded in whole
        return "failed", _reason(error)
    return "finished", ""


def _reason(error: Exception) -> str:
    """Return the reason for a failed run's record: the error, and where it was raised."""
    return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
