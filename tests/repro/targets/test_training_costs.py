"""What a run on a published checkpoint is thought to take, held against runs that were timed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from repro.run import select as selecting
from repro.run.select import select
from repro.spec.config import TrainScale
from repro.spec.shapes import SHAPES
from repro.spec.tier import CudaDevice, Tier
from repro.targets import find
from repro.targets.step_costs import H100
from repro.targets.training_costs import run_seconds

# Of one H100 80GB at 9f3b23d: random weights of 7B's shape in 16 bits, three steps of 64 prompts of
# 160 tokens with 8 completions of 300, 32 test problems, loading included.
MEASURED = {"bf16_lora": 157.0, "nf4_lora": 141.0, "nvfp4_lora_aqn": 145.0}


def three_steps() -> TrainScale:
    scale: TrainScale = find("table1").scales[Tier.PAPER]
    return dataclasses.replace(
        scale,
        steps=3,
        updates_per_rollout=1,
        prompts_per_rollout=64,
        data=dataclasses.replace(scale.data, test_problems=32),
        rollout=dataclasses.replace(scale.rollout, max_new_tokens=300),
    )


@pytest.mark.parametrize("arm", list(MEASURED))
def test_timed_runs_took_what_was_predicted_within_15_percent(arm: str) -> None:
    seconds = run_seconds(find("table1").arm(arm), three_steps(), SHAPES["7b"], H100)
    assert MEASURED[arm] == pytest.approx(seconds, rel=0.15)


def test_a_folder_is_read_as_large_as_it_is(tmp_path: Path) -> None:
    arm = find("table1").arm("nvfp4_lora")
    named = three_steps()
    (tmp_path / "model.safetensors").write_bytes(bytes(2 * 10**6))
    folder = dataclasses.replace(named, checkpoint=str(tmp_path))
    saved = run_seconds(arm, named, SHAPES["7b"]) - run_seconds(arm, folder, SHAPES["7b"])
    # Read twice, a second a gigabyte.
    assert saved == pytest.approx(2 * (2 * SHAPES["7b"].parameters() - 2e6) / 1e9)


@pytest.mark.parametrize(
    ("target", "tier", "device", "named"),
    [
        ("table1", "paper", None, "one NVIDIA H200"),
        ("table1", "paper", "NVIDIA H100 80GB HBM3", "one NVIDIA H100"),
        ("table1", "paper", "NVIDIA H200", "one NVIDIA H200"),
        ("table1", "paper", "NVIDIA A100-SXM4-80GB", "one NVIDIA H200"),
        ("table1_1_5b", "mini", None, "a consumer card of 24 GB"),
        ("table1_1_5b", "mini", "NVIDIA H100 80GB HBM3", "one NVIDIA H100"),
    ],
)
def test_a_plan_is_made_for_the_device_that_is_here(
    target: str, tier: str, device: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = (
        []
        if device is None
        else [CudaDevice(name=device, capability=(9, 0), memory_bytes=85 * 10**9)]
    )
    monkeypatch.setattr(selecting, "cuda_devices", lambda: devices)
    (selection,) = select([target], tier=tier)
    assert named in selection.source.costs[selection.tier].basis
