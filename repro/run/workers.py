"""Worker processes that carry out runs in parallel; if one dies, the others continue.

Each worker is a fresh process (`spawn`) with its own torch, a fixed number of threads and a pipe to
the parent. It takes one run after another, sends its progress back, and writes nothing but the
run's own folder. A worker that dies (out of memory, a crash in native code), or whose device's
context is spoilt, costs its run only: the parent reports how it ended and starts another. Each
measurement has one worker. An interrupt is handled by the parent: workers ignore Ctrl-C, are asked
to stop at the next step, and get `grace` seconds to write a checkpoint.

The pipe carries `Task`s down and `Event`s up; both are plain picklable values between processes of
this program, never files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from repro.run.worker import STOPPING, UNDER_WAY, CarryOut, Event, EventKind, Task, work


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    device: str | None
    task: Task | None = None


@dataclass(eq=False)
class WorkerPool:
    """Carries out tasks on `count` processes of `threads` threads each.

    Parameters
    ----------
    count : int
        Worker processes; a run never depends on how many there are.
    log : Path
        File that takes what libraries print in the workers, so that the display stays readable.
    threads : int
        Torch and OpenMP threads of each worker; part of the environment of a record, because the
        order of floating-point sums depends on it.
    grace : float
        Seconds that a worker gets to write its checkpoint after `stop`.
    devices : sequence of str
        As `CUDA_VISIBLE_DEVICES` names them: worker i sees the i-th alone. Empty hides none.
    retries : int
        How often a task goes back into the queue after its worker, or a rank of it, died.
    carry_out : callable
        What a worker does with a task's runs; None takes `repro.run.carry_out.carry_out`.
    alone : bool
        Whether a worker ends after its task, so that the next one finds nothing left of it.
    claim : callable
        What of a task may be begun now (`repro.run.shared_work`); all of it by default.
    should_stop : callable
        Asked twice a second whether to stop, as by `stop`.
    """

    # Until what other starts are at is asked for again.
    look_seconds = 0.5

    count: int
    log: Path
    threads: int = 1
    grace: float = 60.0
    _: KW_ONLY
    devices: Sequence[str | None] = ()
    retries: int = 0
    carry_out: CarryOut | None = None
    alone: bool = False
    claim: Callable[[Task], tuple[Task | None, Task | None]] = lambda task: (task, None)
    should_stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._workers: list[_Worker] = []
        self._asked_to_stop = False
        self._stopping = False

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def execute(self, tasks: Sequence[Task]) -> Iterator[Event]:
        """Yield every worker's events until all tasks have finished, failed or stopped."""
        waiting, devices = deque(tasks), self.devices or [None]
        self._workers = [
            self._start(devices[place % len(devices)])
            for place in range(min(self.count, len(waiting)))
        ]
        while self._workers:
            self._asked_to_stop = self._asked_to_stop or self.should_stop()
            if self._asked_to_stop and not self._stopping:
                self._stop()
            for worker in list(self._workers):
                if worker.task is None:
                    yield from self._feed(worker, waiting)
            pipes = {worker.pipe: worker for worker in self._workers}
            for pipe in wait(list(pipes), timeout=self.look_seconds):
                yield from self._receive(pipes[pipe], waiting)  # type: ignore[index]

    def stop(self) -> None:
        """Let every worker stop at its next step; then `execute` ends.

        Safe to call from a signal handler: the pipes are used by `execute` alone.
        """
        self._asked_to_stop = True

    def _stop(self) -> None:
        self._stopping = True
        for worker in self._workers:
            if worker.task is not None:
                _send(worker.pipe, "stop")
        threading.Thread(target=self._kill_after_grace, daemon=True).start()

    def close(self) -> None:
        """End every worker at once; runs under way can be resumed from their checkpoints."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    def _kill_after_grace(self) -> None:
        time.sleep(self.grace)
        for worker in self._workers:
            worker.process.kill()

    def _start(self, device: str | None) -> _Worker:
        context = multiprocessing.get_context("spawn")
        pipe, its = context.Pipe()
        own = its, self.log, self.threads, device, self.alone, self.carry_out
        process = context.Process(target=work, args=own, name="repro-worker", daemon=False)
        # Blocked signals stay so in the new process, until it ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            with _script_left_out():
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        its.close()
        return _Worker(process=process, pipe=pipe, device=device)

    def _feed(self, worker: _Worker, waiting: deque[Task]) -> Iterator[Event]:
        """Give a worker the first task that no other start is at; let it end where none is left.

        Where all that is left is with other starts the worker waits, to take it over if they die.
        """
        if not self._stopping:
            worker.task, elsewhere = self._next_free(waiting)
            yield from elsewhere
        if worker.task is not None:
            _send(worker.pipe, worker.task)
        elif self._stopping or not waiting:
            _send(worker.pipe, None)
            self._retire(worker)

    def _next_free(self, waiting: deque[Task]) -> tuple[Task | None, list[Event]]:
        """Take the first task that no other start is at; say what others have recorded meanwhile.

        What other starts are at stays in the queue, in its order, to be taken over if they die.
        """
        busy, elsewhere, claimed = [], [], None
        while waiting and claimed is None:
            task = waiting.popleft()
            claimed, recorded = self.claim(task)
            if recorded is not None:
                elsewhere.append(Event(task=recorded, kind="elsewhere"))
            elif claimed is None:
                busy.append(task)
        waiting.extendleft(reversed(busy))
        return claimed, elsewhere

    def _retire(self, worker: _Worker) -> None:
        """Let a worker end that has nothing left to do, and forget it."""
        worker.process.join(timeout=10)
        worker.process.kill()
        worker.process.join()  # its device memory is free again once it is gone
        worker.pipe.close()
        self._workers.remove(worker)

    def _receive(self, worker: _Worker, waiting: deque[Task]) -> Iterator[Event]:
        try:
            event: Event = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            yield from self._bury(worker, waiting)
            return
        if event.kind not in UNDER_WAY:
            worker.task = None
        if event.kind == "disk":
            self.stop()  # the other runs have the same disk
        if event.last:
            self._retire(worker)
            if event.kind == "lost" or (event.kind == "failed" and not self.alone):
                kind: EventKind = "stopped" if self._stopping else "failed"
                event = dataclasses.replace(event, kind=kind)
                event = self._given_back(event, waiting) or event
            self._replace(worker, waiting)
        yield event

    def _bury(self, worker: _Worker, waiting: deque[Task]) -> Iterator[Event]:
        worker.process.join()  # unkilled, so that its own ending is named
        self._retire(worker)
        if worker.task is not None:
            code = worker.process.exitcode
            ending = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
            text = f"the worker process ended by {ending} while it carried out this run"
            yield self._dead(worker.task, text, waiting)
        self._replace(worker, waiting)

    def _dead(self, task: Task, text: str, waiting: deque[Task]) -> Event:
        """Return the fate of a task whose worker died; it may go back into the queue."""
        if self._asked_to_stop:
            return Event(task=task, kind="stopped", text=text)
        failed = Event(task=task, kind="failed", text=text)
        return self._given_back(failed, waiting) or failed

    def _given_back(self, failed: Event, waiting: deque[Task]) -> Event | None:
        """Put the task of a lost worker into the queue again and say so, if it has a try left."""
        task = failed.task
        if self._stopping or task.attempt >= self.retries:
            return None
        waiting.append(dataclasses.replace(task, attempt=task.attempt + 1))
        return dataclasses.replace(failed, kind="returned", last=False)

    def _replace(self, died: _Worker, waiting: deque[Task]) -> None:
        """Start a worker in place of one that died."""
        if waiting and not self._stopping:
            self._workers.append(self._start(died.device))


@contextlib.contextmanager
def _script_left_out() -> Iterator[None]:
    """Let a fresh process start without the caller's script, which it would run once more."""
    script = vars(sys.modules["__main__"])
    kept = {name: script.get(name) for name in ("__spec__", "__file__")}
    script.update(dict.fromkeys(kept))
    try:
        yield
    finally:
        script.update(kept)


def _send(pipe: Connection, message: Any) -> None:
    """Send to a process; a dead one is noticed, with its exit code, when its pipe is read."""
    with contextlib.suppress(OSError):
        pipe.send(message)
