"""Whole runs by several processes, and what becomes of them when one is lost, late or wrong."""

import dataclasses
import os
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from repro.__main__ import build_parser, main
from repro.distributed import ALONE
from repro.evidence.procedure import Stopped
from repro.evidence.record import read_record, record_path, run_folder
from repro.run.carry_out import launched_ranks
from repro.run.execute import execute, main_run
from repro.run.several_ranks import rank_processes
from repro.run.several_ranks.rank_processes import (
    InPlace,
    Ranked,
    device_of_rank,
    refused_by_any,
    refused_folder,
    require_alike,
)
from repro.run.several_ranks.room import Room, require_ranks
from repro.run.worker import EndedError, Task
from repro.runlog.run_logger import read_lines
from repro.spec.config import DataConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.spec.variants import with_steps
from repro.targets import find
from tests.planted import planted
from tests.repro.qwen_checkpoint import write_small
from tests.repro.run.test_execute import arguments, command, fewer, quiet, until
from tests.repro.small_runs import context_of

# The body of a rank with a fault, by the environment: FAULT, on rank FAULTY, in its pass AT.
FAULTS = """
import errno, os, signal, threading, time
import torch
from repro.models.policy import trainable_parameters
from repro.run.carry_out import carry_out

def body(runs, records, context):
    import repro.reward.score as scoring
    import repro.rl.snapshots as snapshots
    import repro.rl.step as step
    import repro.rl.training_state as checkpoint

    rank, fault = int(os.environ.get("RANK", 0)), os.environ.get("FAULT")
    whole, idle, put, counted = step.carry_out, step._evaluated, snapshots._put, [0]

    def kill_once():
        if not (records / "killed").exists():
            (records / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def is_due():
        counted[0] += 1
        return counted[0] == int(os.environ["AT"])

    def put_or_die(*args):
        if is_due():
            kill_once()
        put(*args)

    def passes(policy, *args, **more):
        if fault == "any moment" and not counted[0]:
            threading.Timer(int(os.environ["AT"]) / 1000, kill_once).start()
        due = is_due()
        if due and fault == "weight":
            next(iter(trainable_parameters(policy).values())).data.view(-1)[0] = float("nan")
        output = whole(policy, *args, **more)
        if due:
            if fault == "next rollout":
                next(iter(trainable_parameters(policy).values())).data.view(-1)[0] = float("nan")
            if fault == "kill":
                kill_once()
            if fault == "stall":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "raise":
                raise ValueError("planted here")
            if fault == "memory":
                raise torch.OutOfMemoryError("planted")
            if fault == "drift":
                first = next(iter(trainable_parameters(policy).values()))
                first.data.view(torch.int32).view(-1)[0] ^= 1
            if fault == "gradient":
                next(p for p in trainable_parameters(policy).values() if p.grad is not None
                     ).grad.view(-1)[0] = float("nan")
        return output

    def idle_rows(policy, *args):
        first = next(iter(trainable_parameters(policy).values())).data.view(-1)
        kept = first[0].item()
        first[0] = float("nan")
        passed = idle(policy, *args)
        first[0] = kept
        return passed

    def full(folder, *args):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    if fault and rank == int(os.environ["FAULTY"]):
        step.carry_out = passes
        if fault == "put":
            step.carry_out, snapshots._put = whole, put_or_die
        if fault == "idle":
            step._evaluated = idle_rows
        if fault == "reward":
            scoring._paid = lambda kind, request, *more: scoring.pay(
                lambda completions: [float("nan")], [request.text], {}, "planted"
            )[0]
        if fault == "disk":
            checkpoint.write_snapshot = full
    return carry_out(runs, records, context)
"""


def run_of(arm="nvfp4_lora_aqn", steps=4, every=2, **changes):
    (run,) = plan(with_steps(find("table1"), steps), Tier.SMOKE, 1, [arm])
    of_loss = ("dynamic_sampling", "ratio", "aggregation", "beta")
    loss = {name: changes.pop(name) for name in of_loss if name in changes}
    reach = changes.pop("reach", None)
    scale = fewer(run.scale, checkpoint_every=every, **changes)
    own = dataclasses.replace(run.arm, loss=dataclasses.replace(run.arm.loss, **loss))
    if reach is not None:
        own = dataclasses.replace(own, noise=dataclasses.replace(own.noise, reach=reach))
    return dataclasses.replace(run, arm=own, scale=scale)


