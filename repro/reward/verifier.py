r"""The worker process: reads pairs, asks math-verify, writes statuses. Run as a script.

This is the only module that imports `math_verify`. Of this package it loads `finished.py` alone.

Protocol: one JSON list of `[gold, answer]` per line on standard input; one status per line on
standard output, `ok`, `wrong`, `unparsable_gold` or `error`, after a first line `ready`. At the end
of input the worker exits.

math-verify's own time limit is `signal.alarm`, which does nothing while a C function such as a
big-integer power runs. Here it is off, and two limits of the operating system hold: address space,
and a timer of processor time, which ends the process by SIGPROF at a pair that is late.

Both sides are parsed from inside `\boxed{}`, as one expression each: from loose text math-verify
takes the last number it can find. The gold comes first; `verify` is not symmetric.
"""

from __future__ import annotations

import json
import logging
import resource
import runpy
import signal
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

_ADDRESS_SPACE = 2 << 30  # bytes
_TARGETS = [LatexExtractionConfig(boxed_match_priority=0)]
# By its place, since this file is run as a script, outside its package.
_FINISHED = runpy.run_path(str(Path(__file__).with_name("finished.py")))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    """Return math-verify's readings of one expression, expressions first."""
    return tuple(parse(f"\\boxed{{{text}}}", _TARGETS, parsing_timeout=None))


def status_of(gold: str, answer: str) -> str:
    """Return the status of one pair, both already in the forms to compare."""
    readings = _parsed(gold)
    if not readings or isinstance(readings[0], str):
        return "unparsable_gold"
    try:
        answers = _parsed(answer)
        # What costs nothing first: it bounds the powers that the algebra would multiply out.
        equal = bool(answers) and _FINISHED["as_finished"](readings[0], answers[0])
        if equal:
            equal = verify(list(readings), list(answers), timeout_seconds=None)
    except Exception:
        if gold == answer:
            raise
        # An answer that breaks the algebra is wrong; dropping its item would reward it.
        return "wrong"
    return "ok" if equal else "wrong"


def main() -> None:
    """Serve pairs until the input ends."""
    seconds = float(sys.argv[1])
    logging.disable(logging.CRITICAL)
    # Warm the grammar, so that the first item is not slower than the rest.
    status_of("\\frac{1}{2}", "x+1")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _ADDRESS_SPACE if hard == resource.RLIM_INFINITY else min(_ADDRESS_SPACE, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    # Its default action ends the process, whatever that is doing.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        for gold, answer in json.loads(line):
            # The process's own time is counted: a machine that stands still is not the answer's
            # fault.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                status = status_of(gold, answer)
            except Exception:  # noqa: BLE001 (anything that SymPy raises is reported, not hidden)
                status = "error"
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(status, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
