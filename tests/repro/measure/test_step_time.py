"""A measured step does what training does: on a small shape, with the clock's events replaced."""

import dataclasses

import pytest
import torch

from repro.measure import step_measure, step_time
from repro.measure.step_metrics import PointResult, metrics_of, series_of, way_of
from repro.measure.step_training import RandomPrompts, parameter_image, timed_step, warm_up
from repro.models.policy import trainable_parameters
from repro.rl import learner as learner_module
from repro.rl.clock import PHASES
from repro.spec.step_scale import StepScale, alone_twin, equal_twin
from repro.targets.memory import MEMORY, MEMORY_BUDGETS, MEMORY_CARDS, MEMORY_DENSE, MEMORY_FORMATS
from repro.targets.steps import BF16, FULL, NVFP4, POINTS_14B, RELEASED, STEP_TARGETS, TABLE3_POINTS
from tests.repro.measure.conftest import POINT, prepared


@pytest.mark.usefixtures("host_clock")
def test_a_step_samples_grades_and_moves_every_trained_tensor(policy, pool):
    point = dataclasses.replace(POINT, sampled_tokens=10, memory_only=True)
    t, state, engine = prepared(policy, pool, point)
    before = {name: p.detach().clone() for name, p in trainable_parameters(policy).items()}
    image = parameter_image(policy)
    steps = [timed_step(t, state) for _ in range(3)]
    assert engine.statistics.generated_tokens == 4 * 10
    assert min(step["grad_norm"] for step in steps) > 0
    # Rows that are filled up say nothing of the sampler.
    assert "sampler_trainer_abs_diff_mean" not in steps[0]
    for name in ("rollout", "reward", "update", "optimizer"):
        assert steps[0][name] > 0, name
    assert sum(steps[0][name] for name in PHASES) == pytest.approx(steps[0]["total"])
    assert sum(pool.counters.values()) > 0
    for name, parameter in trainable_parameters(policy).items():
        assert not torch.equal(parameter.detach(), before[name]), name
    assert not torch.equal(parameter_image(policy), image)


@pytest.mark.usefixtures("host_clock")
def test_every_row_of_a_measured_step_gives_a_gradient(policy, pool, passes, monkeypatch):
    monkeypatch.setattr(learner_module, "evaluate_rows", None)
    t, state, _ = prepared(policy, pool, POINT)
    timed_step(t, state)
    (made,) = passes
    assert sum(map(len, made.plan.pieces)) == 4
    assert (made.plan.idle, made.old) == ([], None)


@pytest.mark.usefixtures("host_clock")
@pytest.mark.parametrize(("prompt", "completion"), [(32, 96), (33, 70)])
def test_the_planned_cache_holds_every_row_without_preemption(policy, pool, prompt, completion):
    point = dataclasses.replace(POINT, prompt_tokens=prompt, completion_tokens=completion, group=4)
    t, state, engine = prepared(policy, pool, point)
    timed_step(t, state)
    assert engine.statistics.generated_tokens == 8 * completion
    assert engine.statistics.preemptions == 0


def test_prompts_follow_the_step_and_the_seed_alone(policy):
    def asked(step, seed=0):
        source = RandomPrompts(policy, POINT, seed)
        return [source.prompt(problem) for problem in source.draw(step)]

    assert [len(prompt) for prompt in asked(1)] == [20, 20]
    assert asked(1) == asked(1)
    assert len({str(asked(*place)) for place in ((1,), (2,), (1, 1))}) == 3


@pytest.mark.usefixtures("host_clock")
def test_a_warm_up_step_samples_few_tokens_and_updates_on_full_rows(policy, pool, passes):
    t, state, engine = prepared(policy, pool, POINT)
    learner = dataclasses.replace(t.learner, micro_tokens=100)
    warm_up(dataclasses.replace(t, learner=learner), state, 4)
    assert engine.statistics.generated_tokens == 4 * 4
    assert [made.lengths for made in passes] == [[24, 24]]  # one micro-batch
    assert state.step == 1


def measured_entry(peak=100):
    repeats = [
        dict.fromkeys((*PHASES, "total", "exchange"), 2.0 + i / 10) | {"completion_tokens": 100}
        for i in range(3)
    ]
    facts = {"generated_tokens": 100, "peak_bytes": peak, "predicted_bytes": 97}
    return PointResult(repeats=repeats, facts=facts)


STEPS_AND_MEMORY = (
    *STEP_TARGETS, MEMORY, MEMORY_DENSE, MEMORY_FORMATS, MEMORY_BUDGETS, MEMORY_CARDS,
)  # fmt: skip


@pytest.mark.parametrize("target", STEPS_AND_MEMORY, ids=lambda target: target.name)
def test_metrics_are_those_that_the_target_names(target):
    (scale,) = target.scales.values()
    named = {metric.name: metric.unit for metric in target.metrics}
    metrics = {}
    for point in scale.points:
        base = measured_entry() if scale.baseline else None
        equal = measured_entry() if equal_twin(point, scale.points) else None
        alone = measured_entry() if alone_twin(point, scale.points) else None
        entry = measured_entry()
        metrics |= metrics_of(point, entry, series_of(point, entry, base, equal), alone)
        assert metrics[f"prediction_error_{point.name}"].value == pytest.approx(3.0)
        if scale.baseline:
            assert metrics[f"speedup_{point.name}"].value == 1.0
    if set(named.values()) <= {"bytes", "percent"}:
        # The claim's point is a whole step; there its memory alone is asked.
        metrics = {
            name: item for name, item in metrics.items() if item.unit in ("bytes", "percent")
        }
    assert {name: estimate.unit for name, estimate in metrics.items()} == named


def test_a_metric_is_the_median_of_its_series_and_a_ratio_pairs_repeat_by_repeat():
    entry, slow = measured_entry(), measured_entry()
    for number, repeat in enumerate(slow.repeats):
        repeat["total"] *= number + 2
    series = series_of(POINT, entry, slow)
    assert series["speedup_small"] == pytest.approx([2.0, 3.0, 4.0])
    assert series["step_seconds_small"] == pytest.approx([2.0, 2.1, 2.2])
    metrics = metrics_of(POINT, entry, series)
    assert metrics["speedup_small"].value == pytest.approx(3.0)
    assert metrics["speedup_small"].n == 3


def test_an_arms_ways_are_its_baseline_and_itself():
    scale = StepScale(points=(POINT,), baseline="bf16")

    def names(arm):
        return [way_of(way) for way in step_time.ways_of(arm, scale)]

    assert names(NVFP4) == ["bf16", "nvfp4"]
    assert names(BF16) == ["bf16"]
    assert names(RELEASED) == ["bf16", "nvfp4_dequantised"]
    assert names(FULL) == ["bf16", "bf16_full"]


def test_points_are_grouped_by_the_policy_and_budget_that_they_need():
    groups = step_measure.together((*TABLE3_POINTS, *POINTS_14B))
    assert [[p.name for p in group] for group in groups] == [
        ["7b_b2", "7b_b4", "7b_b8"],
        ["14b_b2", "14b_b4", "14b_b8"],
    ]
    other = dataclasses.replace(POINT, name="other", lora_rank=64)
    assert len(step_measure.together([POINT, other, POINT])) == 3
