"""Files and folders are whole or absent."""

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from repro.spec.whole_files import (
    appearing,
    place_of,
    replace_files,
    replace_text,
    require_place,
    write_new,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root alone makes devices, gives files away")


def test_a_file_system_without_hard_links_still_never_overwrites(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError("no hard links here")))
    path = write_new(tmp_path / "a.json", "first")
    with pytest.raises(FileExistsError):
        write_new(path, "second")
    assert path.read_text() == "first"


def test_of_several_files_that_cannot_be_written_none_is_half_there(tmp_path, monkeypatch):
    fsync, calls = os.fsync, []

    def second_fails(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(OSError, match="No space left"):
        replace_files({tmp_path / "a": b"1", tmp_path / "b": b"2"})
    assert list(tmp_path.iterdir()) == []


def test_folders_on_the_way_are_made_and_what_is_there_is_replaced(tmp_path):
    path = tmp_path / "not" / "yet" / "a.txt"
    replace_text(path, "first")
    replace_text(path, "second")
    assert [item.read_text() for item in path.parent.iterdir()] == ["second"]


def test_a_folder_appears_when_it_is_complete_and_never_over_another(tmp_path):
    out = tmp_path / "not" / "yet"
    with appearing(out) as folder:
        folder.mkdir()
        (folder / "a").write_text("first")
        assert not out.exists()
    assert (out / "a").read_text() == "first"
    with pytest.raises(FileExistsError, match="never written over"), appearing(out):
        pytest.fail("the block was entered")
    assert list(out.parent.iterdir()) == [out]


AT_WORK = """
import sys, time
from pathlib import Path
from repro.spec.whole_files import appearing

with appearing(Path(sys.argv[1])) as folder:
    folder.mkdir()
    (folder / "a").write_text(sys.argv[2])
    print("at work", flush=True)
    sys.stdin.readline()
"""


def at_work(out, text):
    """Return a process in the midst of making a folder."""
    command = [sys.executable, "-c", AT_WORK, str(out), text]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "at work\n"
    return process


def test_what_a_killed_process_left_goes_with_the_next_start(tmp_path):
    killed = at_work(tmp_path / "out", "half")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert len(list(tmp_path.iterdir())) == 1
    with appearing(tmp_path / "out") as folder:
        assert len(list(tmp_path.iterdir())) == 1
        folder.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_that_make_one_folder_leave_each_other_alone(tmp_path):
    out = tmp_path / "out"
    first = at_work(out, "first")
    second = at_work(out, "second")
    assert len(list(tmp_path.iterdir())) == 2
    second.communicate("\n")
    said = first.communicate("\n")[1]
    assert (first.returncode, second.returncode) == (1, 0)
    assert f"Directory not empty: '{out}'" in said
    assert (out / "a").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_of_half_a_folder_nothing_is_left_and_a_full_disk_is_told_with_its_name(tmp_path):
    def half(nameless):
        with appearing(tmp_path / "out") as folder:
            folder.mkdir()
            (folder / "a").write_text("half")
            raise nameless or OSError(errno.ENOSPC, full, "/source", None, str(folder / "copy"))

    full = "No space left on device"
    for error in (None, OSError(errno.ENOSPC, full), RuntimeError(f"{full} (os error 28)")):
        with pytest.raises(OSError, match=full) as caught:
            half(error)
        assert caught.value.filename == str(tmp_path / "out")
    with pytest.raises(FileNotFoundError) as missing:
        half(FileNotFoundError(errno.ENOENT, "No such file", "/somewhere/source"))
    assert missing.value.filename == "/somewhere/source"
    with pytest.raises(KeyboardInterrupt):
        half(KeyboardInterrupt())
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_followed_and_a_file_keeps_its_mode(tmp_path):
    (tmp_path / "far").mkdir()
    real, link, hard = tmp_path / "far" / "real", tmp_path / "link", tmp_path / "hard"
    real.write_text("old")
    real.chmod(0o600)
    hard.hardlink_to(real)
    link.symlink_to(Path("far") / "real")
    replace_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert hard.read_text() == "old"
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "later" / "real")
    replace_text(dangling, "new")
    assert (tmp_path / "later" / "real").read_text() == "new"


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_mode_of_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        replace_text(tmp_path / "a", "text")
        write_new(tmp_path / "b", "text")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}


@as_root
def test_a_file_keeps_its_owner(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    os.chown(path, 1234, 5678)
    replace_text(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 5678)
    assert path.read_text() == "new"


@as_root
def test_a_device_stays_one_and_a_disk_is_refused(tmp_path):
    null, full, disk = tmp_path / "null", tmp_path / "full", tmp_path / "disk"
    try:
        os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(full, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        os.mknod(disk, stat.S_IFBLK | 0o666, os.makedev(7, 250))
    except PermissionError:
        pytest.skip("devices cannot be made here")
    (tmp_path / "link").symlink_to(null)
    replace_files({null: b"text", tmp_path / "link": b"text"})
    assert null.is_char_device()
    with pytest.raises(OSError, match="No space left") as caught:
        replace_text(full, "text")
    assert caught.value.filename == str(full)
    with pytest.raises(ValueError, match="block device"):
        replace_text(disk, "text")


def test_a_pipe_and_open_descriptors_are_written_into(tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_text(tmp_path / "pipe", "to the pipe")
    assert os.read(reader, 100) == b"to the pipe"
    os.close(reader)
    with (tmp_path / "file").open("w") as file:
        file.write("before, ")
        file.flush()
        replace_text(Path(f"/dev/fd/{file.fileno()}"), "result, ")
        # So is what a writer of its own makes.
        replace_files({Path(f"/dev/fd/{file.fileno()}"): lambda path: path.write_text("its own, ")})
        file.write("after")
    assert (tmp_path / "file").read_text() == "before, result, its own, after"
    print("before, ", end="")
    replace_text(Path("/dev/stdout"), "result")
    assert capfd.readouterr().out == "before, result"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


def test_what_a_write_would_refuse_is_refused_before_the_work(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("old")
    refused = {
        tmp_path: errno.EISDIR,
        tmp_path / "loop": errno.ELOOP,
        tmp_path / "file" / "below": errno.EEXIST,
        Path("/dev/fd/789"): errno.EBADF,
    }
    for path, code in refused.items():
        for write in (lambda place: replace_text(place, "new"), require_place):
            with pytest.raises(OSError) as caught:  # noqa: PT011 - by its code
                write(path)
            assert (caught.value.errno, caught.value.filename) == (code, str(path))
    require_place(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]
    assert place_of(tmp_path / "file") == Path(os.path.realpath(tmp_path)) / "file"


@pytest.mark.parametrize("fault", [errno.EBUSY, errno.EPERM])
def test_a_file_that_takes_no_rename_is_written_into(tmp_path, monkeypatch, fault):
    path = tmp_path / "mounted"
    path.write_text("a longer text than the new one")
    number, rename = path.stat().st_ino, os.replace

    def refuse(old, new):
        if Path(new) == path:
            raise OSError(fault, os.strerror(fault))
        rename(old, new)

    monkeypatch.setattr(os, "replace", refuse)
    replace_text(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_ino == number
    assert list(tmp_path.iterdir()) == [path]
