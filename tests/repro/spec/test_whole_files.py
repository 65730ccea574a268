"""Files and folders are whole or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from repro.spec.whole_files import appearing, replace_files, replace_text, write_new


def test_a_file_system_without_hard_links_still_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    path = write_new(tmp_path / "a.json", "first")
    with pytest.raises(FileExistsError):
        write_new(path, "second")
    assert path.read_text() == "first"


def test_of_several_files_that_cannot_be_written_none_is_half_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, calls = os.fsync, []

    def second_fails(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(OSError, match="No space left"):
        replace_files({tmp_path / "a": b"1", tmp_path / "b": b"2"})
    assert list(tmp_path.iterdir()) == []


def test_folders_on_the_way_are_made_and_what_is_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "a.txt"
    replace_text(path, "first")
    replace_text(path, "second")
    assert [item.read_text() for item in path.parent.iterdir()] == ["second"]


def test_a_folder_appears_when_it_is_complete_and_never_over_another(tmp_path: Path) -> None:
    out = tmp_path / "not" / "yet"
    with appearing(out) as folder:
        folder.mkdir()
        (folder / "a").write_text("first")
        assert not out.exists()
    assert (out / "a").read_text() == "first"
    with pytest.raises(FileExistsError, match="never written over another"), appearing(out):
        pytest.fail("the block was entered")
    assert list(out.parent.iterdir()) == [out]


def test_of_a_folder_that_was_not_finished_nothing_is_left(tmp_path: Path) -> None:
    def killed(folder: Path) -> None:
        with appearing(folder) as half:
            half.mkdir()
            (half / "a").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