@pytest.fixture
def with_fault(tmp_path, monkeypatch, warm_workers):
    """Return what carries out a run with a fault planted in one of its two ranks."""
    body = planted("rank_faults", FAULTS, tmp_path, monkeypatch).body

    def go(run, fault="", rank=1, at=2, ranks=2, stop=lambda: False, stall=60.0, runs=None):
        monkeypatch.setenv("FAULT", fault)
        monkeypatch.setenv("FAULTY", str(rank))
        monkeypatch.setenv("AT", str(at))
        runs = runs or tmp_path / "runs"
        runs.mkdir(exist_ok=True)
        carry_out = Ranked(ranks=ranks, stall=stall, body=body)
        carry_out([run], runs, context_of(run_folder(run, runs), should_stop=stop))
        return record_path(run, runs)

    return go


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the record of a run by one process."""
    made = {}

    def of(run):
        if run.digest() not in made:
            runs = tmp_path_factory.mktemp("alone")
            assert execute([run], runs, room=Room(), console=quiet()).finished == 1
            made[run.digest()] = record_path(run, runs)
        return made[run.digest()]

    return of


def require_equal(path, other):
    """Compare a run by ranks with that of one process: counts to the bit, sums by rounding."""
    one, many = read_record(path), read_record(other)
    exact = ("reward", "accuracy", "format", "completion_tokens", "truncation_rate",
             "zero_variance_groups", "learning_rate", "sigma")  # fmt: skip
    for name in exact:
        assert one.series.get(name) == many.series.get(name), name
    for name in ("grades", "answers", "rows", "optimizer_steps", "micro_batch_fallbacks"):
        assert one.facts.get(name) == many.facts.get(name), name
    for name in ("loss", "grad_norm", "entropy"):
        assert many.series[name] == pytest.approx(one.series[name], abs=2e-6, rel=2e-5), name
    assert many.facts["trained_change_l2"] == pytest.approx(
        one.facts["trained_change_l2"], rel=1e-5
    )


def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(alone, with_fault):
    run = run_of()
    with pytest.raises(EndedError, match=r"rank 1 .*step [12] done.*SIGKILL") as caught:
        with_fault(run, "kill", at=3)
    assert caught.value.kind == "lost"
    again = with_fault(run)
    require_equal(alone(run), again)
    assert read_record(again).facts["ranks"] == 2
    (lines,) = again.parents[3].rglob("metrics.jsonl")
    seconds = [{k: v for k, v in own.items() if k[:7] == "seconds"} for own in read_lines(lines)]
    assert len(seconds) == 4
    for step in seconds:
        parts = step.pop("seconds_exchange"), step.pop("seconds_meeting")
        assert 0 < parts[0] < sum(parts) < sum(step.values())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "rank", "at"),
    [("kill", 1, 1), ("kill", 0, 2), ("kill", 1, 4), ("put", 0, 2),
     *(("any moment", n % 2, 75 * n) for n in range(20))],
)  # fmt: skip
def test_a_run_goes_on_whenever_a_rank_is_killed(alone, with_fault, tmp_path, fault, rank, at):
    # `put`: while it writes its second checkpoint; `any moment`: so many ms from the first pass.
    run = run_of(steps=8)
    with pytest.raises(EndedError, match=rf"rank {rank} .*SIGKILL"):
        with_fault(run, fault, rank=rank, at=at)
    (killed,) = tmp_path.rglob("killed")
    assert time.time() - killed.stat().st_mtime < 10
    require_equal(alone(run), with_fault(run))


@pytest.mark.nightly
def test_two_starts_by_two_ranks_are_equal_to_the_bit(with_fault, tmp_path):
    one, two = (with_fault(run_of(), runs=tmp_path / name) for name in ("one", "two"))
    own, other = (read_record(path).series for path in (one, two))
    assert {"loss", "grad_norm", "entropy"} < own.keys()
    assert own == other
    adapters = [next(path.parents[3].rglob("adapter_model.safetensors")) for path in (one, two)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_a_stalled_rank_is_named_in_bounded_time(with_fault):
    begun = time.monotonic()
    with pytest.raises(EndedError, match=r"\(beginning.*[Rr]ank.* 1 failed to pass") as caught:
        with_fault(run_of(), "stall", at=1, stall=3.0)
    assert caught.value.kind == "lost"
    assert time.monotonic() - begun < 60


# The second of three ranks waits longest, and the third does not come, or does not even join.
LATE = """
import os, time
from repro.distributed import Ranks

