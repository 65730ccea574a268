"""Which source a process runs: commit, whether the files differ from it, and the files' digest.

The commit is asked in this order: the variable `REPRO_COMMIT` (for containers without git), the git
checkout that holds the package, a file `COMMIT` written beside it when it was packaged. Where none
answers, the commit is `unknown`, and is said to be.

What ran is the source as it was when its modules were imported, not as it is when a record is
written: a process asks when it begins, before it imports a procedure (`source_at_start`), and the
answer stays. It looks again at every checkpoint and at the end (`source_states`), and a checkpoint
carries what was seen, so that a run which went on from one knows the sources of all its steps. Two
states are two digests; a commit that leaves the sources as they were makes no second state.

A file that was edited and put back between two looks has the same digest at both, and a module that
was imported in between is the edited one. So each look compares the files' stamps (size, time of
the last write, time of the last change of the entry) with those of the beginning: no program can
set the last one back. `written` of a state names the files whose stamps moved. That is no proof of
an edit: `touch`, `chmod` and a checkout of another branch and back leave the same trace, and what
such a run ran is not shown either. A file that was added and removed again leaves no stamp.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
UNKNOWN = "unknown"
# What decides a run's result: code and the choices beside it.
_FOLDERS = ("repro", "kernels")
_KINDS = (".py", ".cu", ".cuh", ".json")
# Whole, or as short as records have it. Anything else that a record names is never handed to git.
_COMMIT = re.compile("[0-9a-f]{7,40}")


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


def source_at_start() -> dict[str, Any]:
    """Return the state of the source when this process first asked.

    Returns
    -------
    dict
        `commit`, `dirty` (None where it is not known) and `sha256`, of the files.
    """
    stamps_at_start()  # before any file is read: a later write moves a stamp
    commit, dirty = source_commit()
    return {"commit": commit, "dirty": dirty, "sha256": source_digest()}


def source_states(earlier: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the states that a run's source was in, in the order in which they were first seen.

    Parameters
    ----------
    earlier
        Those that its checkpoint carries. This process's first and the present one are added.

    Returns
    -------
    list of dict
        As `source_at_start`; `written` lists the files that were modified after the process
        started with this state, and is left out where there are none.
    """
    start = source_at_start()
    states: dict[str, dict[str, Any]] = {}
    for state in (*earlier, start):
        states.setdefault(state["sha256"], dict(state))
    moved = _written_since_start()
    # Without a moved stamp the files are those of the start: none of them is read again.
    now = source_digest.__wrapped__() if moved else start["sha256"]
    if now not in states:
        commit, dirty = source_commit.__wrapped__()
        states[now] = {"commit": commit, "dirty": dirty, "sha256": now}
    own = states[start["sha256"]]
    if written := sorted({*own.get("written", ()), *moved}):
        own["written"] = written
    return list(states.values())


@functools.cache
def stamps_at_start() -> dict[str, tuple[int, int, int]]:
    """Return {file: (bytes, last write, last change of the entry)} when first asked, in ns."""
    return {
        name: (state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for name, state in _files(PACKAGE.parent).items()
    }


def _written_since_start() -> list[str]:
    """Return the source files that were written to, added or removed since this process began."""
    first, now = stamps_at_start(), stamps_at_start.__wrapped__()
    return [name for name in first.keys() | now.keys() if first.get(name) != now.get(name)]


def note_source(effects: dict[str, Any]) -> None:
    """Add the states of the source so far to effects that travel in a checkpoint."""
    effects["sources"] = source_states(effects.get("sources", ()))


@functools.cache
def source_digest() -> str:
    """Return the SHA-256 over the source files that this process runs, names and contents.

    A checkout's state is known from git; elsewhere (a copy on another machine) this digest is what
    shows that the copy is the commit that it is said to be.
    """
    root = PACKAGE.parent
    return _digest((name, (root / name).read_bytes()) for name in _files(root))


def _files(root: Path) -> dict[str, os.stat_result]:
    """Return {name below the root: its status} of the files of a source tree that a digest covers.

    Every checkpoint and record asks, so names stay strings: paths would take ten times as long.
    """
    files = {}
    for folder in _FOLDERS:
        for place, _, names in os.walk(f"{root}/{folder}"):
            for name in names:
                if not name.endswith(_KINDS):
                    continue
                path = f"{place}/{name}"
                try:
                    status = os.stat(path)
                except OSError:  # a link to nothing, or gone since it was listed
                    continue
                if stat.S_ISREG(status.st_mode):
                    files[path.removeprefix(f"{root}/")] = status
    return files


def digest_of_commit(commit: str) -> str | None:
    """Return the same digest of a commit of this checkout; None where git cannot tell."""
    files = files_of_commit(commit, _FOLDERS)
    return None if files is None else _digest(files.items())


def is_commit(text: str) -> bool:
    """Whether a text is a commit's digits, 7 to 40 of them."""
    return _COMMIT.fullmatch(text) is not None


def commits_lacking(commits: Iterable[str]) -> list[str]:
    """Return those that this checkout does not have, sorted; none without its whole history."""
    checkout = checkout_folder()
    if checkout is None or _git(checkout, "rev-parse", "--is-shallow-repository") != "false":
        return []
    return [
        commit
        for commit in sorted(set(commits))
        if not is_commit(commit) or _git(checkout, "cat-file", "-e", f"{commit}^{{commit}}") is None
    ]


def files_of_commit(commit: str, paths: Sequence[str]) -> dict[str, bytes] | None:
    """Return {name: content} of a commit's files at or below these paths.

    None where git cannot tell: no checkout, a text that is no commit's, or a commit that lacks one
    of the paths.
    """
    checkout = checkout_folder()
    if checkout is None or not is_commit(commit):
        return None
    command = ["git", "-C", str(checkout), "archive", "--format=tar", "--end-of-options"]
    try:
        done = subprocess.run(
            [*command, commit, *paths], capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        files = [item for item in archive.getmembers() if item.isfile()]
        contents = [(item.name, archive.extractfile(item)) for item in files]
        return {name: file.read() for name, file in contents if file is not None}


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    total = hashlib.sha256()
    for name, content in sorted(files):
        if name.endswith(_KINDS):
            total.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()
