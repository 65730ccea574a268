"""The disk that a run is said to need, against folders that real runs of the smoke tier left."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from repro.evidence.record import record_path
from repro.run.carry_out import carry_out
from repro.run.preflight import disk_refusal
from repro.run.run_disk import disk_bytes, left_bytes, working_bytes
from repro.spec.config import RunConfig
from repro.spec.shapes import SHAPES, TINY
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.recorded_smoke import SMALL

TABLE1 = find("table1")
PAPER = TABLE1.scales[Tier.PAPER]


def bytes_in(folder: Path, pattern: str = "**/*") -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())


@pytest.fixture(scope="module", params=["bf16_lora", "bf16_full"])
def left(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunConfig, Path, Path]:
    """Return a run, its folder as it is before the checkpoints go, and its record."""
    (run,) = plan(SMALL, Tier.SMOKE, 1, [request.param])
    scale = dataclasses.replace(run.scale, steps=3, checkpoint_every=1)
    run = dataclasses.replace(run, scale=scale)
    folder = tmp_path_factory.mktemp(request.param)
    carry_out([run], folder / "run", folder / "runs", lambda *messages: None, bool, 1)
    return run, folder / "run", record_path(run, folder / "runs")


def test_what_a_run_leaves_and_takes_meanwhile_follows_from_its_shapes(
    left: tuple[RunConfig, Path, Path],
) -> None:
    run, folder, record = left
    checkpoints = bytes_in(folder / "checkpoint")
    snapshots = len(list((folder / "checkpoint").glob("step-*")))
    assert snapshots == 2
    # While the next one is written there are three.
    assert working_bytes(run.arm, run.scale, TINY) == pytest.approx(checkpoints * 3 / 2, rel=0.25)
    stays = bytes_in(folder) - checkpoints + record.stat().st_size
    assert left_bytes(run.arm, run.scale, TINY) == pytest.approx(stays, rel=0.25)


def test_a_7b_run_takes_what_adapter_and_moments_take() -> None:
    arm, shape = TABLE1.arm("nvfp4_lora_aqn"), SHAPES["7b"]
    trained = shape.adapter_parameters(arm.lora_rank)
    plain = dataclasses.replace(PAPER, optimizer=dataclasses.replace(PAPER.optimizer, name="adamw"))
    assert working_bytes(arm, plain, shape) == 3 * 12 * trained
    # Moments in 8 bits take a quarter of those in 32, and a share of a scale.
    assert 6 * trained < working_bytes(arm, PAPER, shape) / 3 < 6.1 * trained
    assert 4 * trained < left_bytes(arm, PAPER, shape) < 4.1 * trained
    assert left_bytes(TABLE1.arm("bf16_full"), PAPER, shape) > 2 * shape.parameters()
    assert left_bytes(TABLE1.arm("bf16"), PAPER, shape) < 1e6


def test_the_disk_of_runs_is_what_each_leaves_and_what_those_at_work_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = plan(TABLE1, Tier.PAPER, 1, ["bf16", "bf16_lora", "nvfp4_lora"])
    needs = dataclasses.replace(TABLE1.needs_at(Tier.PAPER), downloads=())
    shape = SHAPES["7b"]
    each = [left_bytes(run.arm, PAPER, shape) for run in runs]
    working = working_bytes(TABLE1.arm("bf16_lora"), PAPER, shape)
    assert disk_bytes(runs, needs, 1) == sum(each) + working
    assert disk_bytes(runs, needs, 2) == sum(each) + 2 * working
    free = sum(each) + working
    monkeypatch.setattr("repro.run.preflight.free_bytes", lambda folder: free)
    assert disk_refusal(needs, runs, 1, tmp_path) is None
    refused = disk_refusal(needs, runs, 2, tmp_path)
    assert refused is not None
    assert "GB are free" in refused
