"""Which runs this start carries out, where several starts share one folder of records.

A start claims a task before it begins: it locks the file `seed-<n>.lock` beside the place of the
record (`flock`), and looks for the record again, for another start may have written it since. A
lock is the process's own: it ends with it, however it ends, so there is no stale one to break; the
file that a killed process leaves says nothing and is locked by the next. Tasks that another start
has claimed are left to it and asked for again, in case it dies. A run that another start tried and
recorded as failed is not tried again by this one.

At the systems tier one lock stands for all runs: measurements need the device to themselves. Only
there has a task several runs, so that one lock claims a task.

On network disks Linux turns `flock` into a lock at the server, which ends with the process or,
after a while, with its machine. Where a disk has no locks at all, a sentence says that two starts
must not share the folder.

Easy to get wrong: looking for the record before the lock is held; removing the lock's file while
another process waits for it, after which two hold a lock of that name (so a lock counts only if its
file is still the one at that path).
"""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from repro.evidence.record import record_path, standing_of
from repro.run.worker import Task
from repro.spec.config import RunConfig
from repro.spec.tier import Tier

_BUSY = (errno.EAGAIN, errno.EACCES)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class RunLocks:
    """The locks of this process on the runs of one folder of records.

    It intends to do the `pending` runs; records of them from now on may be another start's.
    """

    def __init__(
        self, runs: Path, pending: Sequence[RunConfig], show: Callable[[str], None]
    ) -> None:
        self._runs, self._show = runs, show
        self._descriptors: dict[Path, int | None] = {}
        self._failures = {run.digest(): failures_of(run, runs) for run in pending}
        self._shown: set[str] = set()

    def __enter__(self) -> RunLocks:
        return self

    def __exit__(self, *exc: object) -> None:
        for path in list(self._descriptors):
            self._unlock(path)

    def take(self, task: Task) -> tuple[Task | None, Task | None]:
        """Return what of a task is now claimed, and what another start has recorded meanwhile.

        Both are None where another start is at it.
        """
        path = self._path(task.run)
        if not self._lock(path):
            return None, None
        elsewhere = [run for run in task.every if self._recorded_since(run)]
        claimed = [run for run in task.every if run not in elsewhere]
        if not claimed:
            self._unlock(path)
        return _part(task, claimed), _part(task, elsewhere)

    def release(self, task: Task) -> None:
        """Release a task that was claimed."""
        self._unlock(self._path(task.run))

    def _recorded_since(self, run: RunConfig) -> bool:
        """Return whether another start has recorded the run, as done or as failed, or seems to."""
        failed = failures_of(run, self._runs) > self._failures.get(run.digest(), 0)
        return failed or not standing_of([run], self._runs).left

    def _path(self, run: RunConfig) -> Path:
        if run.tier == Tier.SYSTEMS.value:
            return self._runs / run.tier / "measuring.lock"
        return record_path(run, self._runs).with_suffix(".lock")

    def _lock(self, path: Path) -> bool:
        """Lock a file unless another process has; True where this process has it already."""
        import fcntl  # not on Windows, where nothing is run

        if path in self._descriptors:
            return True
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.read(descriptor, 200).decode(errors="replace").strip()
                os.close(descriptor)
                return self._refused(path, error, holder)
            if _is_at(descriptor, path):
                break
            os.close(descriptor)  # its holder removed it between our opening and our locking it
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._descriptors[path] = descriptor
        return True

    def _refused(self, path: Path, error: OSError, holder: str) -> bool:
        """Return False for a lock that another has; True, and say so, where there are no locks."""
        if error.errno in _BUSY:
            if holder:
                self._show_once(f"Another start ({holder}) is at work on some of these runs.")
            return False
        if error.errno not in _WITHOUT_LOCKS:
            raise OSError(error.errno, error.strerror, str(path)) from error
        self._show_once(
            f"The disk of {self._runs} has no locks ({error.strerror}): start nothing else there."
        )
        self._descriptors[path] = None
        return True

    def _show_once(self, sentence: str) -> None:
        if sentence not in self._shown:
            self._shown.add(sentence)
            self._show(sentence)

    def _unlock(self, path: Path) -> None:
        descriptor = self._descriptors.pop(path, None)
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def failures_of(run: RunConfig, runs: Path) -> int:
    """Return how often a run has failed, by the records in `runs`."""
    path = record_path(run, runs)
    return len([*path.parent.glob(f"{path.stem}.failed-*.json")])


def _part(task: Task, runs: Sequence[RunConfig]) -> Task | None:
    """Return the task with these of its runs, or None without any."""
    if not runs:
        return None
    return dataclasses.replace(task, run=runs[0], also=tuple(runs[1:]))


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one that its path names."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
