"""Points are measured one by one: what is told of each, and what does not fit or fails."""

import contextlib
import dataclasses
import types
from unittest.mock import Mock

import pytest
import torch

from repro.evidence.not_run import needs
from repro.evidence.procedure import Stopped
from repro.evidence.receipts.device import SLOWED_MOST, SPOILING
from repro.measure import step_measure, step_metrics
from repro.measure.step_metrics import PointResult, metrics_of
from repro.measure.step_time import measured_steps
from repro.models.memory_plan import plan_memory
from repro.spec.shapes import SHAPES
from repro.spec.step_scale import StepScale
from repro.targets.steps import NF4, NVFP4, RELEASED
from tests.repro.measure.conftest import POINT, bench_of, measured_at

NEEDS = "needs 85.5 of 80.0 GiB by the allocator, at least"


@pytest.fixture
def bench():
    return bench_of(StepScale(points=(POINT,), warm_up=1, warm_up_tokens=4, steps=2))


@pytest.mark.usefixtures("host_clock")
def test_a_stop_ends_a_point_between_two_steps(policy, bench):
    asked = iter([False, True])
    stopping = dataclasses.replace(bench, should_stop=lambda: next(asked))
    entry = PointResult()
    with pytest.raises(Stopped):
        step_measure._measure(stopping, NVFP4, POINT, policy, 10**10, entry)
    assert len(entry.repeats) == 1


@pytest.mark.usefixtures("host_clock")
def test_the_updates_share_of_the_devices_rate_is_a_fact_and_each_step_is_shown(policy, bench):
    lines: list[str] = []
    bench = dataclasses.replace(bench, progress=lambda line, values: lines.append(line))
    assert "update_share" not in measured_at(bench, NVFP4, POINT, policy).facts
    assert [line.split(":")[0] for line in lines] == ["small nvfp4"] * 2
    assert "%" not in lines[0]
    rated = measured_at(dataclasses.replace(bench, product_rate=2e12), NVFP4, POINT, policy)
    last, facts = rated.repeats[-1], rated.facts
    flop = SHAPES["0.5b"].update_flop(2, 4, 20, 4 * 24, kept=facts["kept_blocks"])
    assert facts["product_tflops"] == 2
    assert facts["update_share"] == pytest.approx(flop / last["update"] / 2e12)
    assert lines[-1] == (
        f"small nvfp4: rollout {last['rollout']:.1f} s, update {last['update']:.1f} s "
        f"({100 * facts['update_share']:.0f} % of 2 TFLOP/s), step {last['total']:.1f} s"
    )
    planned = step_measure.step_shape(POINT, NVFP4, bench.scale, 10**10)
    one, two = (  # two GPUs complete twice as many tokens in the time, each has one's share
        step_metrics.share_facts(planned, {"update": 2.0, "completion_tokens": ranks * 96}, 2e12,
                                 ranks, full=False)
        for ranks in (1, 2)
    )  # fmt: skip
    assert one == two


@pytest.mark.usefixtures("host_clock")
def test_the_worst_share_of_lowered_clocks_is_told_of_an_arm_and_its_baseline(
    policy, bench, monkeypatch
):
    counts = iter([0, 0, 0, int(1e9)])
    monkeypatch.setattr(step_metrics, "copy_rate", lambda: 1e12)
    monkeypatch.setattr(step_measure, "slowed_us", lambda: dict.fromkeys(SPOILING, next(counts)))
    bench.results["small", "nvfp4"] = measured_at(bench, NVFP4, POINT, policy)
    bench.results["small", "nf4"] = bench.results["small", "nvfp4"]
    measured = measured_steps(NF4, [NVFP4, NF4], [POINT], bench.results)
    assert measured.facts["timed_slowed"]["sw_thermal_slowdown"] > SLOWED_MOST


