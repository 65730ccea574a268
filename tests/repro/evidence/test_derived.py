"""Derived numbers: the area under a curve over a budget, the mean of the human-written sets."""

from __future__ import annotations

import pytest

from repro.evidence.derived import (
    at_k_metrics,
    curve_metrics,
    derived_metrics,
    mean_height,
    training_metrics,
)
from repro.evidence.record import Estimate


def accuracy(value: float) -> Estimate:
    return Estimate(value=value, unit="percent")


def test_the_mean_height_is_that_of_the_polyline() -> None:
    assert mean_height([0, 10], [0, 10], 10) == pytest.approx(5)
    assert mean_height([0, 10], [0, 10], 5) == pytest.approx(2.5)
    assert mean_height([0, 10], [0, 10], 20) == pytest.approx(7.5)
    assert mean_height([0, 10, 30], [4, 4, 8], 30) == pytest.approx((40 + 120) / 30)
    assert mean_height([0], [3], 100) == 3


def test_a_later_rise_to_the_same_end_has_a_smaller_area() -> None:
    early = mean_height([0, 10, 20], [0, 9, 10], 20)
    late = mean_height([0, 10, 20], [0, 1, 10], 20)
    assert early > late


@pytest.mark.parametrize("places", [[5, 10], [0, 0], [0, 10, 9], []])
def test_a_curve_that_is_none_is_refused(places: list[float]) -> None:
    with pytest.raises(ValueError, match="curve"):
        mean_height(places, [1.0] * len(places), 10)


def test_area_and_last_value_come_from_the_evaluations() -> None:
    series = {"evaluation_tokens": [0, 100], "evaluation_accuracy": [20.0, 40.0]}
    metrics = derived_metrics(series, 100)
    assert metrics["heldout_area"].value == pytest.approx(30)
    assert metrics["heldout_last"].value == pytest.approx(40)
    assert derived_metrics(series, 0) == {}
    assert derived_metrics({}, 100) == {}


def test_the_rise_is_that_of_a_line_through_the_second_half() -> None:
    def rise(*accuracy: float | None) -> float | None:
        series = {"accuracy_sampled": [0.5], "tokens_sampled": [8.0]}
        asked = series | {"evaluation_accuracy": list(accuracy)}
        metrics = training_metrics(asked, {}, {"threshold": 50.0})
        return metrics["heldout_rise"].value if "heldout_rise" in metrics else None

    assert rise(10.0, 50.0, 60.0, 64.0) == pytest.approx(4)
    # Steps 3 to 5 of 0 to 5: 60, 66, 63 lie about a line that rises by 3.
    assert rise(0.0, 0.0, 0.0, 60.0, 66.0, 63.0) == pytest.approx(3)
    assert rise(60.0, 60.0, 60.0, 60.0) == pytest.approx(0)
    assert rise(10.0) is None
    series = {"accuracy_sampled": [0.5], "tokens_sampled": [8.0], "evaluation_accuracy": [1.0] * 4}
    assert "heldout_rise" not in training_metrics(series, {}, {})


def test_the_training_accuracy_rises_over_its_second_half_where_pass_at_k_is_asked() -> None:
    series = curve([0.0, 0.5, 0.1, 0.3, 0.4, 0.3, 0.5])
    asked = {"threshold": 50.0, "at": [1, 4]}
    # Of seven rollouts the last four: 30, 40, 30, 50 % lie about a line that rises by 15 points.
    rise = training_metrics(series, {}, asked)["train_rise"]
    assert (rise.value, rise.n) == (pytest.approx(15.0), 4)
    assert "train_rise" not in training_metrics(series, {}, {"threshold": 50.0})
    assert "train_rise" not in training_metrics(curve([0.5]), {}, asked)


def curve(shares: list[float | None], tokens: int = 100) -> dict[str, list[float | None]]:
    """Return the series of rollouts of so many tokens each."""
    return {
        "accuracy_sampled": shares,
        "tokens_sampled": [float(tokens * (step + 1)) for step in range(len(shares))],
    }


def test_take_off_is_where_the_moving_mean_reaches_the_threshold() -> None:
    metrics = curve_metrics(curve([0.0] * 5 + [1.0] * 5), 50.0, 0)
    # Moving means of 0, 20, 40, 60 %: half-way between those that 700 and 800 tokens show.
    assert metrics["take_off_tokens"].value == pytest.approx(750)
    assert metrics["take_off_steps"].value == pytest.approx(7.5)
    assert metrics["took_off"].value == 1
    assert "censored" not in metrics["take_off_tokens"].method
    assert "train_area" not in metrics


def test_a_run_that_starts_above_the_threshold_took_off_when_that_was_first_known() -> None:
    metrics = curve_metrics(curve([0.9] * 6), 50.0, 0)
    assert metrics["take_off_tokens"].value == 500
    assert metrics["take_off_steps"].value == 5


def test_a_mean_on_the_threshold_reaches_it_whatever_the_rounding_of_its_series() -> None:
    exact, rounded = [1 / 3] * 8, [0.333333] * 8
    for shares in (exact, rounded):
        assert curve_metrics(curve([0.0] * 5 + shares), 100 / 3, 0)["took_off"].value == 1
    first, second = (
        curve_metrics(curve([0.0] * 5 + shares), 100 / 3, 0)["take_off_tokens"].value
        for shares in (exact, rounded)
    )
    assert first == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize("shares", [[0.4] * 12, [1.0] * 4])
