"""A file of JSON lines for a run in progress: one complete line per step, without duplicates.

A run that is stopped goes on from its last checkpoint, which may lie some steps before its last
line. Those steps are done again, to the same values: the lines from there on are dropped first.

Easy to get wrong: a process that is killed may leave half a line, which is no step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repro.spec.whole_files import replace_text


class StepLines:
    """A file with one JSON object per step, in their order, made when the first line comes.

    `last_before` is the last step that the file held when it was opened; -1 for a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        earlier = read_lines(path)
        self.last_before = int(earlier[-1]["step"]) if earlier else -1
        self._goes_on = False

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the values of a step, counted from 1, and hand them to the operating system.

        A step that the file holds already is replaced, with all after it. Numbers that are not
        finite become null.
        """
        if not self._goes_on:  # what the file holds from `step` on is dropped, and half lines
            earlier = [line for line in read_lines(self.path) if line["step"] < step]
            replace_text(self.path, "".join(map(_line, earlier)))
            self._goes_on = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step} | {key: _plain(v) for key, v in values.items()}))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the steps that a file holds, up to the first that is not whole."""
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append(line)
    return lines


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
