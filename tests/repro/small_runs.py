"""For tests that train: runs of a small arm on the caller's scale, and rewards by the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from repro.reward.score import Rewards
from repro.spec.config import Arm, RunConfig, TrainScale, derive_seed


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


def rewards_of(texts: Sequence[str], accuracy: list[float | None]) -> Rewards:
    """Return rewards of these accuracies; the format of about half the texts is right."""
    formats = [float(derive_seed(text, "format") % 2) for text in texts]
    return Rewards(
        accuracy=accuracy,
        format=formats,
        total=[(a or 0.0) + 0.2 * f for a, f in zip(accuracy, formats, strict=True)],
        lenient_accuracy=accuracy,
        soft_format=formats,
        statuses=["ok"] * len(texts),
    )
