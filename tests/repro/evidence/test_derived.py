"""Derived numbers: the area under a curve over a budget, the mean of the human-written sets."""

from __future__ import annotations

import pytest

from repro.evidence.derived import derived_metrics, mean_height, training_metrics
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
    found = derived_metrics({}, series, 100)
    assert found["heldout_area"].value == pytest.approx(30)
    assert found["heldout_last"].value == pytest.approx(40)
    assert derived_metrics({}, series, 0) == {}
    assert derived_metrics({}, {}, 100) == {}


def test_the_rise_is_that_of_a_line_through_the_second_half() -> None:
    def rise(*accuracy: float | None) -> float | None:
        series = {"accuracy_sampled": [0.5], "tokens_sampled": [8.0]}
        asked = series | {"evaluation_accuracy": list(accuracy)}
        found = training_metrics(asked, {}, {"threshold": 50.0})
        return found["heldout_rise"].value if "heldout_rise" in found else None

    assert rise(10.0, 50.0, 60.0, 64.0) == pytest.approx(4)
    # Steps 3 to 5 of 0 to 5: 60, 66, 63 lie about a line that rises by 3.
    assert rise(0.0, 0.0, 0.0, 60.0, 66.0, 63.0) == pytest.approx(3)
    assert rise(60.0, 60.0, 60.0, 60.0) == pytest.approx(0)
    assert rise(10.0) is None
    series = {"accuracy_sampled": [0.5], "tokens_sampled": [8.0], "evaluation_accuracy": [1.0] * 4}
    assert "heldout_rise" not in training_metrics(series, {}, {})


def test_the_human_mean_needs_every_set() -> None:
    two = {"accuracy_mawps": accuracy(30), "accuracy_svamp": accuracy(60)}
    assert "accuracy_human" not in derived_metrics(two, {}, 0)
    all_three = two | {"accuracy_gsm8k": accuracy(3)}
    assert derived_metrics(all_three, {}, 0)["accuracy_human"].value == pytest.approx(31)
