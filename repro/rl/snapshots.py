"""Snapshots of training: whole folders, sealed by checksums, the last two kept, read back verified.

A snapshot is a folder `step-00000010/` with files of tensors (safetensors), `state.json`, and
`SHA256SUMS`, which names every other file and its SHA-256 as `sha256sum --check` reads them.
`repro.rl.training_state` says what is in them.

Atomic: everything is written into a folder of another name, flushed to disk, and renamed; only then
is the third newest removed. A process killed at any instant leaves the snapshots of before, or the
new one too, and perhaps an unfinished folder that the next write removes. Where a write fails (a
full disk), nothing of it stays.

Reading begins with the newest. One that is damaged, or that its caller refuses, is named, set aside
as `refused-00000010/`, and the one before it is used; the caller writes the sentences into the
record. Where none can be used, that is an error: starting over silently would hide the damage.

Easy mistakes: sums that are listed but not compared with what lies in the folder (a file too many
is as wrong as one too few); removing the older snapshot before the newer one is on the disk;
copying into the policy before everything was checked, which leaves half of a refused snapshot in
it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file
from torch import Tensor

from repro.models.checkpoint import sha256_of
from repro.models.files.tensor_files import write_tensors

STATE = "state.json"
SUMS = "SHA256SUMS"
SCHEMA = 5
_NAME = re.compile(r"step-(\d{8,})")
_TENSORS = ".safetensors"


Used = TypeVar("Used")


class SnapshotError(ValueError):
    """A snapshot that cannot be used; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A verified folder: step, JSON values of `state.json`, and tensors by file's name."""

    step: int
    content: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def write_snapshot(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], content: Mapping[str, Any]
) -> Path:
    """Write a snapshot, whole or not at all, then remove all but it and the one before it.

    `tensors` are by file name (`*.safetensors`), then by name; `content` are the JSON values of
    `state.json`. Returns the snapshot's folder, which the step names.

    Raises `OSError` when it cannot be written; it names a path, and the snapshots of before are
    still there.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / f"unfinished-{step:08d}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob("unfinished-*"):
            shutil.rmtree(left_over)
        partial.mkdir()
        _write_files(partial, tensors, {**content, "schema": SCHEMA, "step": step})
        _put(partial, final)
    except OSError as error:
        if error.filename is not None:
            raise
        # A write to a full disk raises with a file descriptor and no name.
        raise OSError(error.errno, error.strerror, str(final)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _keep_two(folder, final)
    return final


def read_newest(
    folder: Path, use: Callable[[Snapshot], Used], *, sets_aside: bool = True
) -> tuple[Used, list[str]] | None:
    """Use the newest good snapshot of a folder.

    Raises `SnapshotError` when there are snapshots and none can be used; the message names each.

    Parameters
    ----------
    use
        Takes what a snapshot holds; raises `ValueError`, before it changes anything, when the
        snapshot is not for its caller.
    sets_aside
        Whether newer ones that were refused are renamed, so that they are not read again.

    Returns
    -------
    tuple or None
        What `use` returned, and a sentence per newer snapshot that was refused; None where the
        folder holds no snapshot.
    """
    refused: dict[Path, str] = {}
    for path in reversed(snapshots_in(folder)):
        try:
            used = use(_read(path))
        except ValueError as error:
            refused[path] = str(error)
            continue
        for bad in refused if sets_aside else ():
            _set_aside(bad)
        return used, [
            f"checkpoint {bad.name} was refused ({why}); training went on from {path.name}"
            for bad, why in refused.items()
        ]
    if refused:
        each = "; ".join(f"checkpoint {path}: {why}" for path, why in refused.items())
        raise SnapshotError(f"{each}; remove {folder} to start again")
    return None


def snapshots_in(folder: Path) -> list[Path]:
    """Return the folders named like snapshots, oldest first."""
    return sorted(
        (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=_step_of
    )


def _write_files(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], content: Mapping[str, Any]
) -> None:
    """Write all files of a snapshot and force them to disk, the sums last."""
    sums = {}
    for name, values in tensors.items():
        sums[name] = write_tensors(folder / name, values)
    (folder / STATE).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    sums[STATE] = sha256_of(folder / STATE)
    listed = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    (folder / SUMS).write_text(listed, encoding="utf-8")
    for path in (*folder.iterdir(), folder):
        _flush(path)


def _put(partial: Path, final: Path) -> None:
    """Rename a written folder into place, in one step unless its step was written before."""
    if final.exists():
        # Step 0 alone is written twice: by two starts that were stopped before their first step.
        os.replace(final, final.with_name(f"unfinished-{final.name}-replaced"))
    os.replace(partial, final)
    _flush(final.parent)


def _keep_two(folder: Path, newest: Path) -> None:
    """Remove all snapshots but the newest and the one before it."""
    before = [path for path in snapshots_in(folder) if _step_of(path) < _step_of(newest)]
    for path in snapshots_in(folder):
        if path not in (newest, *before[-1:]):
            shutil.rmtree(path)


def _read(path: Path) -> Snapshot:
    """Return a snapshot each of whose files has the sum that is listed for it."""
    try:
        text = (path / SUMS).read_text(encoding="utf-8")
        lines = (line.partition("  ") for line in text.splitlines())
        listed = {name: digest for digest, _, name in lines}
        present = {file.name: sha256_of(file) for file in path.iterdir() if file.name != SUMS}
        for name in sorted(listed.keys() | present.keys()):
            if listed.get(name) != present.get(name):
                raise SnapshotError(
                    f"{name} has SHA-256 {present.get(name)}; {SUMS} says {listed.get(name)}"
                )
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise SnapshotError(f"{STATE} is of schema {content['schema']}; needed is {SCHEMA}")
        tensors = {name: load_file(path / name) for name in listed if name.endswith(_TENSORS)}
    except OSError as error:
        raise SnapshotError(f"it cannot be read: {error}") from error
    return Snapshot(step=content["step"], content=content, tensors=tensors)


def _set_aside(path: Path) -> None:
    """Rename a refused snapshot, so that it is neither read again nor counted as one of two."""
    aside = path.with_name(path.name.replace("step", "refused", 1))
    if aside.is_dir():
        shutil.rmtree(aside)
    os.replace(path, aside)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _flush(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
