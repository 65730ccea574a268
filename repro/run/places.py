"""Where things are: the folder of records, and the folder of expectations.

Records go to `--runs`, else `$REPRO_RUNS`, else `./runs`. Expectations come from `--expected`, else
from the checkout that holds the package, else from the copy inside the installed package.
"""

from __future__ import annotations

import os
from pathlib import Path

from repro.evidence.provenance import PACKAGE
from repro.spec.checks import meant, require

# How many existing folders a message lists when the one named does not exist.
_NAMED = 4


def runs_folder(named: str | None) -> Path:
    """Return the folder of records; `ValueError` where something else has its name."""
    folder = Path(named or os.environ.get("REPRO_RUNS") or "runs")
    fits = folder.is_dir() or not os.path.lexists(folder)
    require(fits, f"{folder} is no folder; records need one there")
    return folder


def expected_folder(named: str | None) -> Path:
    """Return the folder of expectations; `ValueError` if there is none."""
    candidates = [Path(named)] if named else [PACKAGE.parent / "expected", PACKAGE / "expected"]
    for folder in candidates:
        if (folder / "paper").is_dir():
            return folder
    looked = " or ".join(str(folder) for folder in candidates)
    raise ValueError(f"there are no expectations (a folder with `paper` in it) in {looked}")


def absence_text(runs: Path, folder: Path) -> str:
    """Return why `folder` has no records, and which folders next to it have."""
    looked = runs if not runs.is_dir() else folder
    if looked.exists() and not looked.is_dir():
        return f"{looked} is no folder; records need one there"
    state = "has no record" if looked.is_dir() else "does not exist"
    present = looked
    while not present.is_dir():
        present = present.parent
    if present == looked:
        return f"{looked} {state}"
    name = looked.relative_to(present).parts[0]
    beside = sorted(path.name for path in present.glob("[!.]*") if path.is_dir())
    if present == Path():
        return f"{looked} {state}{meant(name, beside)}"
    folders = ", ".join(beside[:_NAMED]) or "no folder"
    more = f" and {len(beside) - _NAMED} more" if len(beside) > _NAMED else ""
    return f"{looked} {state}{meant(name, beside)}; {present} holds {folders}{more}"
