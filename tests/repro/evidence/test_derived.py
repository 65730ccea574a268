"""Derived numbers: the area under a curve over a budget, the mean of the human-written sets."""

import pytest

from repro.evidence.derived import at_k_metrics, curve_metrics, derived_metrics, training_metrics
from repro.evidence.held_out import mean_height


def test_the_mean_height_is_that_of_the_polyline():
    assert mean_height([0, 10], [0, 10], 10) == pytest.approx(5)
    assert mean_height([0, 10], [0, 10], 5) == pytest.approx(2.5)
    assert mean_height([0, 10], [0, 10], 20) == pytest.approx(7.5)
    assert mean_height([0, 10, 30], [4, 4, 8], 30) == pytest.approx((40 + 120) / 30)
    assert mean_height([0], [3], 100) == 3


@pytest.mark.parametrize("places", [[5, 10], [0, 0], [0, 10, 9], []])
def test_a_curve_that_is_none_is_refused(places):
    with pytest.raises(ValueError, match="curve"):
        mean_height(places, [1.0] * len(places), 10)


def test_area_and_last_value_come_from_the_evaluations():
    series = {"evaluation_tokens": [0, 100], "evaluation_accuracy": [20.0, 40.0]}
    metrics = derived_metrics(series, 100)
    assert metrics["heldout_area"].value == pytest.approx(30)
    assert metrics["heldout_last"].value == pytest.approx(40)
    assert derived_metrics(series, 0) == {}
    assert derived_metrics({}, 100) == {}


def curve(shares, tokens=100):
    """Return the series of rollouts of so many tokens each."""
    return {
        "accuracy_sampled": shares,
        "tokens_sampled": [float(tokens * (step + 1)) for step in range(len(shares))],
    }


def take_off(shares, threshold):
    metrics = curve_metrics(curve(shares), threshold)
    return metrics["take_off_steps"].value, metrics["took_off"].value


def test_take_off_is_where_the_moving_mean_reaches_the_threshold():
    # Moving means of 0, 20, 40, 60 %: half-way between steps 7 and 8.
    assert take_off([0.0] * 5 + [1.0] * 5, 50.0) == (pytest.approx(7.5), 1)
    # Above it from the start, it is known when the first mean is; never there, censored at the end.
    assert take_off([0.9] * 6, 50.0) == (5, 1)
    assert take_off([0.4] * 12, 50.0) == (12, 0)
    assert take_off([1.0] * 4, 50.0) == (4, 0)


def test_a_mean_on_the_threshold_reaches_it_whatever_the_rounding_of_its_series():
    exact, rounded = (take_off([0.0] * 5 + [third] * 8, 100 / 3) for third in (1 / 3, 0.333333))
    assert exact[1] == rounded[1] == 1
    assert exact[0] == pytest.approx(rounded[0], rel=1e-5)


def test_steps_of_one_rollout_are_one_point_and_ungraded_rollouts_none():
    plain = curve_metrics(curve([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), 45.0)
    twice = {
        name: [value for value in values for _ in range(2)]
        for name, values in curve([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]).items()
    }
    doubled = curve_metrics(twice, 45.0)
    steps = [of.pop("take_off_steps").value or 0.0 for of in (plain, doubled)]
    assert doubled == plain
    # A rollout is known when its first step begins: step k of one update each is step 2 k - 1.
    assert steps[1] == pytest.approx(2 * steps[0] - 1)
    assert plain["took_off"].n == 6
    assert curve_metrics(curve([None, *[0.5] * 5]), 45.0)["took_off"].n == 5


RISING, STEADY, FALLING = [0.1] * 10 + [0.8] * 10, [0.2] * 10 + [0.3] * 10, [0.3] * 10 + [0.2] * 10
SHORT = {"completion_tokens": [300.0] * 10 + [50.0] * 10}


@pytest.mark.parametrize(
    ("shares", "more", "fell"),
    [
        (RISING, {}, 0.0),
        ([*RISING, *[0.39] * 10], {}, 1.0),
        ([*RISING, *[0.4] * 10], {}, 0.0),
        ([0.8] * 3, {}, 0.0),
        (STEADY, {}, 0.0),
        (STEADY, {"truncation_rate": [0.1] * 10 + [0.35] * 10}, 1.0),
        (STEADY, {"truncation_rate": [0.4] * 20}, 0.0),
        (STEADY, SHORT, 0.0),
        (FALLING, SHORT, 1.0),
        (STEADY, {"entropy": [0.2] * 5 + [0.5] * 10 + [0.1] * 5}, 1.0),
        (STEADY, {"entropy": [0.2] * 5 + [0.39] * 15}, 0.0),
    ],
)
def test_a_run_with_any_of_four_signs_has_collapsed(shares, more, fell):
    assert curve_metrics(curve(shares) | more, 50.0)["collapsed"].value == fell


def test_the_start_is_read_off_finished_completions():
    series = curve([0.2] * 5 + [0.6] * 55) | {
        "reward": [0.1] * 60,
        "entropy": [9.0] * 60,
        "entropy_finished": [0.3, 0.3, 0.3, 0.3, 0.8] + [0.5] * 55,
    }
    metrics = training_metrics(series, {}, {"threshold": 50.0})
    assert metrics["entropy_start"].value == pytest.approx(0.4)
    assert metrics["accuracy_start"].value == pytest.approx(0.2)
    assert "took_off" in metrics
    assert "took_off" not in training_metrics(series, {}, {})


def test_a_count_of_tokens_that_falls_is_no_curve():
    series = curve([0.5] * 6) | {"tokens_sampled": [100.0, 200.0, 150.0, 400.0, 500.0, 600.0]}
    with pytest.raises(ValueError, match=r"series\.tokens_sampled falls from 200"):
        curve_metrics(series, 50.0)


def test_estimates_at_k_need_votes_of_no_more_samples_than_there_are():
    tally = {"right": [0, 0, 1], "right_lenient": [0, 0, 1]}
    votes = [{"problems": 1, "right": [2], "wrong": []}]
    both = {"votes": votes, "votes_lenient": votes}
    assert at_k_metrics(tally | both, (2,))["maj_at_2"].value == 100
    assert at_k_metrics(tally, ()) == {}
    with pytest.raises(KeyError):
        at_k_metrics(tally, (2,))
    with pytest.raises(ValueError, match="k is 3"):
        at_k_metrics(tally | both, (3,))
