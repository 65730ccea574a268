"""The throughput procedure's protocol, as far as a machine without a GPU can show it."""

from pathlib import Path

import pytest
import torch

from repro.evidence.verdicts.expectation import load_bars
from repro.spec.throughput_scale import ThroughputPoint, ThroughputScale
from repro.spec.tier import Tier
from repro.targets import find

EXPECTED = Path(__file__).parents[3] / "expected"
PAPER = ("table5", "table6", "table7", "table8", "table9", "figure11")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there; it would measure")
@pytest.mark.parametrize("name", ["rollout", "table6", "table9", "figure11", "memory"])
def test_without_a_gpu_a_sentence_says_what_is_missing(name):
    assert "CUDA device" in find(name).not_runnable(Tier.SYSTEMS)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batches": ()}, "point 7b: .*batches"),
        ({"windows": -1}, "windows is -1"),
        ({"windows": 2, "window_steps": 0}, "window_steps is 0"),
        ({"windows": 4, "new_tokens": 64}, "63 steps"),
    ],
)
def test_a_point_that_cannot_be_is_refused(values, words):
    with pytest.raises(ValueError, match=words):
        ThroughputPoint(name="7b", shape="qwen2.5-7b", **values)


@pytest.mark.parametrize("windows", [0, 4])
def test_a_cell_that_is_not_timed_by_windows_is_not_compared_with_a_whole_one(windows):
    point = ThroughputPoint(name="7b", shape="qwen2.5-7b", batches=(1,), windows=windows)
    with pytest.raises(ValueError, match="windows"):
        ThroughputScale(points=(point,), whole=(("nvfp4_lora", "7b", 1 + windows),))


@pytest.mark.parametrize("name", PAPER)
def test_every_cell_of_the_paper_is_estimated_and_one_of_each_format_rolled_out_whole(name):
    target = find(name)
    scale = target.scales[Tier.SYSTEMS]
    metrics = {metric.name for metric in target.metrics}
    for point in scale.points:
        assert (point.prompt_tokens, point.new_tokens) == (256, 2048)
        assert point.windows
        assert {f"tokens_per_second_{point.name}_{batch}" for batch in point.batches} <= metrics
    formats = {(arm.weight_format, arm.name in scale.bitsandbytes) for arm in target.arms}
    whole = [target.arm(arm) for arm, _, _ in scale.whole]
    assert {(arm.weight_format, arm.name in scale.bitsandbytes) for arm in whole} == formats
    bars = {(bar.arm, bar.metric) for bar in load_bars(EXPECTED, "systems", name)}
    assert {(arm, f"window_gain_{point}_{batch}") for arm, point, batch in scale.whole} == bars
