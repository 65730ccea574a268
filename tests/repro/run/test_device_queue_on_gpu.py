"""The queue on real devices: a killed worker, and an error that spoils a context."""

import dataclasses
import io
import multiprocessing
import os
import signal

import pytest
import torch
from rich.console import Console

from repro.evidence.record import find_record, read_record
from repro.run.execute import execute
from repro.run.several_ranks.room import Room
from repro.run.worker import Task
from repro.run.workers import WorkerPool
from repro.spec.tier import Tier
from tests.planted import planted
from tests.repro.procedures.conftest import SCALE
from tests.repro.small_runs import small_run

DEVICES = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device; found none"),
]
# Adds numbers up on the device; the first run's first attempt reads beside a tensor on it, which
# spoils the context of its process.
SPOILING = """
import os
from datetime import UTC, datetime
import torch
from repro.evidence.record import record_of

def carry_out(runs, folder, records, progress, should_stop, threads):
    spoilt = records / "spoilt"
    if runs[0].seed == 0 and not spoilt.exists():
        spoilt.write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")].sum().item()
    assert torch.ones(8, device="cuda").sum().item() == 8
    for run in runs:
        record_of(run, metrics={}, environment={}, started=datetime.now(UTC)).write(records)
"""


@pytest.fixture
def spoiling(tmp_path, monkeypatch):
    return planted("spoiling", SPOILING, tmp_path, monkeypatch)


def runs_of(seeds, steps=3):
    """Return small runs of a tier that trains on a device."""
    scale = dataclasses.replace(SCALE, steps=steps)
    runs = [small_run(scale, seed=seed) for seed in range(seeds)]
    return [dataclasses.replace(run, tier=Tier.MINI.value) for run in runs]


@pytest.mark.skipif(DEVICES < 2, reason=f"needs two CUDA devices; found {DEVICES}")
def test_a_worker_killed_in_training_costs_nothing_but_time(tmp_path):
    runs = runs_of(6, steps=40)
    tasks = [
        Task(run=run, folder=tmp_path / f"work-{place}", runs=tmp_path)
        for place, run in enumerate(runs)
    ]
    events, killed = [], False
    pool = WorkerPool(
        2,
        tmp_path / "workers.log",
        threads=2,
        devices=("0", "1"),
        retries=1,
    )
    with pool:
        for event in pool.execute(tasks):
            events.append(event)
            if event.text == "training" and not killed:
                children = multiprocessing.active_children()
                assert len(children) == 2  # each device has its worker
                assert children[0].pid is not None
                os.kill(children[0].pid, signal.SIGKILL)
                killed = True
    returned = [event for event in events if event.kind == "returned"]
    assert len(returned) == 1
    assert "SIGKILL" in returned[0].text
    assert len([event for event in events if event.kind == "finished"]) == len(runs)
    records = [read_record(find_record(run, tmp_path) or tmp_path) for run in runs]
    assert all(record.ok for record in records)
    used = [record.environment["gpu"] for record in records]
    assert {gpu[0]["index"] for gpu in used} == {"0", "1"}
    assert all(len(gpu) == 1 for gpu in used)


def go(runs, folder, devices, **how):
    """Carry out all runs, one a task, and return what was said."""
    said, room = io.StringIO(), Room(workers=len(devices), devices=devices)
    outcome = execute(runs, folder, room=room, console=Console(file=said, width=200), **how)
    assert (outcome.finished, outcome.failed, outcome.left) == (len(runs), 0, 0), said.getvalue()
    return said.getvalue()


def test_an_error_that_spoils_a_context_is_survived(tmp_path, spoiling):
    runs, folder = runs_of(4), tmp_path / "runs"
    folder.mkdir()
    text = go(runs, folder, ("0",), carry_out=spoiling.carry_out)
    assert (folder / "spoilt").read_text(encoding="utf-8") == "0"
    assert "again" in text
    assert "CUDA error" in text
