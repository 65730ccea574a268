"""The paper's own numbers, typed with their place: `expected/paper/*.json`.

`cells` hold a value with row, column, unit and a confidence tag: `exact` (text, table or printed
label), `plot` (read off a curve, +-0.01 to 0.02 unless the note says more), `secondary` (someone's
summary of a text not seen), `inferred` (arithmetic on exact ones). `contradictions` lists where the
paper disagrees with itself, `out_of_memory` cells without a value. No missing value is guessed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCell:
    """One number of the paper, with an id that is unique in its file: `row/column/quantity`.

    `arm` is this suite's name for the row, empty where it has none; `items` are the test problems
    behind a percentage, 0 where that does not apply.
    """

    id: str
    row: str
    column: str
    quantity: str
    value: float
    unit: str
    confidence: str
    place: str
    arm: str = ""
    items: int = 0
    note: str = ""


def read_paper(path: Path) -> tuple[dict[str, Any], list[PaperCell]]:
    """Return a paper file's whole content and its cells; `ValueError` where it is broken."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not readable: {error}") from error
    try:
        cells = [PaperCell(**cell) for cell in raw["cells"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: cells: {error}") from error
    return raw, cells


def paper_cells(expected: Path, name: str) -> list[PaperCell]:
    """Return the cells of `expected/paper/<name>.json`, none if there is no such file."""
    path = expected / "paper" / f"{name}.json"
    return read_paper(path)[1] if path.is_file() else []


def every_cell(expected: Path, name: str) -> list[PaperCell]:
    """Return the cells, and in their places those where memory ran out, of value nan."""
    path = expected / "paper" / f"{name}.json"
    raw, cells = read_paper(path) if path.is_file() else ({}, [])
    of_row = {cell.row: cell for cell in cells}
    lost = [
        replace(of_row[row], id=f"{row}/{column}/{what}", column=column, quantity=what, value=nan)
        for row, column, what in raw.get("out_of_memory", [])
    ]
    return sorted([*lost, *cells], key=lambda cell: cell.column) if lost else cells