@pytest.mark.usefixtures("host_clock")
def test_a_point_of_memory_alone_takes_two_micro_batches_after_the_warm_up(policy, passes):
    point = dataclasses.replace(
        POINT, memory_only=True, sampled_tokens=10, group=4, micro_tokens=100
    )
    entry = measured_at(bench_of(StepScale(points=(point,))), NVFP4, point, policy)
    # At most 100 tokens, a prompt once in each; the optimiser's moments are of the warm-up's pass.
    assert [[len(piece) for piece in made.plan.pieces] for made in passes] == [[3], [3, 2]]
    assert entry.facts["moved"] > 0
    assert entry.facts["slots"] == 8
    # On a CPU there is no peak, so nothing to hold the plan to.
    assert set(metrics_of(point, entry, {})) == {"peak_bytes_small"}


def without_a_device(monkeypatch, budget_bytes):
    """Let points have a budget where there is no device."""

    @contextlib.contextmanager
    def budget(point):
        yield budget_bytes

    monkeypatch.setattr(step_measure, "require_clean", lambda: None)
    monkeypatch.setattr(step_measure, "_budget", budget)


@pytest.mark.usefixtures("host_clock")
@pytest.mark.parametrize(
    "error",
    [ValueError("planted\nmore"), torch.OutOfMemoryError("planted")],
    ids=["fault", "memory"],
)
def test_a_point_that_fails_costs_no_other(policy, monkeypatch, error):
    def fails_once(bench, arm, point, *rest):
        if point is POINT:
            raise error
        return measure(bench, arm, point, *rest)

    measure = step_measure._measure
    without_a_device(monkeypatch, 10**10)
    monkeypatch.setattr(step_measure, "_measure", fails_once)
    monkeypatch.setattr(step_measure, "build_policy", lambda *a: policy)
    monkeypatch.setattr(step_measure, "needs_by_allocator", lambda error: NEEDS)
    monkeypatch.setattr(step_metrics, "copy_rate", lambda: 1e12)
    points = [POINT, dataclasses.replace(POINT, name="other")]
    bench = bench_of(StepScale(points=tuple(points), warm_up_tokens=4, steps=2))
    step_measure.measure_points(bench, NVFP4, points)
    memory = isinstance(error, torch.OutOfMemoryError)
    assert bench.failures == ([] if memory else ["small nvfp4: ValueError: planted"])
    measured = measured_steps(NVFP4, [NVFP4], points, bench.results)
    assert measured.facts["out_of_memory"] == ([f"small nvfp4: {NEEDS}"] if memory else [])
    assert "update_seconds_other" in measured.metrics
    assert not [name for name in measured.metrics if name.endswith("_small")]


def test_a_point_that_the_plan_leaves_no_hope_is_not_tried(bench, monkeypatch):
    planned = step_measure.step_shape(POINT, NVFP4, bench.scale, 10**10)
    least = plan_memory(dataclasses.replace(planned, slots=1, micro_tokens=44, kept_blocks=0)).peak
    build = Mock(side_effect=ValueError("planted"))
    without_a_device(monkeypatch, least)
    monkeypatch.setattr(step_measure, "build_policy", build)
    step_measure.measure_points(bench, NVFP4, [POINT])
    without_a_device(monkeypatch, least // 2)
    step_measure.measure_points(bench, RELEASED, [POINT])
    # Of products without a plan nothing is known.
    assert [tried.args[0] for tried in build.call_args_list] == [NVFP4, RELEASED]
    step_measure.measure_points(bench, NVFP4, [POINT])
    assert build.call_count == 2
    said = bench.results["small", "nvfp4"].out_of_memory
    assert said == needs(least, least // 2, "by the plan")


@pytest.mark.parametrize(("in_use", "left"), [(100 << 20, 854 << 20), (900 << 20, 900 << 20)])
def test_a_budget_leaves_room_for_a_full_grown_context(in_use, left, monkeypatch):
    card = types.SimpleNamespace(total_memory=100 << 30)
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(step_measure, "context_bytes", lambda: in_use)
    monkeypatch.setattr(step_measure, "release", lambda: None)
    with step_measure._budget(dataclasses.replace(POINT, budget_bytes=10 << 30)) as budget:
        assert budget == 10 << 30
    assert shares == [pytest.approx(((10 << 30) - left) / (100 << 30)), 1.0]
