"""The learning rates that the proxy tier's sweep chose, read from the file that `choose` wrote.

The rule was fixed before any run: for each format and way of training, the rate of the grid with
the best mean held-out accuracy at the last step on the development split, over the tuning seeds and
the arms that share the rate; a tie goes to the smaller rate. Tuning seeds are not test seeds. While
there is no such file, every arm has the middle of the grid.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHOICE_FILE = Path(__file__).with_name("chosen_rates.json")
SCHEMA = 1


def read_choice(path: Path = CHOICE_FILE) -> dict[str, Any] | None:
    """Return the choice with the values behind it, or None where none was made.

    Raises
    ------
    ValueError
        If the file is of another schema.
    """
    if not path.is_file():
        return None
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if raw.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema is {raw.get('schema')!r}; this program reads {SCHEMA}")
    return raw


def chosen_rates(path: Path = CHOICE_FILE) -> tuple[tuple[str, float], ...]:
    """Return (key, rate) as `LearningRates.chosen` takes it; empty where none was made."""
    choice = read_choice(path)
    return () if choice is None else tuple(sorted(choice["chosen"].items()))
