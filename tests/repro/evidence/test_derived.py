"""Derived numbers: the area under a curve over a budget, metrics over several sets of problems."""

import dataclasses
from statistics import fmean

import pytest

from repro.evidence.derived import (
    at_k_metrics,
    curve_metrics,
    derived_metrics,
    mean_height,
    training_metrics,
)
from repro.evidence.receipts import violations
from repro.spec.config import ProblemSet
from repro.spec.target import plan
from repro.spec.tier import Tier
from tests.repro.made_up import honest_record, with_accuracy
from tests.repro.planned import SCALE, STUDY


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


MEANS = {
    "accuracy": "right",
    "accuracy_lenient": "right_lenient",
    "format_rate": "format",
    "working_rate": "working",
    "truncation_rate": "truncated",
}
NAMES = ("one", "two")


def over_sets(**evaluation):
    """Return a record whose accuracy is the mean over its further test sets."""
    (run,) = plan(STUDY, Tier.MINI, 1, ["bf16_lora"])
    sets = tuple(ProblemSet(name=name, data=SCALE.data) for name in NAMES)
    record = honest_record(
        dataclasses.replace(run, scale=dataclasses.replace(run.scale, test_sets=sets))
    )
    for number, name in enumerate(NAMES):
        record = with_accuracy(record, **{f"accuracy_{name}": 30.0 + 7 * number})
    scale = record.config["scale"]
    scale = scale | {"accuracy_over": "sets", "evaluation": scale["evaluation"] | evaluation}
    record = dataclasses.replace(record, config=record.config | {"scale": scale})
    return without(record, "accuracy")


def without(record, name):
    """Return a record without the answers of one accuracy."""
    answers = {n: tally for n, tally in record.facts["answers"].items() if n != name}
    return dataclasses.replace(record, facts=record.facts | {"answers": answers})


def share(tally):
    """Return the percent of right answers."""
    right = sum(count * number for number, count in enumerate(tally))
    return 100 * right / (sum(tally) * (len(tally) - 1))


def test_a_mean_over_sets_needs_no_answers_of_its_own():
    record = over_sets()
    assert violations(dataclasses.replace(record, metrics=record.metrics | record.derived())) == []
    metrics, answers = record.derived(), record.facts["answers"]
    for metric, part in MEANS.items():
        shares = [share(answers[f"accuracy_{name}"][part]) for name in NAMES]
        assert metrics[metric].value == pytest.approx(fmean(shares))
        assert metrics[metric].n == len(NAMES)
    for metric in ("accuracy", "accuracy_lenient", "truncation_rate"):
        tally = answers["accuracy_one"][MEANS[metric]]
        assert metrics[f"{metric}_one"].value == pytest.approx(share(tally))
    assert "format_rate_one" not in metrics
    # A set that was not asked is missed.
    assert "facts.answers.accuracy_two is missing" in violations(without(record, "accuracy_two"))


def test_estimates_at_k_over_sets_follow_from_the_sets_answers():
    record = over_sets(at=(1,))
    metrics = record.derived()
    of_sets = [at_k_metrics(record.facts["answers"][f"accuracy_{name}"], (1,)) for name in NAMES]
    assert metrics["pass_at_1_one"] == of_sets[0]["pass_at_1"]
    for name in ("pass_at_1", "maj_at_1_lenient"):
        values = [one[name].value or 0.0 for one in of_sets]
        assert metrics[name].value == pytest.approx(fmean(values))
