"""The queue over devices, on a CPU: fake devices, fake runs, workers that die."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from repro.device_queue import ensemble_tasks, fitting_memory, spread, visible_devices
from repro.evidence.record import find_record, iterate_records, read_record
from repro.run import Outcome, execute
from repro.spec.config import RunConfig
from repro.spec.target import plan
from repro.spec.tier import CudaDevice, Tier
from repro.targets import find

# Carries out runs by writing records at once; dies or fails where files in the folder say so.
FAKE = """
import json, os
import torch
from datetime import UTC, datetime
from pathlib import Path
from repro.evidence.record import failed_record, find_record, record_of

def lost():
    raise RuntimeError("an illegal memory access was encountered")

def carry_out(runs, folder, records, progress, should_stop, threads):
    now = datetime.now(UTC)
    started = records / "calls.jsonl"
    with started.open("a") as file:
        file.write(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], [r.digest() for r in runs]]))
        file.write("\\n")
    with (records / "workers").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    for run in runs:
        if find_record(run, records) is not None:
            continue
        name = f"{run.arm.name}-{run.seed}"
        deaths = records / f"die-{name}"
        if deaths.exists() and int(deaths.read_text()):
            deaths.write_text(str(int(deaths.read_text()) - 1))
            os._exit(9)
        if (records / f"lose-{name}").exists():
            torch.cuda.is_initialized = lambda: True
            torch.cuda.synchronize = lost
            raise RuntimeError("an illegal memory access was encountered")
        if (records / f"fail-{name}").exists():
            failed_record(run, "the gradient norm is nan", {}, now).write(records)
            continue
        record_of(run, metrics={}, environment={}, started=now).write(records)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "fake_ensembles.py").write_text(FAKE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("fake_ensembles", None)
    import fake_ensembles  # type: ignore[import-not-found]

    found: Callable[..., Any] = fake_ensembles.carry_out
    return found


def runs_of(seeds: int = 2) -> list[RunConfig]:
    return plan(find("table1"), Tier.PROXY, seeds, ["bf16", "bf16_lora", "nvfp4_lora"])


def in_pairs(runs: Sequence[RunConfig], memory_bytes: int) -> list[tuple[RunConfig, ...]]:
    assert memory_bytes == 100
    return [tuple(runs[place : place + 2]) for place in range(0, len(runs), 2)]


def go(runs: Sequence[RunConfig], folder: Path, fake: Callable[..., Any], devices: int) -> Outcome:
    return execute(
        runs,
        folder,
        workers=devices,
        threads=1,
        console=Console(file=open(os.devnull, "w")),
        devices=tuple(str(number) for number in range(devices)),
        memory_bytes=100,
        grouping=in_pairs,
        carry_out=fake,
    )


def calls(folder: Path) -> list[tuple[str, list[str]]]:
    return [tuple(json.loads(line)) for line in (folder / "calls.jsonl").read_text().splitlines()]


def test_every_run_is_carried_out_once_on_one_of_the_devices(
    tmp_path: Path, fake: Callable[..., Any]
) -> None:
    runs, folder = runs_of(), tmp_path / "runs"
    folder.mkdir()
    outcome = go(runs, folder, fake, devices=2)
    assert (outcome.finished, outcome.failed, outcome.left) == (6, 0, 0)
    assert {device for device, _ in calls(folder)} <= {"0", "1"}
    carried = [digest for _, digests in calls(folder) for digest in digests]
    assert sorted(carried) == sorted(run.digest() for run in runs)
    again = go(runs, folder, fake, devices=2)
    assert (again.before, again.finished) == (6, 0)
    assert len(calls(folder)) == 3


def test_a_dying_worker_gives_its_runs_back_once(tmp_path: Path, fake: Callable[..., Any]) -> None:
    runs, folder = runs_of(), tmp_path / "runs"
    folder.mkdir()
    # Dies in the second run of its pair; the first is recorded and not done again.
    (folder / "die-bf16_lora-0").write_text("1", encoding="utf-8")
    outcome = go(runs, folder, fake, devices=1)
    assert (outcome.finished, outcome.failed, outcome.left) == (6, 0, 0)
    assert len(calls(folder)) == 4
    assert all(find_record(run, folder) for run in runs)


def test_runs_that_kill_their_worker_twice_are_recorded_as_failed(
    tmp_path: Path, fake: Callable[..., Any]
) -> None:
    runs, folder = runs_of(), tmp_path / "runs"
    folder.mkdir()
    (folder / "die-bf16_lora-0").write_text("2", encoding="utf-8")
    outcome = go(runs, folder, fake, devices=2)
    assert (outcome.finished, outcome.failed) == (5, 1)
    (failed,) = [
        read_record(path)
        for path in iterate_records(folder, "proxy", "table1")
        if "failed" in path.name
    ]
    assert failed.arm == "bf16_lora"
    assert "exit code 9" in failed.outcome["reason"]


@pytest.mark.parametrize(("cause", "workers"), [("lose", 2), ("fail", 1)])
def test_a_worker_that_lost_its_device_ends_with_that_run(
    tmp_path: Path, fake: Callable[..., Any], cause: str, workers: int
) -> None:
    runs, folder = runs_of(), tmp_path / "runs"
    folder.mkdir()
    (folder / f"{cause}-bf16-1").touch()  # in the second pair of three
    outcome = go(runs, folder, fake, devices=1)
    assert (outcome.finished, outcome.failed, outcome.left) == (5, 1, 0)
    assert len(set((folder / "workers").read_text().split())) == workers
    (failed,) = [
        read_record(path)
        for path in iterate_records(folder, "proxy", "table1")
        if "failed" in path.name
    ]
    said = "illegal memory access" if cause == "lose" else "the gradient norm is nan"
    assert said in failed.outcome["reason"]


def test_a_run_that_fails_leaves_the_rest_of_its_ensemble(
    tmp_path: Path, fake: Callable[..., Any]
) -> None:
    runs, folder = runs_of(1), tmp_path / "runs"
    folder.mkdir()
    (folder / "fail-bf16-0").touch()
    outcome = go(runs, folder, fake, devices=1)
    assert (outcome.finished, outcome.failed, outcome.left) == (2, 1, 0)


def test_ensembles_are_halved_until_every_device_has_one(tmp_path: Path) -> None:
    runs = runs_of(4)
    whole = [tuple(runs)]
    assert [len(group) for group in spread(whole, 1)] == [12]
    assert [len(group) for group in spread(whole, 4)] == [3, 3, 3, 3]
    assert sum(len(group) for group in spread(whole, 64)) == 12
    assert spread([], 4) == []
    tasks = ensemble_tasks(
        runs, tmp_path, devices=3, memory_bytes=1, grouping=lambda found, _: [tuple(found)]
    )
    assert sorted(len(task.every) for task in tasks) == [3, 3, 6]
    assert len({task.folder for task in tasks}) == 3


def test_devices_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    assert visible_devices(None) == ("2", "5", "7")
    assert visible_devices("2") == ("2", "5")
    assert visible_devices("5,7") == ("5", "7")
    for wrong in ("4", "0,5", "all"):
        with pytest.raises(ValueError, match="--devices"):
            visible_devices(wrong)


def test_an_ensemble_fills_no_more_than_the_smallest_device_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = (80, 24)
    devices = [CudaDevice(name="d", capability=(9, 0), memory_bytes=size) for size in sizes]
    monkeypatch.setattr("repro.device_queue.cuda_devices", lambda: tuple(devices))
    assert fitting_memory(100) == 24
    assert fitting_memory(10) == 10
    monkeypatch.setattr("repro.device_queue.cuda_devices", lambda: ())
    assert fitting_memory(100) == 100
