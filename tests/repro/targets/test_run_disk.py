"""The disk that a run is said to need, against folders that real runs of the smoke tier left."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from repro.evidence.record import record_path
from repro.keep.keeper import Keeping
from repro.run.carry_out import carry_out
from repro.run.preflight import disk_refusal
from repro.spec.config import RunConfig
from repro.spec.shapes import OWN_SHAPES, SHAPES
from repro.spec.target import Cost, plan
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.run_disk import completions_bytes, left_bytes, working_bytes
from tests.repro.recorded_smoke import SMALL

TINY = OWN_SHAPES["tiny"]
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_COMPLETIONS", "1")
        assert Keeping.from_environment().completions
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
    completions = bytes_in(folder / "completions")
    stays = bytes_in(folder) - checkpoints - completions + record.stat().st_size
    assert left_bytes(run.arm, run.scale, TINY) == pytest.approx(stays, rel=0.25)


def test_completions_follow_from_rows_and_tokens(left: tuple[RunConfig, Path, Path]) -> None:
    from pyarrow import parquet

    run, folder, _ = left
    files = sorted((folder / "completions").glob("*.parquet"))
    tokens = [n for path in files for n in parquet.read_table(path)["tokens"].to_pylist()]
    predicted = completions_bytes(run.arm, run.scale, round(sum(tokens) / len(tokens)))
    assert predicted == pytest.approx(bytes_in(folder / "completions"), rel=0.25)


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


def test_the_disk_of_a_target_is_its_arms_own_and_completions_where_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost: Cost = TABLE1.costs[Tier.PAPER]
    shape = SHAPES["7b"]
    arms = ["bf16", "bf16_lora", "nvfp4_lora"]
    each = [left_bytes(TABLE1.arm(name), PAPER, shape) for name in arms]
    working = working_bytes(TABLE1.arm("bf16_lora"), PAPER, shape)
    assert cost.disk_of(arms, 1) == sum(each) + working
    assert cost.disk_of(arms, 2) == sum(each) + 2 * working
    more = cost.disk_of(arms, 1, completions=True) - cost.disk_of(arms, 1)
    assert more == 2 * cost.completions_of_arm["bf16_lora"]
    assert more > 2 * PAPER.steps
    free = cost.disk_of(arms, 1) + more // 2
    cost = dataclasses.replace(cost, downloads=())
    monkeypatch.setattr("repro.run.preflight.free_bytes", lambda folder: free)
    assert disk_refusal(cost, arms, 1, tmp_path) is None
    refused = disk_refusal(cost, arms, 1, tmp_path, completions=True)
    assert refused is not None
    assert "GB are free" in refused
