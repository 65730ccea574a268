"""Files and folders that are whole or absent.

Each is written beside its place and renamed once it is complete: a process that is killed, or a
disk that fills up, leaves what was there before. The next write of the same name removes what a
killed process left.

A result goes where its name leads. Links are followed; a pipe or a character device (`/dev/null`,
`/dev/stdout`) is written into; a file that is replaced hands on its mode and, where permitted, its
owner. Other hard links to it keep the old content, as backups by hard links need.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

# What a disk says that cannot be written to.
DISK_FAULTS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV)
)
_MOST_LINKS = 40
_LOCK = "lock"
# A file that is mounted alone, as containers do, or another's in a folder such as /tmp.
_NOT_RENAMED_ONTO = (errno.EBUSY, errno.EPERM, errno.EACCES)

Content = bytes | Callable[[Path], None]


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Give a name to make a folder under, which becomes `out`, if new, when the block ends well."""
    place = Path(os.path.realpath(out))
    if os.path.lexists(place):
        raise FileExistsError(f"{out} exists; a checkpoint is never written over another")
    with _naming(out, beside=place), _room(place) as room:
        yield room / place.name
        os.replace(room / place.name, place)


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
    exists = f"{path} exists; records are never overwritten"
    with _naming(path), _room(path) as room:
        written = _written(room, text.encode())
        try:
            # A hard link fails if the name is taken; a rename would replace the file silently.
            os.link(written, path)
        except OSError:
            if os.path.lexists(path):
                raise FileExistsError(exists) from None
            os.replace(written, path)
    return path


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path`, replacing what is there in one step."""
    replace_files({path: text.encode()})


def replace_files(contents: Mapping[Path, Content]) -> None:
    """Write several files, replacing what is there, once all of them are on the disk.

    A content is the bytes, or what writes them to the path that it is given. The renames follow one
    another: a reader may meet the first file without the second. Raises `OSError` or `ValueError`
    where `place_of` refuses a path, or its disk does; the error names the path.
    """
    with ExitStack() as stack:
        steps = {path: _prepared(path, content, stack) for path, content in contents.items()}
        for path, put in steps.items():
            with _naming(path):
                put()


def require_place(path: Path) -> None:
    """Refuse, before the work for it, a path that `replace_files` would refuse after it."""
    with ExitStack() as stack:
        _prepared(path, b"", stack)


def place_of(path: Path) -> Path:
    """Return where a result of this name goes: the end of its links, or the descriptor it names.

    Raises `OSError` for a folder, a loop of links, a socket, a closed descriptor or a file closed
    to writing; `ValueError` for a block device, whose content a result would destroy.
    """
    named = path
    for _ in range(_MOST_LINKS):
        folder = Path(os.path.realpath(path.parent))
        if folder == _descriptors() or not path.is_symlink():
            break
        path = folder / path.readlink()
    else:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(named))
    place = folder / path.name
    if folder == _descriptors() and not place.exists():
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(named))
    if place.is_block_device():
        raise ValueError(f"{named} is a block device; a result needs a file")
    if place.exists() and not _is_stream(place):
        os.close(os.open(place, os.O_WRONLY))
    return place


def _is_stream(place: Path) -> bool:
    """Return whether what is written there flows on: a pipe, a device, standard output."""
    return place.parent == _descriptors() or place.is_fifo() or place.is_char_device()


def _descriptors() -> Path:
    """Return the folder of this process's open files, where `/dev/stdout` and `/dev/fd` lead."""
    return Path(os.path.realpath("/proc/self/fd"))


def _prepared(path: Path, content: Content, stack: ExitStack) -> Callable[[], None]:
    """Return what puts `content` at `path`: a rename of what is on the disk by then, or a write."""
    with _naming(path):
        place = place_of(path)
        there = place.exists()
        if _is_stream(place) or (there and not os.access(place.parent, os.W_OK)):
            return partial(_write_into, place, content)
        room = stack.enter_context(_room(place))
        return partial(_put, _written(room, content, place if there else None), place, content)


def _put(written: Path, place: Path, content: Content) -> None:
    try:
        os.replace(written, place)
    except OSError as error:
        if error.errno not in _NOT_RENAMED_ONTO or not place.exists():
            raise
        _write_into(place, content)


def _write_into(place: Path, content: Content) -> None:
    """Write to what cannot be renamed onto; into a pipe, once it has a reader."""
    if not isinstance(content, bytes):
        with tempfile.TemporaryDirectory() as folder:
            content(Path(folder, "whole"))
            content = Path(folder, "whole").read_bytes()
    sys.stdout.flush()
    own = place.parent == _descriptors()
    try:
        with open(os.dup(int(place.name)) if own else place, "wb") as file:
            file.write(content)
    except BrokenPipeError:
        raise ValueError(f"{place}: its reader left before the whole result was written") from None


def _written(room: Path, content: Content, old: Path | None = None) -> Path:
    """Write a file to the disk, by the umask or with the mode and owner of `old`; return it."""
    path = room / "whole"
    if not isinstance(content, bytes):
        content(path)
    with path.open("ab") as file:
        if isinstance(content, bytes):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        # As the umask has it, whatever mode the content's own writer gave it.
        os.fchmod(file.fileno(), stat.S_IMODE((room / _LOCK).stat().st_mode))
        if old is not None:
            state = old.stat()
            for owner in ((-1, state.st_gid), (state.st_uid, -1)):
                with suppress(PermissionError):
                    os.fchown(file.fileno(), *owner)
            os.fchmod(file.fileno(), stat.S_IMODE(state.st_mode))
    return path


@contextmanager
def _room(place: Path) -> Iterator[Path]:
    """Make a folder beside `place` for the time of a block, and remove those of killed processes.

    Each holds a file that its process has locked; the lock ends with the process. The file gets
    its name when it is locked, so that no other start takes it for one that was left.
    """
    try:
        import fcntl
    except ImportError:
        raise ValueError("files are written on Linux or macOS alone (on Windows: WSL 2)") from None
    place.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{place.name}.partial-"
    with suppress(PermissionError):  # a folder may be open to writing and closed to reading
        for left in [path for path in place.parent.iterdir() if path.name.startswith(prefix)]:
            with suppress(OSError), (left / _LOCK).open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
    room = Path(tempfile.mkdtemp(prefix=prefix, dir=place.parent))
    try:
        with (room / "unlocked").open("wb") as file:
            with suppress(OSError):  # a disk without locks: what a kill leaves there stays
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(file.name, room / _LOCK)
            yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


@contextmanager
def _naming(path: Path, beside: Path | None = None) -> Iterator[None]:
    """Give an error of the disk the path that it is about: a write knows a descriptor alone.

    With `beside`, only errors without a name or with one beside this place; others keep theirs.
    """
    try:
        yield
    except OSError as error:
        names = f"{error.filename} {error.filename2}"  # of a copy, where it goes is the second
        own = beside is None or error.filename is None or f".{beside.name}." in names
        if error.errno is None or not own:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        # Of a library in Rust, such as safetensors, whose errors are no `OSError`.
        number = re.search(r"\(os error (\d+)\)", str(error))
        code = int(number[1]) if number else 0
        if isinstance(error, ValueError) or code not in DISK_FAULTS:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error