def body(runs, records, context):
    if records.name == "outside" and os.environ["RANK"] == "2":
        time.sleep(60)
    ranks = Ranks.joined()
    time.sleep((1, 0, 60)[ranks.rank])
    ranks.any(False)
"""


@pytest.mark.usefixtures("warm_workers")
def test_of_three_the_one_that_is_missing_is_named(tmp_path, monkeypatch):
    carry_out = Ranked(
        ranks=3, stall=3.0, body=planted("late_ranks", LATE, tmp_path, monkeypatch).body
    )

    def ended(place):
        runs = tmp_path / place
        runs.mkdir()
        with pytest.raises(EndedError) as caught:
            carry_out([run_of()], runs, context_of(runs))
        return caught.value

    with ThreadPoolExecutor() as both:  # each waits most of the time
        inside, outside = both.map(ended, ("inside", "outside"))
    assert (inside.kind, outside.kind) == ("lost", "lost")
    assert "2 failed to pass" in str(inside)
    assert "by rank 2" in str(outside)


@pytest.mark.parametrize(
    ("arm", "fault", "sentence"),
    [("nvfp4_lora_aqn", "disk", "rank 0 on"),
     ("nvfp4_lora_aqn", "gradient", "rank 1: .*gradient.* step 2"),
     ("nvfp4_lora_aqn", "idle", "rank 1: log-probabilities"),
     ("nvfp4_lora_aqn", "weight", "rank 1: log-probabilities"),
     ("nvfp4_lora_aqn", "next rollout", "rank 1: logits"),
     ("nvfp4_lora_aqn", "reward", "rank 1: .*planted.* nan"),
     ("nvfp4_lora_aqn", "drift", "rank 1 differs"),
     ("nvfp4_lora_aqn", "raise", "rank 1 .*ValueError: planted"),
     ("bf16_full", "gradient", "rank 1: .*gradient.* step 2"),
     ("bf16_full", "idle", "rank 1: log-probabilities"),
     # The other waits in the middle of a pass: nothing can begin again.
     ("bf16_full", "memory", "rank 1 .*OutOfMemoryError: planted")],
)  # fmt: skip
def test_a_fault_of_one_rank_is_named(with_fault, tmp_path, arm, fault, sentence):
    run = run_of(arm, every=2 if fault == "disk" else 4)
    with pytest.raises(EndedError, match=sentence) as caught:
        with_fault(run, fault, rank=int(fault != "disk"), at=2)
    assert caught.value.kind == ("disk" if fault == "disk" else "failed")
    assert ("\n" in str(caught.value)) == (fault != "disk")  # where it was raised
    assert not list(tmp_path.rglob("step-*"))
    kept = list(tmp_path.rglob("batch-of-step-*.safetensors"))
    assert len(kept) == ("rank 1: " in sentence)
    for path in kept:
        step = {"reward": 1, "idle": 1, "next rollout": 3}.get(fault, 2)
        assert f"(rollout of step {step}, kept in {path})" in str(caught.value)
        batch, rows = load_file(path), run.scale.prompts_per_rollout * run.scale.group_size
        assert len(set(batch["seeds"].tolist())) == rows
        assert len(batch["completion_tokens"]) == (0 if fault == "next rollout" else rows)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; found fewer")
@pytest.mark.parametrize(
    ("fault", "kind", "sentence"),
    [("kill", "lost", "rank 1 .*SIGKILL"), ("stall", "lost", "[Rr]ank.* 1 failed to pass"),
     ("idle", "failed", "rank 1: log-probabilities"),
     ("memory", None, "")],
)  # fmt: skip
def test_on_two_devices_a_lost_rank_is_named_and_memory_is_tried_again(
    with_fault, tmp_path, fault, kind, sentence
):
    (run,) = plan(with_steps(find("table1_coder_0_5b"), 3), Tier.MINI, 1, ["nvfp4_lora_aqn"])
    small = write_small(tmp_path / "small", hidden_size=256, intermediate_size=512)
    scale = dataclasses.replace(
        run.scale,
        checkpoint=str(small),
        revision="",
        data=DataConfig(source="generated", train_problems=64, test_problems=4),
        rollout=dataclasses.replace(run.scale.rollout, max_new_tokens=24),
        prompts_per_rollout=4,
        group_size=4,
    )
    # Half of the answers are paid, so that there is something to learn from.
    run = dataclasses.replace(run, scale=scale, arm=dataclasses.replace(run.arm, reward="random"))
    if kind is None:
        assert read_record(with_fault(run, fault)).facts["micro_batch_fallbacks"]
        return
    with pytest.raises(EndedError, match=sentence) as caught:
        with_fault(run, fault, stall=20.0)
    assert caught.value.kind == kind


def test_memory_that_runs_out_on_one_rank_changes_no_result(alone, with_fault):
    run = run_of()
    path = with_fault(run, "memory")
    record = read_record(path)
    assert record.facts["micro_batch_fallbacks"]
    assert record.series["reward"] == read_record(alone(run)).series["reward"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "ranks"),
    [({"reach": "shared"}, 4),
     ({}, 1),
     ({"updates_per_rollout": 2, "dynamic_sampling": 2, "aggregation": "token_mean"}, 3),
     ({"arm": "bf16_lora", "ratio": "sequence"}, 3),
     ({"arm": "bf16_full", "updates_per_rollout": 2, "beta": 0.05}, 3)],
    ids=["noise that both see", "one rank", "DAPO, two updates", "GSPO, bf16", "full training, KL"],
)  # fmt: skip
def test_a_stopped_run_goes_on_with_other_ranks(alone, with_fault, tmp_path, changes, ranks):
    run = run_of(steps=8, **changes)
    with pytest.raises(Stopped):
        with_fault(run, stop=lambda: any(tmp_path.rglob("step-*2")))
    one, many = alone(run), with_fault(run, ranks=ranks)
    require_equal(one, many)
    if run.arm.training == "full":
        written = [next(path.parents[3].rglob("model.safetensors")) for path in (one, many)]
        for whole, other in zip(*(load_file(path).values() for path in written), strict=True):
            torch.testing.assert_close(whole, other, rtol=0.01, atol=1e-4)  # bfloat16


@pytest.mark.nightly
def test_the_queue_starts_a_killed_run_again(alone, tmp_path, monkeypatch, warm_workers):
    body = planted("rank_faults", FAULTS, tmp_path, monkeypatch).body
    for name, value in (("FAULT", "kill"), ("FAULTY", "0"), ("AT", "3")):
        monkeypatch.setenv(name, value)
    run = run_of()
    runs = tmp_path / "runs"
    room = Room(ranks=2, stall=60)
    outcome = execute([run], runs, room=room, console=quiet(), carry_out=body)
    assert (outcome.failed, outcome.left) == (0, 0)
    assert (runs / "killed").exists()
    require_equal(alone(run), record_path(run, runs))


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
ONE_RUN = ("--arms", "nvfp4_lora_aqn", "--set", "checkpoint_every=2", "--steps", "8")


@pytest.mark.nightly
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_signal_stops_all_ranks_after_one_step_with_a_checkpoint(tmp_path, torchrun):
    more = [] if torchrun else ["--ranks", "2", "--workers", "1"]
    launcher = TORCHRUN if torchrun else ()
    process = command(tmp_path, *ONE_RUN, "--steps", "400", *more, launcher=launcher)
    try:
        until(lambda: list(tmp_path.rglob("metrics.jsonl")), process)
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    finally:
        process.kill()
    assert status == (1 if torchrun else 130)  # torchrun has a status of its own
    assert list(tmp_path.rglob("step-*"))


@pytest.mark.nightly
@pytest.mark.parametrize("fate", [signal.SIGCONT, signal.SIGKILL])
def test_for_what_one_torchrun_is_at_another_waits_and_takes_it_over(tmp_path, fate):
    one = command(tmp_path, *ONE_RUN, launcher=TORCHRUN)
    until(lambda: list(tmp_path.rglob("metrics.jsonl")), one)
    (lock,) = tmp_path.rglob("seed-0.lock")
    holder = int(lock.read_text().split()[1])
    os.kill(holder, signal.SIGSTOP)
    two = command(tmp_path, *ONE_RUN, "--stall-timeout", "3", launcher=TORCHRUN)
    assert any("Another start" in said for said in two.stdout)
    time.sleep(8)  # longer than the second rank waits for a first that says nothing
    os.kill(holder, fate)
    assert two.wait(120) == 0, two.stdout.read()
    assert (one.wait(120) == 0) == (fate == signal.SIGCONT), one.stdout.read()
    assert len(list(tmp_path.rglob("seed-0.json"))) == 1
    (lines,) = tmp_path.rglob("metrics.jsonl")
    assert [step["step"] for step in read_lines(lines)] == list(range(1, 9))


@pytest.fixture
def two_hosts():
    """Two network namespaces with one link, as commands; and how all its packets get lost."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2: hosts of its own are network namespaces")

    def ip(words):
        subprocess.run(["ip", *words.split()], check=True)

    def lose():
        for host, other in ((1, 2), (2, 1)):  # sent where nobody listens
            nobody = f"10.77.0.{other} lladdr 02:00:00:00:00:09 dev wire nud permanent"
            ip(f"-n {hosts[host - 1]} neigh replace {nobody}")

    hosts = [f"ranks-{os.getpid()}-{number}" for number in (1, 2)]
    try:
        for host in hosts:
            ip(f"netns add {host}")
        ip(f"link add wire netns {hosts[0]} type veth peer name wire netns {hosts[1]}")
        for number, host in enumerate(hosts, 1):
            ip(f"-n {host} addr add 10.77.0.{number}/24 dev wire")
            for device in ("wire", "lo"):
                ip(f"-n {host} link set {device} up")
        yield [["ip", "netns", "exec", host] for host in hosts], lose
    finally:
        for host in hosts:
            inside = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
            for pid in inside.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", host], check=False)


