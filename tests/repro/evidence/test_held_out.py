"""Tests along a run, means of its first steps, and what the policy samples after training."""

import dataclasses
from math import comb
from statistics import fmean

import numpy as np
import pytest

from repro.evidence.derived import along, derive, explored
from repro.evidence.record import Estimate
from repro.run.select import select
from tests.repro.made_up import honest_record

END = {
    "accuracy": Estimate(value=40.0, unit="percent"),
    "accuracy_greedy": Estimate(value=44.0, unit="percent"),
}
SERIES = {
    "test_steps": [75, 100, 125],
    "test_accuracy": [30.0, 36.0, 38.0],
    "test_accuracy_greedy": [33.0, 41.0, 42.0],
}


def test_late_tests_are_those_of_the_last_third_with_the_end():
    found = along(SERIES, 150, END)
    assert found["test_late"].value == pytest.approx((36 + 38 + 40) / 3)
    assert found["test_late"].n == 3
    assert found["test_late_greedy"].value == pytest.approx((41 + 42 + 44) / 3)
    # A test at step 99 of 150 is no late one.
    earlier = along(SERIES | {"test_steps": [75, 99, 125]}, 150, END)
    assert earlier["test_late"].value == pytest.approx((38 + 40) / 2)


def test_the_area_is_the_trapezoids_from_the_first_test_on():
    found = along(SERIES, 150, END)
    for name, ending in (("test_area", ""), ("test_area_greedy", "_greedy")):
        heights = [*SERIES[f"test_accuracy{ending}"], END[f"accuracy{ending}"].value]
        area = np.trapezoid(heights, [75, 100, 125, 150]) / 75
        assert found[name].value == pytest.approx(area)


def test_runs_without_tests_along_them_have_none_of_these_and_broken_series_are_refused():
    assert along({}, 150, END) == {}
    assert along(SERIES, 150, {}) == {}
    with pytest.raises(ValueError, match="3 tests at 2 steps"):
        along(SERIES | {"test_steps": [75, 100]}, 150, END)
    with pytest.raises(ValueError, match="must rise"):
        along(SERIES | {"test_steps": [75, 75, 125]}, 150, END)


def test_what_the_trained_policy_samples_has_pass_at_k_and_entropy():
    hits = [10, 5, 3, 2] + [0] * 12 + [4]  # problems with 0 to 16 right samples
    facts = {
        "answers": {"accuracy_explored": {"right": hits}},
        "explored": {"entropy_sum": 250.0, "tokens": 1000},
    }
    found = explored(facts)
    for k in (1, 4, 16):
        each = [1 - comb(16 - c, k) / comb(16, k) for c, n in enumerate(hits) for _ in range(n)]
        assert found[f"pass_at_{k}_explored"].value == pytest.approx(100 * fmean(each))
    assert "pass_at_64_explored" not in found
    assert found["entropy_explored"].value == pytest.approx(0.25)
    assert explored({}) == {}
    with pytest.raises(ValueError, match="tokens"):
        derive("train", {"evaluation": {}}, {}, {"explored": {"entropy_sum": 1.0}})


def test_the_mean_over_the_first_steps_needs_all_of_them():
    (selection,) = select(["table1"], tier="smoke")
    record = honest_record(selection.plan(1, ["bf16_lora"])[0])
    record = dataclasses.replace(record, series={"reward": [0.1, 0.2, None, 0.6, 0.9]})
    assert record.value("train_reward_to_2") == pytest.approx(0.15)
    assert record.value("train_reward_to_4") == pytest.approx(0.3)
    assert record.value("train_reward_to_6") is None
    assert record.value("train_reward_mean") == pytest.approx(0.45)
    for name in ("train_reward_to_0", "train_reward_to_", "train_reward", "train_other_to_2"):
        assert record.value(name) is None
