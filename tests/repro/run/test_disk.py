"""Disks that cannot be used: a sentence and exit status 2, nothing failed or half-written."""

import errno
import io
import os
import tempfile
from unittest.mock import Mock

import pytest
from rich.console import Console

from repro.__main__ import main
from repro.run import plan as planning
from repro.run.disk import DiskError, free_bytes, is_disk_fault, sentence_of
from repro.run.execute import execute
from repro.run.preflight import disk_bytes
from repro.run.several_ranks.room import Room
from repro.spec.shapes import SHAPES
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.run.test_execute import at_once
from tests.repro.run.test_shared_work import runs_of
from tests.said import unsaid

RUN = ("run", "table1", "--tier", "smoke", "--seeds", "1", "--arms", "nvfp4_lora", "--steps", "2")


@pytest.mark.parametrize("below", ["", "deeper", "much/deeper"])
@pytest.mark.parametrize("command", ["run", "environment"])
def test_a_file_where_the_folder_of_records_should_be_is_named(tmp_path, capsys, below, command):
    file = tmp_path / "runs"
    file.write_text("not a folder")
    line = [*RUN, "--runs", str(file / below)]
    if command == "environment":
        line = ["environment", "--out", str(file / below / "environment.json")]
    assert main(line) == 2
    assert unsaid(capsys.readouterr().err, f"{file} is no folder") == []
    assert file.read_text() == "not a folder"


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_disk_that_takes_nothing_is_told_first(tmp_path, monkeypatch, capsys, code):
    refused = OSError(code, os.strerror(code))
    monkeypatch.setattr(tempfile, "TemporaryFile", Mock(side_effect=refused))
    folder = tmp_path / "runs"
    assert main([*RUN, "--runs", str(folder)]) == 2
    assert unsaid(capsys.readouterr().err, f"{folder} |{os.strerror(code)}") == []
    assert list(folder.iterdir()) == []


def filling(runs, records, context):
    """Record runs at once, on a disk that is full at one of them."""
    if runs[0].arm.name == "mxfp4":
        raise OSError(errno.ENOSPC, "No space left on device", str(records / "somewhere"))
    return at_once(runs, records, context)


def test_a_disk_that_fills_up_ends_the_start_and_fails_no_run(tmp_path):
    folder, said = tmp_path / "runs", io.StringIO()
    sentence = f"{folder}/somewhere cannot be used: No space left on device; 2 runs are left"
    console = Console(file=said, width=200)
    with pytest.raises(DiskError, match=sentence):
        execute(runs_of(), folder, room=Room(), console=console, carry_out=filling)
    assert "no disk" in said.getvalue()
    assert len(list(folder.rglob("seed-0.json"))) == 2
    assert not list(folder.rglob("*.failed-*"))
    assert not list(folder.rglob("*.lock"))


def test_the_plan_compares_what_it_needs_with_what_is_free(tmp_path, monkeypatch, capsys):
    line = ["plan", "table1", "--tier", "smoke", "--runs", str(tmp_path / "not" / "yet")]
    assert main(line) == 0
    printed = capsys.readouterr().out
    free = free_bytes(tmp_path / "not" / "yet")
    assert free > 0
    assert f" of {planning.size(free)[:2]}" in printed
    assert "does not fit" not in printed
    monkeypatch.setattr(planning, "free_bytes", lambda folder: 1_000_000)
    assert main(line) == 0
    printed = capsys.readouterr().out
    smoke = find("table1")
    needed = planning.size(disk_bytes(plan(smoke, Tier.SMOKE), smoke.needs_at(Tier.SMOKE), 1))
    assert f"{needed} of 1 MB free" in printed
    assert "does not fit" in printed
    monkeypatch.setattr(planning, "free_bytes", lambda folder: None)
    assert main(line) == 0
    assert f"  disk      {needed}\n" in capsys.readouterr().out


def test_runs_that_do_not_fit_their_disk_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("repro.run.preflight.free_bytes", lambda folder: 10_000_000)
    line = ["run", "table1", "--tier", "smoke", "--seeds", "1", "--runs", str(tmp_path / "runs")]
    assert main([*line, "--arms", "bf16_full"]) == 2
    said = capsys.readouterr().err
    assert "10 MB" in said
    assert not (tmp_path / "runs").exists()


def test_the_disk_of_runs_is_what_each_leaves_and_what_those_at_work_take():
    table1 = find("table1")
    runs = plan(table1, Tier.PAPER, 1, ["bf16", "bf16_lora", "nvfp4_lora"])
    needs = table1.needs_at(Tier.PAPER)
    trained = SHAPES["7b"].adapter_parameters(table1.arm("bf16_lora").lora_rank)
    one, two = (disk_bytes(runs, needs, workers) for workers in (1, 2))
    assert two - one == 36 * trained
    assert one == pytest.approx((36 + 2 * 4) * trained, rel=0.01)


def test_an_error_is_of_the_disk_by_its_kind_or_by_its_path(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    gone = FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / "a" / "b"))
    other = FileNotFoundError(errno.ENOENT, "No such file", "/somewhere/else")
    assert is_disk_fault(full, tmp_path)
    assert is_disk_fault(gone, tmp_path)
    assert not is_disk_fault(other, tmp_path)
    assert not is_disk_fault(FileExistsError("seed-0.json exists"), tmp_path)
    assert not is_disk_fault(ConnectionError("no answer"), tmp_path)
    assert unsaid(sentence_of(full, tmp_path), f"{tmp_path} |No space left") == []
    assert unsaid(sentence_of(gone, None), f"{tmp_path}/a/b |No such file") == []
    assert sentence_of(ConnectionError("no answer")) == "no answer"
    assert sentence_of(TimeoutError()) == "TimeoutError"
