"""One grader worker as its parent sees it: a process, two pipes, and a time limit on each answer.

The process is a fresh interpreter that runs `verifier.py` as a script: nothing of the parent is
forked or imported again, however much the parent has loaded. Its pipes are not inherited by other
processes, so that the end of the parent, however it comes, is the end of the worker's input.

What a worker may use up is its own processor time, by a timer of the system that ends it, so that a
stalled machine makes no wrong answer; wall time is bounded far above, for one that waits without
computing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SCRIPT = Path(__file__).with_name("verifier.py")
# A worker that starts, or computes nothing, for so long will not answer.
_IDLE_SECONDS = 240.0


class WorkerLateError(Exception):
    """A worker did not answer in time."""


class WorkerGoneError(Exception):
    """A worker ended unexpectedly, or was killed by another process."""


class Worker:
    """One process and its pipes; `seconds` are the processor time that one pair may take."""

    def __init__(self, seconds: float) -> None:
        self._most_seconds = seconds + _IDLE_SECONDS
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

    def send(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Send pairs, of which each has a line in answer."""
        stdin = self.process.stdin
        if stdin is None:
            raise WorkerGoneError
        try:
            stdin.write(json.dumps(pairs).encode() + b"\n")
            stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise WorkerGoneError from error

    def receive(self) -> str:
        """Return the next line.

        Raises `WorkerLateError` if the process was over its limit, or does not answer in its
        seconds and four minutes, and `WorkerGoneError` if it has ended otherwise.
        """
        stdout = self.process.stdout
        if stdout is None or stdout.closed:
            raise WorkerGoneError
        while b"\n" not in self._buffer:
            if not select.select([stdout], [], [], self._most_seconds)[0]:
                raise WorkerLateError
            chunk = os.read(stdout.fileno(), 65_536)
            if not chunk:
                late = self.process.wait() == -signal.SIGPROF
                raise WorkerLateError if late else WorkerGoneError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def errors(self) -> str:
        """Return the last line that the process wrote to its standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def end(self) -> None:
        """Kill the process, close its pipes and reap it."""
        # What was not yet sent no longer can be.
        with contextlib.suppress(OSError), self.process:
            self.process.kill()
