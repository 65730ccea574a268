"""Rows of spread lengths: drawn anew for every step, sampled to their ends, paired with equal."""

import dataclasses
from statistics import mean, stdev
from typing import Any

import pytest

from repro.measure import step_measure, step_metrics, step_training
from repro.measure.step_metrics import PointResult
from repro.measure.step_time import measured_steps
from repro.measure.step_training import timed_step, training_of, warm_up
from repro.models.memory_plan import plan_memory
from repro.rl.clock import PHASES
from repro.rl.training_state import fresh_state
from repro.rollout.engine import Engine
from repro.spec.step_scale import StepPoint, StepScale, equal_twin
from repro.targets.steps import BF16, LENGTH_POINTS, NVFP4, TABLE3_32B_RL, TABLE3_POINTS
from tests.repro.measure.conftest import prepared, small_policy

FULL_SIZE = LENGTH_POINTS[0]
SPREAD = StepPoint(
    name="few_spread", model="0.5b", prompts=2, group=4, prompt_tokens=5, completion_tokens=40,
    lengths="spread", mean_tokens=12,
)  # fmt: skip
EQUAL = dataclasses.replace(SPREAD, name="few_equal", lengths="equal")


def test_lengths_are_drawn_about_their_mean_and_cut():
    lengths = [n for seed in range(40) for n in FULL_SIZE.drawn_lengths(seed)]
    assert mean(lengths) == pytest.approx(300, rel=0.02)
    assert stdev(lengths) == pytest.approx(150, rel=0.06)
    short = dataclasses.replace(FULL_SIZE, completion_tokens=310).drawn_lengths(0)
    assert [min(310, n) for n in FULL_SIZE.drawn_lengths(0)] == short
    assert short.count(310) > 20


