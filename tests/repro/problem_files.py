"""Files of problems for tests, in the form that `repro.data.problem` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from repro.data.problem import Problem


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write problems as JSONL."""
    lines = [
        json.dumps(dataclasses.asdict(problem), ensure_ascii=False) + "\n" for problem in problems
    ]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
