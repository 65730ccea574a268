"""Measurements in worker processes: nothing of one is left for the next."""

import dataclasses
import io
import json
import os

import pytest
from rich.console import Console

from repro.evidence.record import find_record, read_record
from repro.run.execute import execute
from repro.run.several_ranks.room import Room
from repro.run.worker import Task
from repro.run.workers import WorkerPool
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.rollout_speed import ROLLOUT
from tests.planted import planted

# Stands for a device whose memory a process keeps: the rate is what the process's leavings let it
# be, so an arm that follows another in its process measures less than it does alone.
FAKE = """
import json, os
from datetime import UTC, datetime
from repro.evidence.procedure import Stopped
from repro.evidence.record import Estimate, Measured, record_of

LEFT = []

def carry_out(runs, records, context):
    arm = runs[0].arm.name
    with (records / "calls.jsonl").open("a") as file:
        file.write(json.dumps([os.getpid(), arm]) + "\\n")
    rate = 11073.0 / (1 + len(LEFT))
    LEFT.append(arm)
    if (records / f"exhausts-{arm}").exists():
        import torch
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    stops = records / f"stops-{arm}"
    if stops.exists():
        stops.unlink()
        raise Stopped
    for run in runs:
        metrics = {"tokens_per_second_7b_64": Estimate(value=rate, unit="tokens per second")}
        measured = Measured(metrics=metrics)
        record_of(run, measured, environment={}, started=datetime.now(UTC)).write(records)
"""
FIRST, SECOND = (arm.name for arm in ROLLOUT.arms)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return planted("fake_measurements", FAKE, tmp_path, monkeypatch)


def go(runs, fake, arms=None, *, target=ROLLOUT, printed=None):
    return execute(
        plan(target, Tier.SYSTEMS, 2, arms),
        runs,
        room=Room(),
        console=Console(file=printed or open(os.devnull, "w"), width=200),
        carry_out=fake.carry_out,
    )


def planned(arms=None):
    return plan(ROLLOUT, Tier.SYSTEMS, 2, arms)


def calls(runs):
    return [json.loads(line) for line in (runs / "calls.jsonl").read_text().splitlines()]


def rates(runs, arm):
    return [
        read_record(find_record(run, runs) or runs).value("tokens_per_second_7b_64")
        for run in planned([arm])
    ]


def test_an_arm_after_one_without_memory_measures_the_same(tmp_path, fake):
    runs, alone = tmp_path / "runs", tmp_path / "alone"
    runs.mkdir()
    alone.mkdir()
    go(alone, fake, [SECOND])
    (runs / f"exhausts-{FIRST}").touch()
    outcome = go(runs, fake)
    assert (outcome.finished, outcome.failed, outcome.left) == (2, 2, 0)
    assert rates(runs, SECOND) == rates(alone, SECOND) == [11073.0, 11073.0]
    (first, _), (second, _) = calls(runs)
    assert first != second
    paths = sorted((runs / "systems" / "rollout").glob("*/seed-*.json"))
    failed = [read_record(path) for path in paths if "failed" in path.name]
    assert {record.arm for record in failed} == {FIRST}
    assert "OutOfMemoryError" in failed[0].outcome["reason"]


def test_a_stopped_table_keeps_its_recorded_arm(tmp_path, fake):
    (tmp_path / f"stops-{SECOND}").touch()
    printed = io.StringIO()
    outcome = go(tmp_path, fake, target=find("table6"), printed=printed)
    assert (outcome.finished, outcome.failed, outcome.left) == (2, 0, 2)
    assert "it is measured again from its beginning" in printed.getvalue()
    kept = {path: path.read_bytes() for path in tmp_path.glob("systems/table6/*/seed-*.json")}
    assert {path.parent.name for path in kept} == {FIRST}
    outcome = go(tmp_path, fake, target=find("table6"))
    assert (outcome.before, outcome.finished, outcome.left) == (2, 2, 0)
    assert [arm for _, arm in calls(tmp_path)] == [FIRST, SECOND, SECOND]
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.parametrize(
    ("tier", "procedure", "given", "seen"),
    [
        ("systems", "step_time", None, "expandable_segments:True"),
        ("systems", "step_time", "max_split_size_mb:64", "max_split_size_mb:64"),
        ("systems", "throughput", None, None),
        ("paper", "train", None, "expandable_segments:True"),
    ],
)
def test_the_allocator_is_set_before_torch(tier, procedure, given, seen, tmp_path, monkeypatch):
    text = (
        "import json, os, sys\n"
        "def carry_out(runs, records, context):\n"
        "    state = [os.environ.get('PYTORCH_CUDA_ALLOC_CONF'), 'torch' in sys.modules]\n"
        "    (records / 'state.json').write_text(json.dumps(state))\n"
    )
    carry_out = planted("allocator_state", text, tmp_path, monkeypatch).carry_out
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    run = dataclasses.replace(planned([FIRST])[0], procedure=procedure, tier=tier)
    task = Task(run=run, folder=tmp_path / "work", runs=tmp_path)
    with WorkerPool(1, tmp_path / "workers.log", alone=True, carry_out=carry_out) as pool:
        kinds = [event.kind for event in pool.execute([task])]
    assert kinds[-1] == "finished"
    assert json.loads((tmp_path / "state.json").read_text()) == [seen, False]