def test_lengths_follow_the_rollouts_seed_alone_and_equal_ones_have_as_many_tokens():
    draws = [FULL_SIZE.drawn_lengths(seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert equal_twin(FULL_SIZE, TABLE3_POINTS) is None
    for spread, equal in zip(LENGTH_POINTS[::2], LENGTH_POINTS[1::2], strict=True):
        assert equal_twin(spread, LENGTH_POINTS) is equal
        assert equal_twin(equal, LENGTH_POINTS) is None
    for seed in range(9):
        spread, equal = (point.drawn_lengths(seed) for point in LENGTH_POINTS[:2])
        assert len(set(equal)) == 1
        assert abs(sum(equal) - sum(spread)) <= len(spread) / 2
    assert set(TABLE3_POINTS[0].drawn_lengths(0)) == {2048}


def completion_lengths(monkeypatch):
    """Return a list that grows by what the engine really samples in each rollout."""
    seen: list[list[int]] = []

    def sample(self, *args, **settings):
        batch = plain(self, *args, **settings)
        seen.append([len(completion.token_ids) for completion in batch])
        return batch

    plain = Engine.sample
    monkeypatch.setattr(Engine, "sample", sample)
    return seen


@pytest.mark.usefixtures("host_clock")
def test_each_row_of_a_timed_step_ends_at_its_own_limit(pool, monkeypatch):
    seen = completion_lengths(monkeypatch)
    for arm, point in ((NVFP4, SPREAD), (BF16, SPREAD), (NVFP4, EQUAL)):
        t, state, engine = prepared(small_policy(), pool, point, arm)
        for _ in range(2):
            assert timed_step(t, state)["sampler_trainer_abs_diff_mean"] < 1e-5
        assert engine.statistics.preemptions == 0
    first, second, *bf16, one, other = seen
    assert len(set(first)) > 4
    assert first != second
    assert bf16 == [first, second]
    for spread, equal in ((first, one), (second, other)):
        assert equal == [round(mean(spread))] * 8


@pytest.mark.usefixtures("host_clock")
def test_a_warm_up_meets_every_width_of_spread_rows(policy, pool, monkeypatch):
    seen = completion_lengths(monkeypatch)
    for point in (SPREAD, EQUAL):
        t, state, _ = prepared(policy, pool, point)
        warm_up(t, state, 4)
    assert max(seen[0]) > 12
    assert len(set(seen[0])) > 4
    assert seen[1] == [4] * 8


def test_spread_rows_are_held_against_equal_ones_repeat_by_repeat(monkeypatch):
    monkeypatch.setattr(step_metrics, "copy_rate", lambda: 1e12)
    results = {(point.name, "nvfp4"): PointResult() for point in (SPREAD, EQUAL)}
    facts = {"generated_tokens": 96, "decode_steps": 9, "weight_bytes": 1, "linears": {},
             "adapter_modules": 1, "parameters_trainable": 1, "peak_bytes": 0}  # fmt: skip
    for factor in (1.2, 1.3, 1.1):
        for point, seconds in ((SPREAD, 2 * factor), (EQUAL, 2.0)):
            times: dict[str, Any] = dict.fromkeys((*PHASES, "total"), seconds)
            times |= {"slowed": {}, "completion_tokens": 100 * factor}
            results[point.name, "nvfp4"].repeats.append(times)
            results[point.name, "nvfp4"].facts = facts
    measured = measured_steps(NVFP4, [NVFP4], (SPREAD, EQUAL), results)
    for name in ("rollout", "update", "step"):
        estimate = measured.metrics[f"{name}_over_equal_few_spread"]
        assert (estimate.value, estimate.unit) == (pytest.approx(1.2), "ratio")
        series = measured.series[f"{name}_over_equal_few_spread"]
        assert series == pytest.approx([1.2, 1.3, 1.1])
    # Each repeat's own tokens, over its own time.
    assert measured.series["tokens_per_second_few_spread"] == pytest.approx([50.0] * 3)
    assert not [name for name in measured.metrics if name.endswith("over_equal_few_equal")]


def test_32b_at_full_length_is_timed_by_one_wave_of_each_arms_own_rows():
    (scale,) = TABLE3_32B_RL.scales.values()
    (point,) = scale.points
    assert (point.rows, point.row_tokens, point.lengths) == (128, 2304, "full")
    plain, qerl = (
        step_measure.step_shape(point, arm, scale, point.budget_bytes) for arm in (BF16, NVFP4)
    )
    # What four bits save, rows at once and kept blocks take; the cache is not beside those.
    assert not plain.keep_cache
    assert not qerl.keep_cache
    assert (plain.slots, qerl.slots) == (16, 64)
    assert qerl.kept_blocks > 60 > plain.kept_blocks
    for planned, waves in ((plain, 8), (qerl, 2)):
        part, shape = step_measure.first_wave(point, planned)
        assert (waves * part.rows, shape.slots) == (point.rows, planned.slots)
        assert sum(plan_memory(shape).rollout.values()) < 0.98 * point.budget_bytes
    # Where memory ends after all, half as many rows are a wave of whole groups, too.
    assert step_measure.first_wave(point, dataclasses.replace(plain, slots=4))[0].prompts == 1


@pytest.mark.usefixtures("host_clock")
def test_a_wave_counts_as_often_as_there_are_waves(policy, pool, monkeypatch):
    point = dataclasses.replace(SPREAD, name="waves", lengths="full", prompts=6, one_wave=True,
                                completion_tokens=8)  # fmt: skip
    planned = dataclasses.replace(
        step_measure.step_shape(point, NVFP4, StepScale(points=(point,)), 10**10), slots=9
    )
    part, shape = step_measure.first_wave(point, planned)
    assert (part.prompts, shape.slots) == (2, 8)
    engine = Engine(policy, step_measure.engine_config(part, shape))
    t = training_of(policy, engine, pool, NVFP4, part, StepScale(points=(point,)), seed=0,
                    micro_tokens=planned.micro_tokens)  # fmt: skip
    seconds = dict.fromkeys((*PHASES, "total"), 0.5)
    monkeypatch.setattr(step_training.EventClock, "read", lambda self: seconds)
    step = timed_step(t, fresh_state(t.learner.run), 3)
    assert step["completion_tokens"] == point.rows * 8
    assert (step["rollout"], step["update"], step["total"]) == (1.5, 1.5, 1.5)
