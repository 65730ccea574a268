"""The runner: what is done stays done, what fails is told, what stops goes on."""

import dataclasses
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from repro.__main__ import main
from repro.data.generator import generate_problems
from repro.evidence.record import Measured, find_record, read_record, record_of, record_path
from repro.models.checkpoint import TINY_FOLDER
from repro.run.execute import execute
from repro.run.preflight import look_again
from repro.run.progress import Display
from repro.run.several_ranks.room import Room
from repro.run.worker import Event, Task
from repro.run.workers import WorkerPool
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.spec.variants import with_steps
from repro.targets import find
from tests.repro.problem_files import write_problems

ROOT = Path(__file__).parents[3]


def runs_of(arms, steps=3, seeds=1):
    """Return runs of Table 1 that ask few questions: nothing here depends on the answers."""
    made = plan(with_steps(find("table1"), steps), Tier.SMOKE, seeds, arms)
    return [dataclasses.replace(run, scale=fewer(run.scale)) for run in made]


def fewer(scale, **changes):
    """Return a scale with few rows in a rollout, few problems, and other changes."""
    data = dataclasses.replace(scale.data, test_problems=8)
    return dataclasses.replace(scale, **({"prompts_per_rollout": 4, "data": data} | changes))


def quiet():
    return Console(file=open(os.devnull, "w"), force_terminal=False)


def comparable(path):
    """Return what may not differ between two runs of the same configuration."""
    record = read_record(path)
    metrics = {
        name: estimate.value
        for name, estimate in record.metrics.items()
        if name not in ("train_seconds", "peak_bytes")
    }
    return metrics, record.series


def arguments(runs, *more):
    """Return a command's words for runs that ask few questions, as those of `runs_of` do."""
    where = ["--tier", "smoke", "--runs", str(runs), "--seeds", "1", "--limit", "8"]
    return ["run", "table1", *where, "--set", "prompts_per_rollout=4", *more]


