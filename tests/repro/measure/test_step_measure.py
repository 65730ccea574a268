"""Points are measured one by one: what is repeated, given up for memory, or fails."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.evidence.not_run import needs
from repro.evidence.receipts.device import SLOWED_MOST, SPOILING
from repro.measure import step_measure, step_metrics, step_time
from repro.measure.fresh_process import LeftOut
from repro.measure.step_measure import Bench
from repro.measure.step_metrics import StepResults, metrics_of
from repro.models.memory_plan import plan_memory
from repro.models.policy import Policy
from repro.reward.grader import GraderPool
from repro.rl.single_run import policy as single
from repro.rollout.engine import Engine
from repro.spec.shapes import SHAPES
from repro.spec.step_scale import StepArm, StepPoint, StepScale
from repro.targets.steps import BF16, NF4, NVFP4, RELEASED
from tests.repro.measure.conftest import bench_of

POINT = StepPoint(
    name="small", model="0.5b", prompts=2, group=2, prompt_tokens=20, completion_tokens=24,
    sampled_tokens=10,
)  # fmt: skip
NEEDS = "needs 85.5 of 80.0 GiB by the allocator, at least"


@pytest.fixture
def bench(tmp_path: Path, pool: GraderPool) -> Bench:
    scale = StepScale(points=(POINT,), warm_up=1, warm_up_tokens=4, steps=2)
    return bench_of(scale, pool, tmp_path)


def repeats(bench: Bench, policy: Policy, point: StepPoint = POINT) -> dict[str, Any]:
    assert step_measure._measure(bench, NVFP4, point, policy, 10**10)
    return bench.results.entry(NVFP4, point)


@pytest.mark.usefixtures("host_clock")
def test_a_stop_ends_a_point_between_two_steps(policy: Policy, bench: Bench) -> None:
    asked = iter([False, True])
    stopping = dataclasses.replace(bench, should_stop=lambda: next(asked))
    assert not step_measure._measure(stopping, NVFP4, POINT, policy, 10**10)
    assert bench.results.missing(NVFP4, POINT) == 1


def test_a_point_that_does_not_fit_is_known_to_the_next_process_and_what_was_timed_is_not(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.results.add(NVFP4, POINT, {"total": 1.0}, {})
    bench.results.out_of_memory(BF16, POINT, NEEDS)
    again = StepResults(bench.scale.steps, LeftOut(tmp_path))
    assert again.missing(NVFP4, POINT) == 2
    assert again.missing(BF16, POINT) == 0
    assert again.entry(BF16, POINT)["out_of_memory"] == NEEDS
    assert again.not_fitting == 1
    monkeypatch.setattr("repro.measure.fresh_process.source_digest", lambda: "another")
    assert LeftOut(tmp_path).sentences == {}


@pytest.mark.usefixtures("host_clock")
def test_the_updates_share_of_the_devices_rate_is_a_fact_and_each_step_is_shown(
    policy: Policy, bench: Bench, tmp_path: Path
) -> None:
    lines: list[str] = []
    point = dataclasses.replace(POINT, sampled_tokens=0)
    bench = dataclasses.replace(bench, progress=lambda line, values: lines.append(line))
    assert "update_share" not in repeats(bench, policy)["facts"]
    assert [line.split(":")[0] for line in lines] == ["small nvfp4"] * 2
    assert "%" not in lines[0]
    assert "rollout" not in lines[0]  # of a part of its tokens
    fresh = StepResults(bench.scale.steps, LeftOut(tmp_path))
    rated = repeats(dataclasses.replace(bench, product_rate=2e12, results=fresh), policy, point)
    last, facts = rated["repeats"][-1], rated["facts"]
    flop = SHAPES["0.5b"].update_flop(2, 4, 20, 4 * 24, kept=facts["kept_blocks"])
    assert facts["product_tflops"] == 2
    assert facts["update_share"] == pytest.approx(flop / last["update"] / 2e12)
    assert lines[-1] == (
        f"small nvfp4: rollout {last['rollout']:.1f} s, update {last['update']:.1f} s "
        f"({100 * facts['update_share']:.0f} % of 2 TFLOP/s), step {last['total']:.1f} s"
    )


def planted_clocks(monkeypatch: pytest.MonkeyPatch, hot: list[bool]) -> None:
    """Let heat lower the clocks all through the timed steps that `hot` names, in order."""
    spent = iter([us for one in hot for us in (0, int(1e9) * one)])
    counts = dict.fromkeys(SPOILING, 0)

    def count() -> dict[str, int]:
        counts["sw_thermal_slowdown"] += next(spent)
        return dict(counts)

    monkeypatch.setattr(step_measure, "slowed_us", count)


@pytest.mark.usefixtures("host_clock")
def test_a_repeat_under_lowered_clocks_is_timed_again_with_the_same_rows(
    policy: Policy, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_clocks(monkeypatch, [False, True, True, False])
    steps = []

    def noted(t: Any, state: Any, waves: int) -> Any:
        steps.append(state.step)
        return timed_step(t, state, waves)

    timed_step = step_measure.timed_step
    monkeypatch.setattr(step_measure, "timed_step", noted)
    monkeypatch.setattr(step_metrics, "copy_rate", lambda: 1e12)
    entry = repeats(bench, policy)
    assert steps == [1, 2, 2, 2]
    assert len(entry["repeats"]) == 2
    assert bench.timed_again == {"small nvfp4": 2}
    measured = step_time.measured_steps(NVFP4, [NVFP4], bench.scale, bench.results)
    assert measured.effects["timed_slowed"] == dict.fromkeys(SPOILING, 0)


@pytest.mark.usefixtures("host_clock")
def test_a_card_that_stays_hot_says_so_and_so_does_an_arm_that_is_held_against_it(
    policy: Policy, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_clocks(monkeypatch, [True] * 5)
    monkeypatch.setattr(step_metrics, "copy_rate", lambda: 1e12)
    assert len(repeats(bench, policy)["repeats"]) == 2
    assert bench.timed_again == {"small nvfp4": 3}
    measured = step_time.measured_steps(NF4, [NVFP4, NF4], bench.scale, bench.results)
    assert measured.effects["timed_slowed"]["sw_thermal_slowdown"] > SLOWED_MOST


class ScarceEngine(Engine):
    """An engine for which the device has room for two rows."""

    most = 2

    def __init__(self, policy: Policy, config: Any) -> None:
        if config.slots > self.most:
            raise torch.OutOfMemoryError("planted")
        super().__init__(policy, config)


@pytest.mark.usefixtures("host_clock")
def test_a_point_of_memory_alone_takes_two_micro_batches_and_no_warm_up(
    policy: Policy, bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def counted(*args: Any, **settings: Any) -> Any:
        output, tokens = accumulate_step(*args, **settings)
        seen.append([len(piece) for piece in output.plan.pieces])
        return output, tokens

    accumulate_step = single.accumulate_step
    monkeypatch.setattr(single, "accumulate_step", counted)
    point = dataclasses.replace(POINT, memory_only=True, group=4, micro_tokens=100)
    scale = dataclasses.replace(bench.scale, steps=1)
    results = StepResults(1, LeftOut(tmp_path))
    entry = repeats(dataclasses.replace(bench, scale=scale, results=results), policy, point)
    assert seen == [[3, 2]]  # two micro-batches of at most 100 tokens, a prompt once in each
    assert entry["facts"]["moved"] > 0
    assert entry["facts"]["slots"] == 8
    assert not point.whole
    # On a CPU there is no peak, so nothing to hold the plan to.
    assert set(metrics_of(point, entry, None)) == {"peak_bytes_small"}


def without_a_device(monkeypatch: pytest.MonkeyPatch, budget_bytes: int) -> None:
    """Let points have a budget where there is no device."""

    @contextlib.contextmanager
    def budget(point: StepPoint) -> Iterator[int]:
        yield budget_bytes

    monkeypatch.setattr(step_measure, "require_clean", lambda finished: None)
    monkeypatch.setattr(step_measure, "_budget", budget)


@pytest.mark.usefixtures("host_clock")
def test_a_point_that_fails_costs_no_other(
    policy: Policy, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_once(bench: Bench, arm: StepArm, point: StepPoint, *rest: Any) -> bool:
        if point is POINT:
            raise ValueError("planted\nmore")
        return measure(bench, arm, point, *rest)

    measure = step_measure._measure
    without_a_device(monkeypatch, 10**10)
    monkeypatch.setattr(step_measure, "_measure", fails_once)
    monkeypatch.setattr(step_measure, "build_policy", lambda *a: policy)
    monkeypatch.setattr(step_metrics, "copy_rate", lambda: 1e12)
    other = dataclasses.replace(POINT, name="other")
    scale = dataclasses.replace(bench.scale, points=(POINT, other))
    bench = dataclasses.replace(bench, scale=scale)
    assert step_measure.measure_points(bench, NVFP4, [POINT, other])
    assert bench.failures == ["small nvfp4: ValueError: planted"]
    assert bench.results.missing(NVFP4, POINT) == 2
    result = step_time.measured_steps(NVFP4, [NVFP4], scale, bench.results)
    assert "update_seconds_other" in result.metrics
    assert not [name for name in result.metrics if name.endswith("_small")]


def test_a_policy_that_cannot_be_built_is_out_of_memory_or_a_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(arm: StepArm, *rest: Any) -> Policy:
        try:
            raise torch.OutOfMemoryError("planted")
        finally:
            if arm is NVFP4:
                raise RuntimeError("the capture could not be ended")

    def fails(*args: Any) -> Policy:
        raise ValueError("planted")

    without_a_device(monkeypatch, 10**10)
    monkeypatch.setattr(step_measure, "build_policy", build)
    monkeypatch.setattr(step_measure, "needs_by_allocator", lambda error: NEEDS)
    for arm in (NVFP4, BF16):
        assert step_measure.measure_points(bench, arm, [POINT])
        assert bench.results.entry(arm, POINT)["out_of_memory"] == f"{NEEDS}, for the weights alone"
    assert bench.failures == []
    monkeypatch.setattr(step_measure, "build_policy", fails)
    assert step_measure.measure_points(bench, NF4, [POINT])
    assert bench.failures == ["small nf4: ValueError: planted"]


@pytest.mark.usefixtures("host_clock")
def test_out_of_memory_falls_back_to_fewer_slots_with_the_same_step(
    bench: Bench,
    fresh_policy: Callable[[], Policy],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    plenty = repeats(bench, fresh_policy())
    assert plenty["facts"]["slot_fallbacks"] == []
    monkeypatch.setattr(step_measure, "Engine", ScarceEngine)
    monkeypatch.setattr(step_measure, "needs_by_allocator", lambda error: NEEDS)
    results = StepResults(bench.scale.steps, LeftOut(tmp_path))
    scarce = repeats(dataclasses.replace(bench, results=results), fresh_policy())
    assert scarce["facts"]["slot_fallbacks"] == [4]
    assert scarce["facts"]["slots"] == 2
    assert scarce["facts"]["generated_tokens"] == plenty["facts"]["generated_tokens"]
    assert [r["grad_norm"] for r in scarce["repeats"]] == pytest.approx(
        [r["grad_norm"] for r in plenty["repeats"]], rel=1e-4
    )


@pytest.mark.usefixtures("host_clock")
def test_a_point_for_which_one_slot_is_too_much_says_so(
    policy: Policy, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScarceEngine, "most", 0)
    monkeypatch.setattr(step_measure, "Engine", ScarceEngine)
    monkeypatch.setattr(step_measure, "needs_by_allocator", lambda error: NEEDS)
    entry = repeats(bench, policy)
    assert entry["repeats"] == []
    assert "[4, 2, 1] rows" in entry["out_of_memory"]
    assert bench.results.missing(NVFP4, POINT) == 0
    scale = dataclasses.replace(bench.scale, baseline=None)
    result = step_time.measured_steps(NVFP4, [NVFP4], scale, bench.results)
    assert result.metrics == {}
    assert result.effects["out_of_memory"] == [f"small nvfp4: {NEEDS}, with [4, 2, 1] rows at once"]


def test_a_point_that_the_plan_leaves_no_hope_is_not_tried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = step_measure.step_shape(POINT, "nvfp4", 32, bench.scale, 10**10)
    least = plan_memory(dataclasses.replace(planned, slots=1, micro_tokens=44, kept_blocks=0)).peak
    tried: list[str] = []

    def build(arm: StepArm, *rest: Any) -> Policy:
        tried.append(arm.name)
        raise ValueError("planted")

    without_a_device(monkeypatch, least)
    monkeypatch.setattr(step_measure, "build_policy", build)
    assert step_measure.measure_points(bench, NVFP4, [POINT])
    without_a_device(monkeypatch, least // 2)
    assert step_measure.measure_points(bench, RELEASED, [POINT])
    assert tried == [NVFP4.name, RELEASED.name]  # of products without a plan nothing is known
    assert step_measure.measure_points(bench, NVFP4, [POINT])
    assert len(tried) == 2
    said = bench.results.entry(NVFP4, POINT)["out_of_memory"]
    assert said == needs(least, least // 2, "by the plan")


@pytest.mark.parametrize(("in_use", "left"), [(100 << 20, 854 << 20), (900 << 20, 900 << 20)])
def test_a_budget_leaves_room_for_a_full_grown_context(
    in_use: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = types.SimpleNamespace(total_memory=100 << 30)
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(step_measure, "context_bytes", lambda: in_use)
    monkeypatch.setattr(step_measure, "release", lambda: None)
    with step_measure._budget(dataclasses.replace(POINT, budget_bytes=10 << 30)) as budget:
        assert budget == 10 << 30
    assert shares == [pytest.approx(((10 << 30) - left) / (100 << 30)), 1.0]
