"""Files and folders that are whole or absent.

Each is written under a temporary name beside its own and renamed once it is complete: a process
that is killed, or a disk that fills up, leaves what was there before.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Give a name to make a folder under, which becomes `out`, if new, when the block ends well."""
    if out.exists():
        raise FileExistsError(f"{out} exists; a checkpoint is never written over another")
    temporary = out.with_name(f".{out.name}.partial-{os.getpid()}")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp_of(*paths: Path) -> str:
    """Return what changes when a file, which must be there, is replaced or written to."""
    states = [path.stat() for path in paths]
    return str([(state.st_ino, state.st_mtime_ns, state.st_size) for state in states])


def write_new(path: Path, text: str) -> Path:
    """Write `text` to a new file, whole or not at all; `FileExistsError` if it is there."""
    temporary = _write_temporary(path, text.encode())
    try:
        # A hard link fails if the name is taken, where a rename would replace the file silently.
        os.link(temporary, path)
    except FileExistsError:
        raise FileExistsError(f"{path} exists; records are never overwritten") from None
    except OSError:
        if path.exists():
            raise FileExistsError(f"{path} exists; records are never overwritten") from None
        os.replace(temporary, path)
        return path
    finally:
        temporary.unlink(missing_ok=True)
    return path


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path`, replacing what is there in one step."""
    replace_files({path: text.encode()})


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Write several files, replacing what is there, once all of them are on the disk.

    The renames follow one another: a reader may meet the first file without the second.
    """
    written: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            written[path] = _write_temporary(path, content)
        for path, temporary in written.items():
            os.replace(temporary, path)
    finally:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)


def _write_temporary(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
    except OSError as error:
        os.unlink(name)
        # A full disk is noticed by a write, which knows a descriptor and no name.
        raise OSError(error.errno, error.strerror, str(path)) from error
    return Path(name)
