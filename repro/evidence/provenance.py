"""Which source a process runs: commit, whether the files differ from it, and the files' digest.

The commit is that of the variable `REPRO_COMMIT` (for containers without git), else of the git
checkout that holds the package, else `unknown`.

What ran is the source as it was when its modules were imported, not as it is when a record is
written: a process asks when it begins, before it imports a procedure (`source_at_start`), and the
answer stays. It looks again at the end (`source_states`), and a checkpoint carries what was seen,
so that a run resumed from one knows the sources of all its steps. States are told apart by their
digests: a commit that does not change the sources is not a new state.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from repro.spec.facts import Facts

PACKAGE = Path(__file__).resolve().parent.parent
UNKNOWN = "unknown"
# What decides the result of a run: code, and the tables of choices that it reads.
_FOLDERS = ("repro", "kernels")
_KINDS = (".py", ".cu", ".cuh", ".json")


@functools.cache
def source_commit() -> tuple[str, bool | None]:
    """Return (commit, dirty); dirty is None where it is not known."""
    named = os.environ.get("REPRO_COMMIT")
    if named:
        return named, None
    checkout = checkout_folder()
    if checkout is not None:
        commit = _git(checkout, "rev-parse", "HEAD")
        status = _git(checkout, "status", "--porcelain", "--untracked-files=normal")
        if commit is not None:
            return commit.decode().strip(), None if status is None else bool(status)
    return UNKNOWN, None


def checkout_folder() -> Path | None:
    """Return the root of the git checkout whose `repro` this package is, or None."""
    root = PACKAGE.parent
    return root if (root / ".git").exists() else None


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return what git prints about a checkout; None where it cannot tell."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def source_at_start() -> dict[str, Any]:
    """Return the source's `commit`, `dirty` and `sha256` when this process first asked."""
    commit, dirty = source_commit()
    return {"commit": commit, "dirty": dirty, "sha256": source_digest()}


def source_states(earlier: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the states that a run's source was in, each as `source_at_start`, first seen first.

    To the `earlier` ones of its checkpoint this process's first and the present one are added.
    """
    start, now = source_at_start(), source_digest.__wrapped__()
    states = _distinct([*earlier, start])
    if now not in {state["sha256"] for state in states}:
        commit, dirty = source_commit.__wrapped__()
        states.append({"commit": commit, "dirty": dirty, "sha256": now})
    return states


def _distinct(states: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the states without those whose digest an earlier one has."""
    by_digest: dict[str, dict[str, Any]] = {}
    for state in states:
        by_digest.setdefault(state["sha256"], dict(state))
    return list(by_digest.values())


def note_source(facts: Facts) -> None:
    """Add the source that this process started with to facts that travel in a checkpoint."""
    facts["sources"] = _distinct([*facts.get("sources", ()), source_at_start()])


@functools.cache
def source_digest() -> str:
    """Return the SHA-256 over the source files that this process runs, names and contents.

    A checkout's state is known from git; elsewhere (a copy on another machine) this digest is what
    shows that the copy is the commit that it is said to be.
    """
    root, in_wheels = PACKAGE.parent, PACKAGE / "expected"  # of the root in a checkout
    files = (path for folder in _FOLDERS for path in (root / folder).rglob("*"))
    return _digest(
        (str(path.relative_to(root)), path.read_bytes())
        for path in files
        if path.suffix in _KINDS and path.is_file() and in_wheels not in path.parents
    )


def digest_of_commit(commit: str) -> str | None:
    """Return the same digest of a commit of this checkout; None where git cannot tell."""
    asked = ("archive", "--format=tar", "--end-of-options", commit, *_FOLDERS)
    checkout = checkout_folder()
    packed = None if checkout is None else _git(checkout, *asked)
    if packed is None:
        return None
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = [(item.name, archive.extractfile(item)) for item in archive.getmembers()]
        return _digest((name, file.read()) for name, file in files if file is not None)


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    total = hashlib.sha256()
    for name, content in sorted(files):
        if name.endswith(_KINDS):
            total.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()
