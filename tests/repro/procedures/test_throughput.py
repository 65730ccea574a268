"""The throughput procedure's protocol, as far as a machine without a GPU can show it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from repro.evidence.expectation import load_expectations
from repro.procedures import procedure_named
from repro.spec.target import plan
from repro.spec.throughput import ThroughputPoint
from repro.spec.tier import Tier
from repro.targets import find

EXPECTED = Path(__file__).parents[3] / "expected"
NAMES = ("rollout", "rollout_scheduling")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there; it would measure")
@pytest.mark.parametrize("name", ["rollout", "table6", "table9", "figure11"])
def test_without_a_gpu_a_sentence_says_what_is_missing(name: str, tmp_path: Path) -> None:
    target = find(name)
    reason = target.not_runnable(Tier.SYSTEMS)
    assert reason is not None
    assert "CUDA device" in reason
    run = plan(target, Tier.SYSTEMS, seeds=1)[0]
    with pytest.raises(RuntimeError, match="measured on a CUDA device of compute capability"):
        procedure_named(run.procedure)(
            run,
            folder=tmp_path,
            progress=lambda text, values: None,
            should_stop=lambda: False,
            threads=1,
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_bar_names_a_metric_and_an_arm_of_its_target(name: str) -> None:
    target = find(name)
    metrics = {metric.name for metric in target.metrics}
    arms = {arm.name for arm in target.arms}
    bars = load_expectations(EXPECTED, "systems", name)
    assert bars
    for bar in bars:
        assert bar.metric in metrics
        assert bar.arm in arms
        assert bar.goal is None or bar.holds(bar.goal)


def test_the_bars_stand_above_what_vllm_reaches() -> None:
    bars = {(b.arm, b.metric): b for b in load_expectations(EXPECTED, "systems", "rollout")}
    for point in ("7b", "32b"):
        for batch in (1, 8, 64, 256):
            ours = bars["nvfp4_lora", f"tokens_per_second_{point}_{batch}"].accept[0]
            theirs = bars["bf16_lora", f"tokens_per_second_{point}_{batch}"].accept[0]
            assert ours is not None
            assert theirs is not None
            assert ours > theirs


def test_a_point_without_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="throughput point 7b: it needs batches"):
        ThroughputPoint(name="7b", shape="qwen2.5-7b", batches=())
