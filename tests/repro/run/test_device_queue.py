"""The queue over devices, on a CPU: fake devices, fake runs, workers that die."""

import dataclasses
import io
import json
import os

import pytest
from rich.console import Console

from repro.evidence.record import read_record
from repro.run.execute import execute
from repro.run.several_ranks.room import Room, visible_devices
from repro.run.worker import tasks_of
from repro.spec.target import plan
from repro.spec.tier import Tier
from tests.planted import planted
from tests.repro.planned import STUDY

# Carries out runs by writing records at once; dies or fails where files in the folder say so.
FAKE = """
import json, os, sys
from datetime import UTC, datetime
from types import SimpleNamespace
from repro.evidence.record import Measured, failed_record, find_record, record_of

def lost():
    raise RuntimeError("an illegal memory access was encountered")

def lose():
    # What a worker asks of torch, without its import.
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=lost)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)
    lost()

def carry_out(runs, records, context):
    now = datetime.now(UTC)
    with (records / "calls.jsonl").open("a") as file:
        device = os.environ["CUDA_VISIBLE_DEVICES"]
        file.write(json.dumps([device, [r.digest() for r in runs]]) + "\\n")
    with (records / "workers").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    for run in runs:
        if find_record(run, records) is not None:
            continue
        name = f"{run.arm.name}-{run.seed}"
        deaths = records / f"die-{name}"
        (context.folder / "checkpoint" / "step-000001").mkdir(parents=True, exist_ok=True)
        if deaths.exists() and int(deaths.read_text()):
            deaths.write_text(str(int(deaths.read_text()) - 1))
            if deaths.read_text() != "0":
                os.kill(os.getpid(), 9)
            os._exit(9)
        if (records / f"lose-{name}").exists():
            lose()
        if (records / f"fail-{name}").exists():
            failed_record(run, "the gradient norm is nan", {}, now).write(records)
            continue
        record_of(run, Measured(), environment={}, started=now).write(records)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return planted("fake_runs", FAKE, tmp_path, monkeypatch)


def runs_of(seeds=2):
    return plan(STUDY, Tier.MINI, range(seeds), ["bf16", "bf16_lora", "nvfp4_lora"])


def go(runs, folder, fake, devices, said=None):
    return execute(
        runs,
        folder,
        room=Room(workers=devices, devices=tuple(str(number) for number in range(devices))),
        console=Console(file=said or open(os.devnull, "w"), width=200),
        carry_out=fake.carry_out,
    )


def failed_of(folder):
    paths = sorted((folder / "mini" / "study").glob("*/seed-*failed*.json"))
    (record,) = map(read_record, paths)
    return record


def calls(folder):
    return [tuple(json.loads(line)) for line in (folder / "calls.jsonl").read_text().splitlines()]


def test_every_run_is_carried_out_once_on_one_of_the_devices(tmp_path, fake):
    runs, said = runs_of(), io.StringIO()
    outcome = go(runs, tmp_path, fake, devices=2, said=said)
    # A worker that the machine killed (for memory, say) is named in what was said or in the log.
    text = said.getvalue() + (tmp_path / "workers.log").read_text()
    assert (outcome.finished, outcome.failed, outcome.left) == (6, 0, 0), text
    assert {device for device, _ in calls(tmp_path)} <= {"0", "1"}
    carried = [digest for _, digests in calls(tmp_path) for digest in digests]
    assert sorted(carried) == sorted(run.digest() for run in runs), text
    again = go(runs, tmp_path, fake, devices=2)
    assert (again.before, again.finished) == (6, 0)
    assert len(calls(tmp_path)) == 6


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_dying_worker_gives_its_run_back_once(tmp_path, fake, deaths):
    (tmp_path / "die-bf16_lora-0").write_text(str(deaths), encoding="utf-8")
    said = io.StringIO()
    outcome = go(runs_of(), tmp_path, fake, devices=deaths, said=said)
    assert (outcome.finished, outcome.failed, outcome.left) == (7 - deaths, deaths - 1, 0)
    assert len(calls(tmp_path)) == 7
    if deaths == 2:
        failed = failed_of(tmp_path)
        assert failed.arm == "bf16_lora"
        assert "exit code 9" in failed.outcome["reason"]
        assert "ended by SIGKILL" in said.getvalue()


@pytest.mark.parametrize(("cause", "workers"), [("lose", 2), ("fail", 1)])
def test_a_worker_that_lost_its_device_ends_with_that_run(tmp_path, fake, cause, workers):
    runs = runs_of()
    (tmp_path / f"{cause}-bf16-1").touch()
    outcome = go(runs, tmp_path, fake, devices=1)
    assert (outcome.finished, outcome.failed, outcome.left) == (5, 1, 0)
    assert len(set((tmp_path / "workers").read_text().split())) == workers
    failed = failed_of(tmp_path)
    said = "illegal memory access" if cause == "lose" else "the gradient norm is nan"
    assert said in failed.outcome["reason"]


def test_the_longest_by_steps_times_rows_comes_first(tmp_path):
    (few,) = plan(STUDY, Tier.MINI, 1, ["bf16_lora"])
    (untrained,) = plan(STUDY, Tier.MINI, 1, ["bf16"])
    scale = few.scale
    steps = dataclasses.replace(few, scale=dataclasses.replace(scale, steps=scale.steps + 1))
    rows = dataclasses.replace(few, scale=dataclasses.replace(scale, group_size=17))
    tasks = tasks_of([untrained, few, steps, rows], tmp_path)
    assert [task.every for task in tasks] == [(rows,), (steps,), (few,), (untrained,)]


def test_devices_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    assert visible_devices(None) == ("2", "5", "7")
    assert visible_devices("2") == ("2", "5")
    assert visible_devices("5,7") == ("5", "7")
    for wrong in ("4", "0,5", "all", "0", ","):
        with pytest.raises(ValueError, match="--devices"):
            visible_devices(wrong)
