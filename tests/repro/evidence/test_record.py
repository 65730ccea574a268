"""Records: whole or absent, never overwritten, and read with errors that name file and field."""

import dataclasses
import json
import math
import os
import subprocess
from datetime import datetime, timedelta
from unittest.mock import Mock

import pytest

from repro.evidence import environment, provenance
from repro.evidence.environment import capture_environment, device_of, steady_now
from repro.evidence.record import (
    Estimate,
    Measured,
    RecordError,
    failed_record,
    find_record,
    read_record,
    record_of,
    record_path,
)
from repro.spec.config import digest_of
from tests.repro.made_up import resealed


def test_a_record_read_back_is_the_one_written(run, made_up_record, tmp_path):
    written = made_up_record(run)
    path = written.write(tmp_path)
    assert path == record_path(run, tmp_path)
    assert find_record(run, tmp_path) == path
    with pytest.raises(FileExistsError, match="never overwritten"):
        dataclasses.replace(written, series={}).write(tmp_path)
    assert read_record(path) == written
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_a_write_that_dies_leaves_nothing_behind(run, made_up_record, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        made_up_record(run).write(tmp_path)
    assert not list(tmp_path.rglob("seed-*"))


def test_a_failure_stays_counted_and_leaves_room_for_another_try(run, made_up_record, tmp_path):
    first = failed_record(run, "MemoryError: out of memory\ntrace", {}).write(tmp_path)
    second = failed_record(run, "again", {}).write(tmp_path)
    assert [first.name, second.name] == ["seed-0.failed-1.json", "seed-0.failed-2.json"]
    assert find_record(run, tmp_path) is None
    made_up_record(run).write(tmp_path)
    assert find_record(run, tmp_path) is not None
    assert read_record(first).outcome["reason"].startswith("MemoryError")


def test_a_clock_that_is_set_back_leaves_a_record_that_can_be_read(run, tmp_path, monkeypatch):
    started = steady_now()

    class SetBack(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2001, 1, 1, tzinfo=tz)

    monkeypatch.setattr(environment, "datetime", SetBack)
    monkeypatch.setattr("time.time", lambda: 0.0)
    for place, begun in enumerate((started, started + timedelta(hours=1))):
        record = record_of(run, Measured(), environment={}, started=begun)
        record = dataclasses.replace(record, outcome={"status": "failed", "reason": "none"})
        read = read_record(record.write(tmp_path / str(place)))
        assert read.started <= read.finished


def test_a_record_that_could_not_be_read_is_not_written(run, made_up_record, tmp_path):
    record = made_up_record(run)
    for change in ({"config": record.config | {"seed": math.inf}}, {"started": "2999-01-01"}):
        with pytest.raises(RecordError):
            dataclasses.replace(record, **change).write(tmp_path)
    assert not list(tmp_path.rglob("seed-*"))


def test_another_configuration_is_named_by_its_difference(run, made_up_record, tmp_path):
    other = dataclasses.replace(run, scale=dataclasses.replace(run.scale, steps=29))
    made_up_record(other).write(tmp_path)
    with pytest.raises(RecordError, match=r"scale\.steps is 29, needed 30"):
        find_record(run, tmp_path)
    more = dataclasses.replace(other, scale=dataclasses.replace(other.scale, seeds=(0, 9)))
    assert find_record(more, tmp_path) is not None


@pytest.mark.parametrize(
    ("sealed", "values", "words"),
    [
        (False, {"metrics": None}, "['metrics']"),
        (False, {"extra": 1}, "['extra']"),
        (False, {"schema": 1}, "schema is 1"),
        (False, {"seed": 7}, "seal"),
        *(
            (True, {name: value}, f"{name} is ")
            for name, value in (
                ("commit", "--output=precious.txt"),
                ("commit", "a\0b"),
                ("commit", "\x1b[31m<script>"),
                ("commit", 7),
                ("schema", "2"),
                ("dirty", "no"),
                ("environment", []),
                ("started", 7),
                ("started", "2999-01-01T00:00:00+00:00"),
                ("started", "2026-11-21T07:12:30"),
                ("inputs", {"checkpoint": 7}),
                ("series", {"reward": "x"}),
                ("facts", "none"),
                ("outcome", "ok"),
                ("metrics", {"accuracy": 7}),
                ("metrics", {"accuracy": {"value": "1", "unit": "percent"}}),
                ("sources", [7]),
            )
        ),
    ],
)
def test_an_edited_record_is_refused(sealed, values, words, run, made_up_record, tmp_path):
    path = made_up_record(run).write(tmp_path)
    if sealed:
        resealed(path, lambda raw: raw.update(values))
    else:
        raw = json.loads(path.read_text()) | values
        raw = {name: value for name, value in raw.items() if value is not None}
        path.write_text(json.dumps(raw))
    with pytest.raises(RecordError) as caught:
        read_record(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"[NaN]", b"[1" + b"0" * 400 + b"]", b"[1e308]"],
)
def test_what_is_no_record_is_refused_with_its_file(content, tmp_path):
    path = tmp_path / "seed-0.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=f"{path}: not a readable record"):
        read_record(path)


