"""Files of problems for tests, in the form that `repro.data.problem` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from repro.data.problem import Problem


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write problems as JSONL."""
    rows = [dataclasses.asdict(problem) for problem in problems]
    for row in rows:
        for name in ("before", "row", "where"):
            del row[name]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
