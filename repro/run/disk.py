"""Disks that are full, read-only or gone, and files where folders should be, as one sentence.

Such an error is not the result of a run: on another disk the same run succeeds. So there is no
record of failure (which could not be written either): the command stops, prints the sentence and
exits with status 2. What was written before stays, and the next start continues from it.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from repro.spec.whole_files import DISK_FAULTS

_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR)


class DiskError(ValueError):
    """The place of the records cannot be used; the message says which path, and why."""


def is_disk_fault(error: OSError, place: Path) -> bool:
    """Return whether an error comes from the disk or a path below `place`, not from the run."""
    if error.errno in DISK_FAULTS:
        return True
    named = error.filename
    return isinstance(named, str | Path) and Path(named).absolute().is_relative_to(place.absolute())


def sentence_of(error: OSError, place: Path | None = None) -> str:
    """Return an error as a sentence without a traceback, about its own path or `place`."""
    own = error.filename2 or error.filename  # when renaming, the new name
    named = own if isinstance(own, str | Path) else place
    if named is None and error.errno in DISK_FAULTS:
        named = "standard output or a cache"  # whatever else is written to has its name here
    if named is None or error.errno is None:
        return str(error) or type(error).__name__
    path = Path(named)
    if error.errno in _IN_THE_WAY and (said := said_in_the_way(path)):
        return said
    return f"{path} cannot be used: {os.strerror(error.errno)}"


def require_writable(folder: Path) -> None:
    """Make a folder and write into it; raise `DiskError` before a run starts where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DiskError(sentence_of(error, folder)) from error


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes on the disk of a folder, which may not exist yet; None if unknown."""
    present = folder.absolute()
    while not present.exists() and present != present.parent:
        present = present.parent
    try:
        return shutil.disk_usage(present).free
    except OSError:
        return None


def size(nbytes: float) -> str:
    """Return a number of bytes in the largest unit that keeps it above one."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def said_in_the_way(path: Path) -> str:
    """Return a sentence on the path, or the parent of it, that is there and is no folder."""
    for part in (path, *path.parents):
        if os.path.lexists(part):
            return "" if part.is_dir() else f"{part} is no folder; one is needed there"
    return ""