@pytest.mark.nightly
def test_a_lost_network_names_the_missing_rank(tmp_path, two_hosts, monkeypatch):
    hosts, lose = two_hosts
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wire")
    meet = "--rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29400 --nnodes=2 --nproc-per-node=1"
    starts = [
        command(tmp_path, *ONE_RUN, "--steps=400", "--stall-timeout=6", before=host, launcher=[
            "torch.distributed.run", *meet.split(), f"--rdzv-conf=is_host={1 - number}",
            f"--local-addr=10.77.0.{number + 1}", "-m",
        ])
        for number, host in enumerate(hosts)
    ]  # fmt: skip
    until(lambda: list(tmp_path.rglob("metrics.jsonl")), starts[0])
    lose()
    assert starts[0].wait(60) != 0
    assert "Rank 1 failed to pass" in starts[0].stdout.read()
    # torchrun itself stays there for a while, since its store is on the first host.
    threading.Timer(60, starts[1].kill).start()
    assert any("rank 1 on" in line and "waited up to 12 s" in line for line in starts[1].stdout)


@pytest.mark.nightly
def test_two_launchers_of_two_ranks_each_make_one_run(tmp_path):
    meet = "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29431 --nnodes=2 --nproc-per-node=2"
    line = ("torch.distributed.run", *meet.split(), "-m")
    starts = [command(tmp_path, *ONE_RUN, launcher=line) for _ in range(2)]
    said = [start.communicate(timeout=120)[0] for start in starts]
    assert [start.returncode for start in starts] == [0, 0], said
    (path,) = tmp_path.rglob("seed-0.json")
    assert read_record(path).facts["ranks"] == 4


