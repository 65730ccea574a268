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
from repro.targets import find, training_costs
from repro.targets.step_costs import H100
from repro.targets.training_costs import run_seconds

# Of one H100 80GB, random weights, three steps of 64 prompts of 160 tokens (32B: 16) with 8
# completions of 300, 32 test problems, loading included: arm, shape, whether the folder was in
# NVFP4, prompts, seconds. Three at 9f3b23d, two at 87e4d34 (NVFP4 folder of 7B), the rest b60b0f6.
MEASURED = (
    ("bf16_lora", "7b", False, 64, 157.0),
    ("nf4_lora", "7b", False, 64, 141.0),
    ("nvfp4_lora_aqn", "7b", False, 64, 145.0),
    ("bf16_lora", "7b", False, 64, 168.0),
    ("nf4_lora", "7b", False, 64, 151.0),
    ("nvfp4_lora_aqn", "7b", False, 64, 141.0),
    ("nvfp4_lora_aqn", "7b", True, 64, 171.0),
    ("nvfp4_lora_aqn", "7b", True, 64, 170.0),
    ("nvfp4_lora_aqn", "32b", True, 16, 217.0),
)
# Of the folders in NVFP4.
STORED_BYTES = {"7b": 5_851_132_448, "32b": 20_669_675_008}


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


@pytest.mark.parametrize(("arm", "shape", "stored", "prompts", "measured"), MEASURED)
def test_timed_runs_took_what_is_predicted_within_15_percent(
    arm: str,
    shape: str,
    stored: bool,
    prompts: int,
    measured: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if stored:
        monkeypatch.setattr(training_costs, "_stored_bytes", lambda *_: STORED_BYTES[shape])
    scale = dataclasses.replace(three_steps(), prompts_per_rollout=prompts)
    seconds = run_seconds(find("table1").arm(arm), scale, SHAPES[shape], H100)
    assert measured == pytest.approx(seconds, rel=0.15)


def test_a_folder_is_read_as_large_as_it_is(tmp_path: Path) -> None:
    arm = find("table1").arm("nvfp4_lora")
    named = three_steps()
    (tmp_path / "model.safetensors").write_bytes(bytes(2 * 10**6))
    folder = dataclasses.replace(named, checkpoint=str(tmp_path))
    saved = run_seconds(arm, named, SHAPES["7b"]) - run_seconds(arm, folder, SHAPES["7b"])
    # Read twice, two gigabytes a second.
    assert saved == pytest.approx((2 * SHAPES["7b"].parameters() - 2e6) / 1e9)


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
