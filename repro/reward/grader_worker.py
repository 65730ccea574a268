"""One grader worker as its parent sees it: a process, two pipes, and a time limit on each answer.

The process is a fresh interpreter that runs `verifier.py` as a script: nothing of the parent is
forked or imported again, however much the parent has loaded. Its pipes are not inherited by other
processes, so that the end of the parent, however it comes, is the end of the worker's input.

What a worker may use up is its own processor time, as the system counts it, so that a stalled
machine makes no wrong answer; wall time is bounded far above, for one that waits without computing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

_SCRIPT = Path(__file__).with_name("verifier.py")
_START_SECONDS = 120.0
# A worker that computes nothing for so long will not answer.
_IDLE_SECONDS = 120.0
# How long to wait before its processor time is looked at again.
_LOOK_SECONDS = 0.1


class WorkerLateError(Exception):
    """A worker did not answer in time."""


class WorkerGoneError(Exception):
    """A worker ended unexpectedly, or was killed by another process."""


class Worker:
    """One process and its pipes."""

    def __init__(self, seconds: float) -> None:
        # Ends with the worker, which outlives this function.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
        # -P: the script's own folder must not come before the installed packages.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        self._buffer = b""
        self._finalizer = weakref.finalize(self, _end, self.process)

    def wait_until_ready(self) -> None:
        """Wait for the imports, which do not count against any item's limit."""
        if self.receive(_START_SECONDS) != "ready":
            raise WorkerGoneError

    def send(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Send a batch."""
        stdin = self.process.stdin
        if stdin is None:
            raise WorkerGoneError
        try:
            stdin.write(json.dumps(pairs).encode() + b"\n")
            stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise WorkerGoneError from error

    def receive(self, seconds: float) -> str:
        """Return the next line, while the process computes for at most `seconds`.

        Raises `WorkerLateError` if it computes longer, or waits for `seconds` and two minutes, and
        `WorkerGoneError` if it has ended.
        """
        stdout = self.process.stdout
        if stdout is None or stdout.closed:
            raise WorkerGoneError
        if b"\n" not in self._buffer:
            begun = processor_seconds(self.process.pid)
            deadline = time.monotonic() + seconds + _IDLE_SECONDS
        while b"\n" not in self._buffer:
            if not select.select([stdout], [], [], _LOOK_SECONDS)[0]:
                used = processor_seconds(self.process.pid) - begun
                if used > seconds or time.monotonic() > deadline:
                    raise WorkerLateError
                continue
            chunk = os.read(stdout.fileno(), 65_536)
            if not chunk:
                raise WorkerGoneError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def errors(self) -> str:
        """Return the last line that the process wrote to its standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def end(self) -> None:
        """Kill the process and reap it."""
        self._finalizer()


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in seconds.

    Where the system does not say (no `/proc`), or the process has ended, wall time stands for it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    # Fields 14 and 15 of proc(5), counted from the third: user and system time.
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker, close its pipes and reap it."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
