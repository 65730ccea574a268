"""Two starts on one folder of records: each run is carried out once, whoever dies."""

import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

from repro.evidence.record import failed_record
from repro.run.shared_work import RunLocks
from repro.run.worker import Task
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.run.test_execute import at_once

ROOT = Path(__file__).parents[3]
ARMS = ["bf16", "nf4", "mxfp4", "nvfp4"]


def runs_of(seeds=1, tier=Tier.SMOKE):
    return plan(find("table1"), tier, seeds, ARMS)


def task_of(runs, folder):
    return Task(run=runs[0], also=tuple(runs[1:]), folder=folder / "work", runs=folder)


def start(folder, pending, said=None):
    return RunLocks(folder, pending, (said if said is not None else []).append)


def test_what_one_start_has_claimed_another_leaves_and_gets_afterwards(tmp_path):
    runs, said = runs_of(), list[str]()
    task = task_of(runs, tmp_path)
    with start(tmp_path, runs) as one, start(tmp_path, runs, said) as two:
        assert one.take(task)[0] == task
        assert one.take(task)[0] == task  # it was given back to the queue, say
        assert two.take(task) == (None, None)
        (sentence,) = said
        assert f"process {os.getpid()} on" in sentence
        one.release(task)
        assert two.take(task)[0] == task
    assert not list(tmp_path.rglob("*.lock"))


def test_of_a_task_s_runs_a_start_takes_what_is_not_recorded(tmp_path, made_up_record):
    runs = runs_of()
    with start(tmp_path, runs) as one:
        made_up_record(runs[3]).write(tmp_path)
        claimed, elsewhere = one.take(task_of(runs, tmp_path))
        assert claimed.every == tuple(runs[:3])
        assert elsewhere.every == tuple(runs[3:])


def test_a_run_that_another_start_tried_in_vain_is_not_tried_again_by_this_one(tmp_path):
    runs = runs_of()[:1]
    failed_record(runs[0], "before any of the two", {}).write(tmp_path)
    task = task_of(runs, tmp_path)
    with start(tmp_path, runs) as one:
        assert one.take(task)[0] == task
        failed_record(runs[0], "by the other", {}).write(tmp_path)
        one.release(task)
        assert one.take(task) == (None, task)
    with start(tmp_path, runs) as next_start:
        assert next_start.take(task)[0] == task


def test_measurements_are_claimed_one_at_a_time(tmp_path):
    small, large = (dataclasses.replace(run, tier="systems") for run in runs_of()[:2])
    with start(tmp_path, [small, large]) as one, start(tmp_path, [small, large]) as two:
        assert one.take(task_of([small], tmp_path))[0] is not None
        assert two.take(task_of([large], tmp_path)) == (None, None)


def test_without_locks_a_sentence_says_so_once_and_the_runs_go_on(tmp_path, monkeypatch):
    refused = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=refused))
    runs, said = runs_of(), list[str]()
    with start(tmp_path, runs, said) as one:
        for run in runs:
            assert one.take(task_of([run], tmp_path))[0] is not None
    (sentence,) = said
    assert "has no locks" in sentence


def waiting(runs, records, context):
    """Record runs after a little while, a call to a line, but for one that fails."""
    with (records / "calls.jsonl").open("a") as file:
        file.write(json.dumps([os.getppid(), runs[0].digest()]) + "\n")
    time.sleep(0.2)
    if runs[0].seed == 3:
        raise ValueError("cannot be done")
    return at_once(runs, records, context)


# Of every process that a test starts.
IMPORTS = """
import json, os, sys, time
from pathlib import Path
from rich.console import Console
from repro.run.execute import execute
from repro.run.several_ranks.room import Room
from tests.repro.run.test_shared_work import runs_of, start, task_of, waiting
folder = Path(sys.argv[1])
"""
TAKING = """
runs = runs_of()[:1]
claims, task, taken = start(folder, runs), task_of(runs, folder), 0
while taken < 100:
    if claims.take(task)[0] is None:
        continue
    os.mkdir(folder / "inside")  # raises where another is inside
    os.rmdir(folder / "inside")
    taken += 1
    claims.release(task)
print("taken", taken, flush=True)
"""
HOLDING = """
claims = start(folder, runs_of())
assert claims.take(task_of(runs_of(), folder))[0] is not None
print("taken", flush=True)
time.sleep(600)
"""
SHARING = """
outcome = execute(runs_of(4), folder, room=Room(), console=Console(), carry_out=waiting)
print(json.dumps([outcome.before + outcome.finished, outcome.failed, outcome.left]))
"""


def python(script, folder):
    return subprocess.Popen(
        [sys.executable, "-c", IMPORTS + script, str(folder)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_two_processes_are_never_inside_together(tmp_path):
    for process in [python(TAKING, tmp_path) for _ in range(3)]:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out == "taken 100\n"


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    runs = runs_of()
    task = task_of(runs, tmp_path)
    holder = python(HOLDING, tmp_path)
    assert holder.stdout.readline() == "taken\n"
    with start(tmp_path, runs) as other:
        assert other.take(task) == (None, None)
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
        assert len(list(tmp_path.rglob("seed-*.lock"))) == 1
        assert other.take(task)[0] == task


def test_two_starts_share_the_work_and_both_know_how_it_ended(tmp_path):
    for process in [python(SHARING, tmp_path) for _ in range(2)]:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert json.loads(out.splitlines()[-1]) == [12, 4, 0], out
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert sorted(digest for _, digest in calls) == sorted(run.digest() for run in runs_of(4))
    assert len({starter for starter, _ in calls}) == 2
    assert len(list(tmp_path.rglob("*.failed-*.json"))) == 4
    assert not list(tmp_path.rglob("*.lock"))