def test_a_record_of_which_no_metrics_follow_is_refused(run, made_up_record, tmp_path):
    empty = {"config": {}, "digest": digest_of({})}
    path = resealed(made_up_record(run).write(tmp_path), lambda raw: raw.update(empty))
    with pytest.raises(RecordError, match=f"{path}: no metrics"):
        read_record(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_keeps_nobody_waiting(make, tmp_path):
    make(tmp_path / "seed-0.json")
    with pytest.raises(RecordError, match="not a plain file"):
        read_record(tmp_path / "seed-0.json")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_become_null(value, run, made_up_record, tmp_path):
    record = made_up_record(run)
    metrics = {**record.metrics, "peak_bytes": Estimate(value=value, unit="bytes")}
    series = {**record.series, "loss": [1.0, value, 2.0]}
    path = dataclasses.replace(record, metrics=metrics, series=series).write(tmp_path)
    read = read_record(path)
    assert read.value("peak_bytes") is None
    assert read.series["loss"] == [1.0, None, 2.0]
    assert read.value("train_loss_mean") == 1.5
    assert read.value("loss") is read.value("loss_mean") is read.value("train_loss") is None


def test_the_environment_is_captured_and_failed_probes_say_so(monkeypatch):
    monkeypatch.setenv("PATH", "")  # no driver
    monkeypatch.setattr("platform.platform", Mock(side_effect=RuntimeError("planted")))
    captured = capture_environment()
    assert captured["platform"] == {"failed": "RuntimeError: planted"}
    assert captured["packages"]["qerl-repro"] is None or captured["packages"]["qerl-repro"]
    assert (captured["cpu"]["cores"] >= 1, captured["gpu"]) == (True, [])
    json.dumps(captured)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("1", ["1"]), ("0,1", ["0", "1"]), (None, ["0", "1"]), ("MIG-7", ["0", "1"])],
)
def test_a_record_has_the_devices_that_its_process_may_use(monkeypatch, tmp_path, visible, indices):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'chosen="0 1"\n'
        'if [ "$1" = -i ]; then chosen="$(echo "$2" | tr , " ")"; fi\n'
        "for i in $chosen; do case $i in [01]) ;; *) exit 6 ;; esac; done\n"
        'for i in $chosen; do echo "$i, NVIDIA H200, 580.95, 143771 MiB, 9.0, 700.00 W"; done\n',
        encoding="utf-8",
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = capture_environment()["gpu"]
    assert [gpu["index"] for gpu in gpus] == indices
    assert device_of({"gpu": gpus}) == "nvidia_h200"


def test_a_device_is_named_as_folders_spell_it():
    environment = {"gpu": [{"name": "NVIDIA H200"}], "variables": {}}
    assert device_of(environment) == "nvidia_h200"
    # One that runs the kernels of other cards has a name of its own.
    environment["variables"]["REPRO_KERNELS"] = "portable"
    assert device_of(environment) == "nvidia_h200_portable"
    assert device_of({"gpu": []}) is None
    assert device_of({"gpu": {"failed": "x"}}) is None


def test_the_source_is_known_by_its_commit_and_by_the_digest_of_its_files(monkeypatch, tmp_path):
    def ask():
        return provenance.source_commit.__wrapped__()

    monkeypatch.setenv("REPRO_COMMIT", "abc")
    assert ask() == ("abc", None)
    monkeypatch.delenv("REPRO_COMMIT")
    package, digest = tmp_path / "repro", provenance.source_digest.__wrapped__
    monkeypatch.setattr(provenance, "PACKAGE", package)
    (package / "expected").mkdir(parents=True)  # as a wheel has it
    assert ask() == ("unknown", None)
    (package / "old.py").write_text("A = 1")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "b.cu").write_text("// b")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for line in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *line], check=True)
    commit, dirty = ask()
    assert (len(commit), dirty) == (40, False)
    (package / "notes.txt").write_text("not code")
    (package / "expected" / "value.json").write_text("{}")
    assert ask() == (commit, True)
    assert digest() == provenance.digest_of_commit(commit)
    (package / "old.py").write_text("A = 2")
    assert digest() not in map(provenance.digest_of_commit, (commit, commit[:7]))
    assert provenance.digest_of_commit("0" * 40) is None
