"""Which source a process runs: commit and whether the files differ from it.

Asked in this order: the variable `REPRO_COMMIT` (for containers without git), the git checkout that
holds the package, a file `COMMIT` written beside it when it was packaged. Where none answers, the
commit is `unknown`, and is said to be.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
UNKNOWN = "unknown"


@functools.cache
def source_commit() -> tuple[str, bool | None]:
    """Return (commit, dirty); dirty is None where it cannot be told."""
    named = os.environ.get("REPRO_COMMIT")
    if named:
        return named, None
    checkout = checkout_folder()
    if checkout is not None:
        commit = _git(checkout, "rev-parse", "HEAD")
        status = _git(checkout, "status", "--porcelain", "--untracked-files=normal")
        if commit is not None:
            return commit, None if status is None else bool(status)
    packaged = PACKAGE / "COMMIT"
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8").strip(), None
    return UNKNOWN, None


def checkout_folder() -> Path | None:
    """Return the root of the git checkout whose `repro` this package is, or None."""
    root = PACKAGE.parent
    return root if (root / ".git").exists() else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
