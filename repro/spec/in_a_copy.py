"""Somebody else's code, such as a reward, in a copy of this process, which it may end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_RETURNED, _RAISED = 107, 108  # the exit codes of a copy that came to the end of a call


def ending_in_a_copy(call: Callable[[], Any], wait: float, computing: float = 0.0) -> str | None:
    """Return how somebody else's code ends a copy of this process.

    None is a call that returned, an empty text one that raised an exception. The copy is ended
    after `wait` seconds, or `computing` seconds of its own where that is given.
    """
    if not (child := os.fork()):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, computing)
        if torch := sys.modules.get("torch"):  # whose other threads stay behind
            torch.set_num_threads(1)
        with suppress(BaseException):  # is said by the call that follows
            call()
            os._exit(_RETURNED)
        os._exit(_RAISED)
    last = time.monotonic() + wait
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > last:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(ended[1])
    return {_RETURNED: None, _RAISED: ""}.get(code, f"its process ended, exit code {code}")
