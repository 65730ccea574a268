"""Runs as tasks of a Ray cluster of two nodes on this machine, one of which is killed."""

import importlib.util
import threading
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.evidence.record import read_record
from repro.run.several_ranks.ray_pool import join_cluster
from repro.runlog.run_logger import read_lines
from tests.repro.run.test_execute import arguments, command, until

ROOT = Path(__file__).parents[3]
ARMS = ("bf16_lora", "nvfp4_lora", "nvfp4_lora_aqn")
INSTALLED = importlib.util.find_spec("ray") is not None
NEEDED = "needs ray, which is not installed"


@pytest.fixture
def cluster(monkeypatch):
    """Return a cluster whose head carries out one run at a time."""
    ray = pytest.importorskip("ray", reason=NEEDED)
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    small = {"num_cpus": 1, "object_store_memory": 10**8, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=small)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    ray.shutdown()
    made.shutdown()


WORDS = ["--arms", ",".join(ARMS), "--steps=8", "--set=checkpoint_every=2", "--executor=ray"]


def line(runs, *more):
    return arguments(runs, *WORDS, *more)


def test_a_node_that_is_killed_loses_no_run_and_repeats_none(cluster, tmp_path, capsys):
    second = cluster.add_node(num_cpus=1, object_store_memory=10**8)

    def kill_once_both_have_a_checkpoint():
        until(lambda: len({path.parent for path in tmp_path.rglob("checkpoint/step-*")}) == 2)
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill_once_both_have_a_checkpoint)
    killer.start()
    assert main(line(tmp_path)) == 0
    killer.join()
    shown = capsys.readouterr().out
    (lost,) = [text for text in shown.splitlines() if text.startswith("again ")]
    assert "host was lost" in lost
    assert not list(tmp_path.rglob("*.failed-*"))
    records = [read_record(path) for path in tmp_path.rglob("seed-0.json")]
    assert sorted(record.arm for record in records) == sorted(ARMS)
    for record in records:
        assert record.facts["optimizer_steps"] == 8
    steps = [[own["step"] for own in read_lines(path)] for path in tmp_path.rglob("metrics.jsonl")]
    assert steps == [list(range(1, 9))] * 3


def test_a_folder_that_is_not_shared_is_refused(cluster, tmp_path, monkeypatch):
    unseen = False, {"place": "node-b"}
    monkeypatch.setattr("repro.run.several_ranks.ray_pool._seen", lambda file: unseen)
    with pytest.raises(ValueError, match=r"--runs .*hosts"):
        join_cluster(tmp_path, {"num_cpus": 1})
    assert not list(tmp_path.iterdir())


def test_a_run_has_its_room_on_one_host(cluster, tmp_path):
    cluster.add_node(num_cpus=3, object_store_memory=10**8)
    assert join_cluster(tmp_path, {"num_cpus": 2}) == [(0, 1), (1, 3)]
    for kind, needed, most in (("num_cpus", 4, 3), ("num_gpus", 2, 0)):
        sentence = f"{kind} is at most {most} on a host; a run needs {needed} on one"
        with pytest.raises(ValueError, match=sentence):
            join_cluster(tmp_path, {kind: needed})


def test_the_hosts_have_the_devices_that_a_run_needs_not_the_head(cluster, tmp_path, monkeypatch):
    cluster.add_node(num_cpus=12, num_gpus=4, object_store_memory=10**8)
    asked = []
    monkeypatch.setattr("repro.run.execute._carry_out", lambda *a, **m: asked.append(a[0]) or 0)
    assert main(line(tmp_path, "--tier=paper", "--ranks=2", "--set=optimizer.name=adamw_8bit")) == 0
    ((batch,),) = asked
    room = batch.room
    assert (room.workers, room.threads, room.pool.args) == (2, 3, ({"num_gpus": 2},))
    assert main(line(tmp_path, "--tier=paper", "--ranks=5")) != 0


@pytest.mark.usefixtures("cluster")
def test_two_starts_share_the_runs_and_both_know_that_all_are_recorded(tmp_path):
    for start in [command(tmp_path, *WORDS) for _ in range(2)]:
        printed = start.communicate(timeout=300)[0]
        assert start.returncode == 0, printed
        assert "done" in printed, printed  # with room for one run, none begins all three
    steps = [[own["step"] for own in read_lines(path)] for path in tmp_path.rglob("metrics.jsonl")]
    assert steps == [list(range(1, 9))] * 3


def test_without_a_cluster_the_line_that_starts_one_is_said(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ray", reason=NEEDED)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(line(tmp_path)) != 0
    assert "ray start --head" in capsys.readouterr().err


@pytest.mark.skipif(INSTALLED, reason="ray is installed")
def test_without_ray_its_package_is_named(tmp_path, capsys):
    assert main(line(tmp_path)) != 0
    assert "pip install 'qerl-repro[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--workers", "--devices"])
def test_what_a_cluster_decides_is_left_out(tmp_path, capsys, flag):
    assert main(line(tmp_path, flag, "1")) != 0
    assert f"{flag} 1: a Ray" in capsys.readouterr().err
