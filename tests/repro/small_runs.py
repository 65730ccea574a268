"""Runs of a small arm on a scale of the caller's, for tests that train."""

from __future__ import annotations

from typing import Any

from repro.spec.config import Arm, RunConfig, TrainScale


def small_run(
    scale: TrainScale, *, seed: int = 0, procedure: str = "train", **arm: Any
) -> RunConfig:
    """Return a smoke run, of no target, of an arm with LoRA of rank 4 and the named fields."""
    fields = {"name": "test", "label": "test", "lora_rank": 4, "lora_alpha": 8.0} | arm
    return RunConfig(
        target="test",
        target_version=1,
        tier="smoke",
        procedure=procedure,
        arm=Arm(**fields),
        scale=scale,
        seed=seed,
    )