@pytest.mark.nightly
def test_of_torchruns_ranks_one_says_why_nothing_starts(tmp_path):
    said, _ = command(tmp_path, "--set", "steps=nowhere", launcher=TORCHRUN).communicate()
    assert said.count("repro: ") == 1
    assert "nowhere" in said


def test_what_is_refused_on_one_rank_is_refused_on_all():
    for own, others, sentence in (
        ("", ("", ""), ""), ("", ("", "no GPU"), "rank 2: no GPU"), ("no x", ("no x", ""), "no x")
    ):  # fmt: skip
        ranks = SimpleNamespace(objects=lambda text, others=others: [text, *others])
        assert refused_by_any(ranks, own) == sentence


@pytest.mark.parametrize(
    ("claimed", "elsewhere", "heard", "kinds"),
    [(False, True, "", ["elsewhere"]), (True, False, "", ["started", "finished"]),
     (False, False, "stop", [])],
)  # fmt: skip
def test_the_first_rank_waits_for_another_start(
    tmp_path, monkeypatch, claimed, elsewhere, heard, kinds
):
    monkeypatch.setattr(rank_processes, "outcome_of", lambda *args: ("finished", ""))
    monkeypatch.setattr(InPlace, "look_seconds", 0.0)
    task, told = Task(run=run_of(), folder=tmp_path, runs=tmp_path), []
    answers = iter([(None, None), (task if claimed else None, task if elsewhere else None)])
    ranks = SimpleNamespace(objects=lambda text: told.append(text) or [text, heard])
    first = InPlace(ranks, 1, tmp_path, claim=lambda task: next(answers))
    assert [event.kind for event in first.execute([task])] == kinds
    assert told == ["wait", *[task.run.digest()] * claimed]