def command(runs, *more, launcher=(), before=()):
    """Start a process of its own group on runs that ask few questions."""
    return subprocess.Popen(
        [*before, sys.executable, "-m", *launcher, "repro", *arguments(runs, *more)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until(holds, process=None, seconds=180):
    """Wait until something holds, as long as a process lives; return it."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert process is None or process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.mark.usefixtures("warm_workers")
def test_a_finished_run_is_never_redone_and_workers_do_not_change_it(tmp_path):
    runs = runs_of(["bf16", "nvfp4_lora_aqn"], steps=2)
    one = execute(runs, tmp_path / "one", room=Room(), console=quiet())
    two = execute(runs, tmp_path / "two", room=Room(workers=2), console=quiet())
    assert (one.finished, one.failed, one.left) == (2, 0, 0)
    assert (two.failed, two.left) == (0, 0)
    for run in runs:
        first, second = (record_path(run, tmp_path / name) for name in ("one", "two"))
        assert comparable(first) == comparable(second)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("seed-*.json")}
    again = execute(runs, tmp_path / "one", room=Room(), console=quiet())
    assert (again.before, again.finished) == (2, 0)
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.usefixtures("warm_workers")
def test_a_run_that_fails_leaves_its_reason_and_the_rest_go_on(tmp_path):
    good, bad = runs_of(["bf16", "nvfp4"])
    outcome = execute([bad, good], tmp_path, room=Room(), console=quiet(), carry_out=failing)
    assert (outcome.finished, outcome.failed) == (1, 1)
    assert find_record(good, tmp_path) is not None
    assert find_record(bad, tmp_path) is None
    (left,) = tmp_path.rglob("seed-0.failed-1.json")
    record = read_record(left)
    assert record.outcome["status"] == "failed"
    assert "planted" in record.outcome["reason"]


def at_once(runs, records, context):
    """Write a record that says nothing; return its path. Nothing is loaded for it."""
    started = datetime.now(UTC)
    return [record_of(run, Measured(), environment={}, started=started).write(records)
            for run in runs]  # fmt: skip


def failing(runs, *how):
    """Carry out runs at once, but for an NVFP4 one."""
    if runs[0].arm.name == "nvfp4":
        raise ValueError("planted")
    return at_once(runs, *how)


@pytest.mark.parametrize("kind", ["failed", "progress"])
def test_a_runs_own_words_are_no_markup_of_the_display(tmp_path, kind):
    (run,) = runs_of(["bf16"])
    task = Task(run=run, folder=tmp_path, runs=tmp_path)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Display([task], 0, console) as display:
        display.show(Event(task=task, kind=kind, text="E: [/INST] \x1b]0;title\x07"))
    shown = console.file.getvalue()
    assert "[/INST]" in shown
    assert "\x1b]0;" not in shown


def test_a_record_of_another_configuration_is_not_taken_for_this_one(tmp_path, made_up_record):
    (run,) = runs_of(["bf16"])
    made_up_record(run).write(tmp_path)
    other = dataclasses.replace(run, scale=fewer(run.scale, max_prompt_tokens=200))
    with pytest.raises(ValueError, match="max_prompt_tokens is 1280, needed 200"):
        execute([other], tmp_path, room=Room(), console=quiet())


@pytest.mark.usefixtures("warm_workers")
def test_an_unreadable_record_costs_its_own_run_alone(tmp_path, made_up_record):
    broken, good = runs_of(["bf16", "nvfp4"])
    path = made_up_record(broken).write(tmp_path)
    path.write_text(path.read_text()[:500])  # as a full disk leaves it
    before = path.read_bytes()
    console = Console(file=io.StringIO(), width=4_000)
    outcome = execute([broken, good], tmp_path, room=Room(), console=console, carry_out=at_once)
    assert (outcome.before, outcome.finished, outcome.failed, outcome.left) == (0, 1, 1, 0)
    assert f"Not run: {path}: " in console.file.getvalue()
    assert path.read_bytes() == before
    again = execute([broken, good], tmp_path, room=Room(), console=quiet())
    assert (again.before, again.finished, again.failed) == (1, 0, 1)


@pytest.mark.usefixtures("warm_workers")
def test_a_record_that_is_spoilt_as_it_is_written_ends_no_other_run(tmp_path):
    spoiling, good = runs_of(["bf16", "nvfp4"])
    outcome = execute([spoiling, good], tmp_path, room=Room(), console=quiet(), carry_out=cut_off)
    assert (outcome.finished, outcome.failed, outcome.left) == (1, 1, 0)


def cut_off(runs, records, context):
    """Carry out runs at once, and spoil the record of a BF16 one."""
    paths = at_once(runs, records, context)
    if runs[0].arm.name == "bf16":
        paths[0].write_text("{")
    return paths


@pytest.mark.usefixtures("warm_workers")
def test_ctrl_c_loses_nothing_and_the_second_start_ends_where_one_start_would(tmp_path):
    flags = ("--arms", "nvfp4_lora_aqn", "--steps", "8", "--set", "checkpoint_every=1")
    flags += ("--threads", "1")  # the order of sums depends on them
    assert main(arguments(tmp_path / "whole", *flags)) == 0
    ended = threading.Event()

    def ctrl_c():
        until(lambda: ended.is_set() or list((tmp_path / "parts").rglob("checkpoint/*")))
        # A terminal gives it to every process of its group.
        group = [child.pid for child in multiprocessing.active_children()]
        for process in (*group, os.getpid()):
            if not ended.is_set():
                os.kill(process, signal.SIGINT)

    threading.Thread(target=ctrl_c, daemon=True).start()
    status = main(arguments(tmp_path / "parts", *flags))
    ended.set()
    assert status == 130
    assert main(arguments(tmp_path / "parts", *flags)) == 0
    (first,) = (tmp_path / "whole").rglob("seed-0.json")
    (second,) = (tmp_path / "parts").rglob("seed-0.json")
    assert comparable(first) == comparable(second)


def test_a_cancelled_group_of_processes_has_no_failed_run(tmp_path):
    """What a cluster's cancel and `timeout` do: SIGTERM for the parent and for its workers."""
    start = command(tmp_path / "runs", "--arms", "bf16,nf4,bf16_lora", "--workers", "1")
    until(lambda: list((tmp_path / "runs").rglob("seed-0.lock")), start)
    os.killpg(start.pid, signal.SIGTERM)
    printed = start.communicate(timeout=120)[0]
    assert start.returncode == 130, printed
    assert "3 runs" in printed
    assert "failed" not in printed
    assert not list((tmp_path / "runs").rglob("*.failed-*"))
    assert not list((tmp_path / "runs").rglob("*.lock"))


@pytest.mark.usefixtures("warm_workers")
def test_a_worker_lets_a_signal_to_stop_pass(tmp_path):
    (run,) = runs_of(["bf16_lora"], steps=3)
    events = []
    with WorkerPool(1, tmp_path / "workers.log") as pool:
        for event in pool.execute([Task(run=run, folder=tmp_path / "one", runs=tmp_path)]):
            if event.kind == "started" or event.text == "training":
                (child,) = multiprocessing.active_children()
                assert os.getpgid(child.pid) == child.pid  # what a reward starts is not signalled
                os.kill(child.pid, signal.SIGTERM)
            events.append(event)
    assert events[-1].kind == "finished", events[-1].text


@pytest.mark.usefixtures("warm_workers")
def test_problems_and_a_model_from_folders_go_the_whole_way_and_stay_the_same(tmp_path, capsys):
    folder, model = tmp_path / "own", shutil.copytree(TINY_FOLDER, tmp_path / "model")
    folder.mkdir()
    for split, count in (("train", 40), ("test", 20)):
        write_problems(folder / f"{split}.jsonl", generate_problems(split, count, seed=0))
    line = f"table1 --tier smoke --runs {tmp_path}/runs --model {model} --steps 2"
    line += f" --set data.source=folder:{folder} --set prompts_per_rollout=4"
    run = ["run", *line.split(), "--seeds", "1", "--arms", "bf16,nvfp4_lora"]
    assert main(run) == 0
    assert len(list((tmp_path / "runs").rglob("seed-0.json"))) == 2
    main(["check", *line.split()])
    printed = " ".join(capsys.readouterr().out.split())
    assert "bf16_lora has no record" in printed
    assert "nothing to learn" in printed or "undecided" in printed
    weights = model / "model.safetensors"
    for file, old, new, status, named in (
        (folder / "train.jsonl", b"?", b" ?", 1, f"train_problems of folder:{folder}"),
        (weights, b'"pt"', b'"np"', 2, weights),  # which the untrained arm reads, too
    ):
        kept = file.read_bytes()
        for content, ends in ((kept.replace(old, new), status), (kept, 0)):
            file.write_bytes(content)
            look_again()  # as another process would
            assert main(run) == ends
            said = capsys.readouterr()
            assert ("nothing to do" in said.out) == (ends < 2)
            assert (f": {named} changed since" in said.out + said.err) == (ends > 0)
