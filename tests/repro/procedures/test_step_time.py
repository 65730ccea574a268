"""A measured step does what training does: on a small shape, with the clock's events replaced."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from repro.models.memory_plan import plan_memory
from repro.models.policy import Policy, trainable_parameters
from repro.procedures import (
    procedure_named,
    step_ledger,
    step_measure,
    step_time,
)
from repro.procedures.step_ledger import StepLedger
from repro.procedures.step_metrics import metrics_of, series_of
from repro.procedures.step_phases import PHASES, Stepper, parameter_image
from repro.reward.grader import GraderPool
from repro.rollout.engine import Engine
from repro.spec.config import RunConfig
from repro.spec.step import StepArm, StepPoint, StepScale, step_arm
from repro.targets.memory import (
    CLAIM,
    MEMORY,
    MEMORY_BUDGETS,
    MEMORY_DENSE,
    MEMORY_FORMATS,
)
from repro.targets.steps import (
    BF16,
    FULL,
    NF4,
    NVFP4,
    POINTS_14B,
    RELEASED,
    STEP_TARGETS,
    TABLE3_POINTS,
)

POINT = StepPoint(
    name="small", model="0.5b", prompts=2, group=2, prompt_tokens=20, completion_tokens=24,
    sampled_tokens=10,
)  # fmt: skip


def make_stepper(policy: Policy, pool: GraderPool, point: StepPoint = POINT) -> Stepper:
    scale = StepScale(points=(point,), warm_up=1, warm_up_tokens=4)
    planned = step_measure.step_shape(point, "nvfp4", 16, scale, 10**10)
    engine = Engine(policy, step_measure.engine_config(point, planned))
    return Stepper.build(
        policy, engine, pool, point, scale, seed=0, micro_tokens=planned.micro_tokens
    )


@pytest.mark.usefixtures("host_clock")
def test_a_step_samples_grades_and_moves_every_trained_tensor(
    policy: Policy, pool: GraderPool
) -> None:
    stepper = make_stepper(policy, pool)
    before = {name: p.detach().clone() for name, p in trainable_parameters(policy).items()}
    image = parameter_image(policy)
    found = [stepper.step(number) for number in range(3)]
    assert stepper.engine.statistics.generated_tokens == 4 * 10
    assert max(step["grad_norm"] for step in found) > 0
    for name, parameter in trainable_parameters(policy).items():
        assert not torch.equal(parameter.detach(), before[name]), name
    assert not torch.equal(parameter_image(policy), image)


@pytest.mark.usefixtures("host_clock")
def test_the_sampler_and_the_packed_pass_agree_after_updates(
    policy: Policy, pool: GraderPool
) -> None:
    stepper = make_stepper(policy, pool)
    for number in range(3):
        assert stepper.step(number)["sampler_trainer_abs_diff_mean"] < 1e-5


@pytest.mark.usefixtures("host_clock")
@pytest.mark.parametrize(("prompt", "completion"), [(32, 96), (33, 70), (64, 64), (5, 27)])
def test_the_planned_cache_holds_every_row_without_preemption(
    policy: Policy, pool: GraderPool, prompt: int, completion: int
) -> None:
    point = dataclasses.replace(
        POINT, prompt_tokens=prompt, completion_tokens=completion, sampled_tokens=0, group=4
    )
    stepper = make_stepper(policy, pool, point)
    stepper.step(1)
    assert stepper.engine.statistics.generated_tokens == 8 * completion
    assert stepper.engine.statistics.preemptions == 0


@pytest.mark.usefixtures("host_clock")
def test_phases_fill_the_whole_step(policy: Policy, pool: GraderPool) -> None:
    found = make_stepper(policy, pool).step(0)
    assert sum(found[name] for name in PHASES) == pytest.approx(found["total"], rel=1e-6)
    assert found["rollout"] > 0
    assert found["update"] > 0


@pytest.mark.usefixtures("host_clock")
def test_a_warm_up_step_samples_few_tokens_and_updates_on_full_rows(
    policy: Policy, pool: GraderPool
) -> None:
    stepper = make_stepper(policy, pool)
    stepper.step(0)
    assert stepper.engine.statistics.generated_tokens == 4 * 4


def measured_entry(peak: int = 100) -> dict[str, Any]:
    repeats = [dict.fromkeys((*PHASES, "reward", "total"), 2.0 + i / 10) for i in range(3)]
    facts = {"generated_tokens": 100, "peak_bytes": peak, "predicted_bytes": 97}
    return {"repeats": repeats, "facts": facts, "out_of_memory": None}


STEPS_AND_MEMORY = (*STEP_TARGETS, MEMORY, MEMORY_DENSE, MEMORY_FORMATS, MEMORY_BUDGETS)


@pytest.mark.parametrize("target", STEPS_AND_MEMORY, ids=lambda target: target.name)
def test_metrics_are_those_that_the_target_names(target: Any) -> None:
    (scale,) = target.scales.values()
    named = {metric.name: metric.unit for metric in target.metrics}
    found = {}
    for point in scale.points:
        base = measured_entry() if scale.baseline else None
        found |= metrics_of(point, measured_entry(), base)
        assert found[f"prediction_error_{point.name}"].value == pytest.approx(3.0)
        if scale.baseline and point.whole:
            assert found[f"speedup_{point.name}"].value == 1.0
    assert {name: estimate.unit for name, estimate in found.items()} == named


def test_a_metric_is_the_median_of_its_series_and_a_ratio_pairs_repeat_by_repeat() -> None:
    slow = measured_entry()
    for number, repeat in enumerate(slow["repeats"]):
        repeat["total"] = (number + 2) * measured_entry()["repeats"][number]["total"]
    series = series_of(dataclasses.replace(POINT, sampled_tokens=0), measured_entry(), slow)
    assert series["speedup_small"] == pytest.approx([2.0, 3.0, 4.0])
    assert series["step_seconds_small"] == pytest.approx([2.0, 2.1, 2.2])
    metrics = metrics_of(dataclasses.replace(POINT, sampled_tokens=0), measured_entry(), slow)
    assert metrics["speedup_small"].value == pytest.approx(3.0)
    assert metrics["speedup_small"].n == 3


def test_a_point_that_fills_up_its_rows_claims_no_time_of_a_step() -> None:
    found = metrics_of(POINT, measured_entry(), measured_entry())
    assert "update_seconds_small" in found
    assert "update_ratio_small" in found
    for name in ("step_seconds", "rollout_seconds", "tokens_per_second", "speedup"):
        assert f"{name}_small" not in found


def test_a_ledger_of_another_source_device_or_configuration_counts_for_nothing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = StepScale(points=(POINT,))
    maker = {"commit": "a" * 40, "device": "one"}
    monkeypatch.setattr(step_ledger, "made_by", lambda: dict(maker))
    StepLedger(tmp_path / "l.json", scale).add(NVFP4, POINT, {"total": 1.0}, {"peak_bytes": 1})
    assert StepLedger(tmp_path / "l.json", scale).missing(NVFP4, POINT) == 0
    longer = dataclasses.replace(POINT, completion_tokens=25)
    assert StepLedger(tmp_path / "l.json", scale).missing(NVFP4, longer) == 1
    assert StepLedger(tmp_path / "l.json", scale).missing(RELEASED, POINT) == 1
    other = dataclasses.replace(scale, warm_up_tokens=9)
    assert StepLedger(tmp_path / "l.json", other).missing(NVFP4, POINT) == 1
    maker["device"] = "two"
    assert StepLedger(tmp_path / "l.json", scale).missing(NVFP4, POINT) == 1


def test_a_tree_with_changes_shares_no_entry_between_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_ledger, "source_commit", lambda: ("a" * 40, True))
    mine = step_ledger.made_by()
    monkeypatch.setattr(step_ledger.os, "getpid", lambda: -1)
    assert step_ledger.made_by() != mine
    monkeypatch.setattr(step_ledger, "source_commit", lambda: ("a" * 40, False))
    assert step_ledger.made_by()["commit"] == "a" * 40


def test_the_claims_step_is_one_measurement_of_two_targets(tmp_path: Any) -> None:
    (sizes,) = next(t for t in STEP_TARGETS if t.name == "table3_sizes").scales.values()
    (memory,) = MEMORY.scales.values()
    StepLedger(tmp_path / "l.json", sizes).add(NVFP4, CLAIM, {"total": 1.0}, {"peak_bytes": 1})
    raw = StepLedger(tmp_path / "l.json", memory)
    assert CLAIM in memory.points
    assert CLAIM.whole
    assert raw.missing(step_arm(MEMORY.arms[0]), CLAIM) == 0
    assert raw.missing(BF16, CLAIM) == 1


def test_an_arms_ways_are_its_baseline_and_itself() -> None:
    scale = StepScale(points=(POINT,), baseline="bf16")

    def names(arm: StepArm) -> list[str]:
        return [step_ledger.way_of(way) for way in step_time.ways_of(arm, scale)]

    assert names(NVFP4) == ["bf16", "nvfp4"]
    assert names(BF16) == ["bf16"]
    assert names(RELEASED) == ["bf16", "nvfp4_dequantised"]
    assert names(FULL) == ["bf16", "bf16_full"]


def test_arms_share_the_measured_baseline(tmp_path: Any) -> None:
    scale = StepScale(points=(POINT,), baseline="bf16")
    ledger = StepLedger(tmp_path / "l.json", scale)
    for arm in (NVFP4, NF4, RELEASED, FULL):
        ledger.add(step_time.ways_of(arm, scale)[0], POINT, {"total": 1.0}, {"peak_bytes": 1})
        assert ledger.missing(BF16, POINT) == 0


def test_points_are_grouped_by_the_policy_and_budget_that_they_need() -> None:
    found = step_measure.together((*TABLE3_POINTS, *POINTS_14B))
    assert [[p.name for p in group] for group in found] == [
        ["7b_b2", "7b_b4", "7b_b8"],
        ["14b_b2", "14b_b4", "14b_b8"],
    ]
    other = dataclasses.replace(POINT, name="other", lora_rank=64)
    assert len(step_measure.together([POINT, other, POINT])) == 3


def test_the_planned_step_is_the_points(policy: Policy) -> None:
    scale = StepScale(points=(POINT,))
    planned = step_measure.step_shape(POINT, "nvfp4", 16, scale, 10**10)
    assert (planned.slots, planned.row_tokens, planned.rank) == (4, 44, 16)
    assert planned.micro_tokens == 4 * 44
    assert plan_memory(planned).peak < 10**10
    few = dataclasses.replace(POINT, slots=2, cache="float8")
    planned = step_measure.step_shape(few, "nvfp4", 16, scale, 10**10)
    config = step_measure.engine_config(few, planned)
    # The memory plan of a step has no captured prefills.
    assert config.prefill_graph_tokens == 0
    assert (config.slots, config.cache_format) == (2, "float8")


def test_a_point_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="small letters"):
        dataclasses.replace(POINT, name="7B b8")
    with pytest.raises(ValueError, match="must lie in 0 to 24"):
        dataclasses.replace(POINT, sampled_tokens=25)
    with pytest.raises(ValueError, match="no model size"):
        dataclasses.replace(POINT, model="8b")
    with pytest.raises(ValueError, match="share a name"):
        StepScale(points=(POINT, POINT))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here, so it would measure")
def test_without_a_device_the_procedure_says_so(tmp_path: Any) -> None:
    run = RunConfig(
        target="memory", target_version=1, tier="systems", procedure="step_time",
        arm=MEMORY.arms[0], scale=StepScale(points=(POINT,)), seed=0,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no CUDA device"):
        procedure_named("step_time")(
            run, folder=tmp_path, progress=lambda *a: None, should_stop=lambda: False, threads=1
        )