def test_of_torchruns_runs_one_that_failed_comes_after_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_processes, "outcome_of", lambda *args: ("finished", ""))
    runs = plan(find("table1"), Tier.SMOKE, 2, ["nvfp4_lora"])
    path = record_path(runs[0], tmp_path)
    path.parent.mkdir(parents=True)
    path.with_name("seed-0.failed-1.json").touch()
    ranks = SimpleNamespace(objects=lambda text: [text])
    first = InPlace(ranks, 1, tmp_path, claim=lambda task: (task, None))
    events = first.execute([Task(run=run, folder=tmp_path, runs=tmp_path) for run in runs])
    assert [event.task.run.seed for event in events if event.kind == "finished"] == [1, 0]


def test_a_folder_that_hosts_do_not_share_is_refused(tmp_path):
    for name, sentence in ((".ranks-elsewhere", "rank 1: --runs"), (".", "")):
        firsts = iter([name, ""])
        ranks = SimpleNamespace(first=False, objects=lambda own, firsts=firsts: [next(firsts), own])
        assert refused_folder(ranks, tmp_path).startswith(sentence)


def test_a_launchers_variables_that_are_no_numbers_are_refused(monkeypatch):
    for size, rank, needed in (("x", "0", "needs 1 or more"), ("0", "0", "'0'"), ("2", "", "RANK")):
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ValueError, match=needed):
            launched_ranks()


def test_devices_that_no_run_takes_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "repro.run.several_ranks.room.devices_to_fill", lambda *args: ("0", "1", "2")
    )
    monkeypatch.setattr("repro.run.execute._carry_out", lambda *args, **more: 0)
    assert main(arguments(tmp_path, *ONE_RUN, "--ranks", "2")) == 0
    assert "1 of 3 devices" in capsys.readouterr().out


def test_ranks_that_a_scale_asks_for_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("repro.run.execute.require_ready", lambda *args, **more: None)
    monkeypatch.setattr(
        "repro.run.several_ranks.room.devices_to_fill", lambda *args: ("0", "1", "2", "3")
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    told = []
    monkeypatch.setattr("repro.run.execute._carry_out", lambda made, *a, **m: told.append(made))
    main(["run", "scaling_4", "--tier", "systems", "--workers", "1", "--runs", str(tmp_path)])
    assert told[0][0].room.threads == 16


def test_bad_input_is_one_sentence():
    runs = plan(find("table1"), Tier.SMOKE, 1, ["nvfp4_lora"])
    for ranks, tier, devices, needed in (
        (0, Tier.SMOKE, (), "1 or more"),
        (3, Tier.MINI, ("0", "1"), "2 devices"),
        (2, Tier.SYSTEMS, ("0", "1"), "systems tier"),
        (1000, Tier.SMOKE, (), "prompts per rollout"),
    ):
        with pytest.raises(ValueError, match=needed) as caught:
            require_ranks(ranks, tier, devices, runs)
        assert str(caught.value).startswith(f"--ranks {ranks}: ")
    require_ranks(2, Tier.MINI, ("0", "1"), runs)
    doses = [dataclasses.replace(runs[0], procedure="dose")]
    with pytest.raises(ValueError, match="is a dose"):
        require_ranks(2, Tier.SMOKE, (), doses)


@pytest.mark.parametrize("flag", ["--ranks 2", "--executor ray"])
def test_torchrun_and_another_launcher_do_not_go_together(monkeypatch, flag):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    with pytest.raises(ValueError, match=f"{flag}: torchrun"):
        main_run(build_parser().parse_args(["run", "table1", "--tier=smoke", *flag.split()]))


def test_ranks_of_unlike_sources_are_refused():
    own = {"place": "rank 0 (a)", "source": "1", "torch": "2.9"}
    require_alike([own, {**own, "place": "rank 1 (b)"}])
    with pytest.raises(ValueError, match=r"torch .*2\.8.*rank 1.*2\.9.*rank 0"):
        require_alike([own, {**own, "place": "rank 1 (b)", "torch": "2.8"}])


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, None), ("", ""), ("4,6", "6"), ("4", ""), ("GPU-a,GPU-b", "GPU-b")]
)
def test_a_rank_sees_no_device_but_those_given_to_all(monkeypatch, visible, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_of_rank(1) == seen


def test_a_stop_that_reached_another_rank_alone_begins_no_further_run(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_processes, "outcome_of", lambda *args: ("stopped", ""))
    tasks = [Task(run=run_of(steps=n), folder=tmp_path, runs=tmp_path) for n in (4, 6)]
    first = InPlace(ALONE, 1, tmp_path)
    assert [event.kind for event in first.execute(tasks)] == ["started", "stopped"]
