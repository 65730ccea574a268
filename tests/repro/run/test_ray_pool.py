"""Runs as tasks of a Ray cluster of two nodes on this machine, one of which is killed."""

import importlib.util
import threading
import time
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.evidence.record import read_record
from repro.run.several_ranks.ray_pool import join_cluster
from repro.runlog.stream import read_lines
from tests.repro.run.test_execute import arguments

ROOT = Path(__file__).parents[3]
ARMS = ("bf16_lora", "nvfp4_lora", "nvfp4_lora_aqn")
INSTALLED = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not INSTALLED, reason="needs ray, which is not installed")


@pytest.fixture
def cluster(monkeypatch):
    """Return a cluster whose head carries out one run at a time."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    small = {"num_cpus": 1, "object_store_memory": 10**8, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=small)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def line(runs, *more):
    changes = ["--steps", "8", "--set", "checkpoint_every=2"]
    return [*arguments(runs, "--arms", ",".join(ARMS), *changes), "--executor", "ray", *more]


@needs_ray
def test_a_node_that_is_killed_loses_no_run_and_repeats_none(cluster, tmp_path, capsys):
    second = cluster.add_node(num_cpus=1, object_store_memory=10**8)

    def kill_once_both_have_a_checkpoint():
        until = time.monotonic() + 240
        while time.monotonic() < until:
            if len({path.parent for path in tmp_path.rglob("checkpoint/step-*")}) == 2:
                cluster.remove_node(second, allow_graceful=False)
                return
            time.sleep(0.05)

    killer = threading.Thread(target=kill_once_both_have_a_checkpoint)
    killer.start()
    assert main(line(tmp_path)) == 0
    killer.join()
    shown = capsys.readouterr().out
    (lost,) = [text for text in shown.splitlines() if text.startswith("again ")]
    assert "its host was lost" in lost
    assert not list(tmp_path.rglob("*.failed-*"))
    records = [read_record(path) for path in tmp_path.rglob("seed-0.json")]
    assert sorted(record.arm for record in records) == sorted(ARMS)
    for record in records:
        assert record.effects["optimizer_steps"] == 8
    steps = [[own["step"] for own in read_lines(path)] for path in tmp_path.rglob("metrics.jsonl")]
    assert steps == [list(range(1, 9))] * 3


@needs_ray
def test_a_folder_that_a_host_does_not_see_is_named_before_anything_runs(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr("repro.run.several_ranks.ray_pool._seen", sees_nothing)
    with pytest.raises(ValueError, match=r"--runs .*: .* does not see it; hosts need a shared"):
        join_cluster(tmp_path, {"num_cpus": 1})
    assert not list(tmp_path.iterdir())


def sees_nothing(file):
    return False, {"place": "node-b"}


@needs_ray
def test_more_than_the_cluster_has_is_refused(cluster, tmp_path):
    with pytest.raises(ValueError, match=r"num_gpus is 0 in all; a run needs 2"):
        join_cluster(tmp_path, {"num_gpus": 2})


@needs_ray
def test_without_a_cluster_the_line_that_starts_one_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(line(tmp_path)) != 0
    assert "ray start --head" in capsys.readouterr().err


@pytest.mark.skipif(INSTALLED, reason="ray is installed")
def test_without_ray_its_package_is_named(tmp_path, capsys):
    assert main(line(tmp_path)) != 0
    assert "pip install 'qerl-repro[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--workers", "1"], "--workers 1: a Ray cluster has its own room"),
        (["--devices", "1"], "--devices 1: a Ray cluster has its own room"),
    ],
)
def test_what_a_cluster_decides_is_left_out(tmp_path, capsys, words, reason):
    assert main(line(tmp_path, *words)) != 0
    assert reason in capsys.readouterr().err