def test_a_run_that_never_took_off_is_censored_at_its_end(shares: list[float | None]) -> None:
    metrics = curve_metrics(curve(shares), 50.0, 0)
    assert metrics["take_off_tokens"].value == 100 * len(shares)
    assert f"censored at the run's {100 * len(shares)}" in metrics["take_off_tokens"].method
    assert metrics["take_off_steps"].value == len(shares)
    assert f"censored at the run's {len(shares)}" in metrics["take_off_steps"].method
    assert metrics["took_off"].value == 0


def test_the_training_area_places_a_rollout_before_its_own_tokens() -> None:
    metrics = curve_metrics(curve([0.0, 1.0, 1.0]), 50.0, 300)
    # 0 at 0 tokens, 100 % at 100, held after: the mean over 300 is (50 + 100 + 100) / 3.
    assert metrics["train_area"].value == pytest.approx(250 / 3)


def test_steps_of_one_rollout_are_one_point_and_ungraded_rollouts_none() -> None:
    plain = curve_metrics(curve([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), 45.0, 500)
    twice = {
        name: [value for value in values for _ in range(2)]
        for name, values in curve([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]).items()
    }
    doubled = curve_metrics(twice, 45.0, 500)
    steps = [of.pop("take_off_steps").value or 0.0 for of in (plain, doubled)]
    assert doubled == plain
    # A rollout is known when its first step begins: step k of one update each is step 2 k - 1.
    assert steps[1] == pytest.approx(2 * steps[0] - 1)
    assert plain["take_off_tokens"].n == 6
    assert curve_metrics(curve([None, *[0.5] * 5]), 45.0, 500)["take_off_tokens"].n == 5


def test_a_run_whose_end_is_below_half_of_its_best_has_collapsed() -> None:
    rising = [0.1] * 10 + [0.8] * 10
    for shares, fell in (
        (rising, 0.0),
        ([*rising, *[0.39] * 10], 1.0),
        ([*rising, *[0.4] * 10], 0.0),
        ([0.8] * 3, 0.0),
    ):
        assert curve_metrics(curve(shares), 50.0, 0)["collapsed"].value == fell


@pytest.mark.parametrize(
    ("more", "fell"),
    [
        ({}, 0.0),
        ({"truncation_rate": [0.1] * 10 + [0.35] * 10}, 1.0),
        ({"truncation_rate": [0.4] * 20}, 0.0),
        ({"completion_tokens": [300.0] * 10 + [50.0] * 10}, 0.0),
        ({"entropy": [0.2] * 5 + [0.5] * 10 + [0.1] * 5}, 1.0),
        ({"entropy": [0.2] * 5 + [0.39] * 15}, 0.0),
    ],
)
def test_a_run_that_breaks_in_another_way_has_collapsed(
    more: dict[str, list[float | None]], fell: float
) -> None:
    series = curve([0.2] * 10 + [0.3] * 10) | more
    assert curve_metrics(series, 50.0, 0)["collapsed"].value == fell


def test_short_completions_that_earn_less_than_at_the_start_are_a_collapse() -> None:
    series = curve([0.3] * 10 + [0.2] * 10) | {"completion_tokens": [300.0] * 10 + [50.0] * 10}
    assert curve_metrics(series, 50.0, 0)["collapsed"].value == 1.0


def test_the_start_is_read_off_finished_completions() -> None:
    series = curve([0.2] * 5 + [0.6] * 55) | {
        "reward": [0.1] * 60,
        "entropy": [9.0] * 60,
        "entropy_finished": [0.3, 0.3, 0.3, 0.3, 0.8] + [0.5] * 55,
    }
    metrics = training_metrics(series, {}, {"threshold": 50.0})
    assert metrics["entropy_start"].value == pytest.approx(0.4)
    assert metrics["entropy_early"].value == pytest.approx((5 * 0.4 + 45 * 0.5) / 50)
    assert metrics["accuracy_start"].value == pytest.approx(0.2)


def test_a_count_of_tokens_that_falls_is_no_curve() -> None:
    series = curve([0.5] * 6) | {"tokens_sampled": [100.0, 200.0, 150.0, 400.0, 500.0, 600.0]}
    with pytest.raises(ValueError, match=r"series\.tokens_sampled falls from 200"):
        curve_metrics(series, 50.0, 0)


def test_what_a_scale_does_not_ask_for_is_not_formed() -> None:
    series = curve([0.5] * 6)
    assert "took_off" not in training_metrics(series, {}, {})
    assert "took_off" in training_metrics(series, {}, {"threshold": 50.0})


def test_informative_groups_are_those_of_the_first_steps() -> None:
    series = curve([0.5] * 6) | {"informative_groups": [0.1, 0.2, 0.3, 0.4, 0.5, 1.0]}
    estimate = training_metrics(series, {}, {"threshold": 50.0})["informative_first"]
    assert (estimate.value, estimate.n) == (pytest.approx(30.0), 5)


def test_estimates_at_k_need_votes_of_no_more_samples_than_there_are() -> None:
    tally = {"right": [0, 0, 1], "right_lenient": [0, 0, 1]}
    votes = [{"problems": 1, "right": [2], "wrong": []}]
    both = {"votes": votes, "votes_lenient": votes}
    assert at_k_metrics(tally | both, (2,))["maj_at_2"].value == 100
    assert at_k_metrics(tally, ()) == {}
    with pytest.raises(KeyError):
        at_k_metrics(tally, (2,))
    with pytest.raises(ValueError, match="k is 3"):
        at_k_metrics(tally | both, (3,))
