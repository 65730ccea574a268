"""Mediation on made-up runs whose slope is known."""

from __future__ import annotations

import math

import pytest

from repro.evidence.statistics import Interval
from repro.judge.check import Checked
from repro.report.mediation import drawn, in_words, mediation, mediation_table
from repro.targets import find
from tests.repro.made_up import checked_of, needle_check


def holds(interval: Interval, value: float) -> bool:
    assert interval.low is not None
    assert interval.high is not None
    return interval.low < value < interval.high


def changed(checked: Checked, arm: str, **numbers: float) -> Checked:
    """Return a check with other numbers for one arm."""
    records = checked.evidence.records
    values = {
        name: {
            seed: {key: one.value or 0.0 for key, one in record.metrics.items()}
            | (numbers if name == arm else {})
            for seed, record in seeds.items()
        }
        for name, seeds in records.items()
    }
    return checked_of(checked.selection.target, values)


@pytest.mark.parametrize("share", [0.004, 0.04, 0.3, 0.5])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_the_entropy_drawn_with_is_that_of_the_tempered_choice(
    share: float, temperature: float
) -> None:
    def entropy(p: float) -> float:
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    weights = [share ** (1 / temperature), (1 - share) ** (1 / temperature)]
    expected = entropy(weights[0] / sum(weights))
    assert drawn(entropy(share), temperature) == pytest.approx(expected, rel=1e-6)


def test_an_entropy_of_nothing_or_above_that_of_two_stays_in_bounds() -> None:
    assert drawn(0.0, 1.3) == 0.0
    assert drawn(0.8, 1.3) == pytest.approx(math.log(2))
    assert drawn(0.8, 1.0) == 0.8


def test_a_format_that_acts_by_entropy_alone_moves_the_take_off_as_the_slope_says() -> None:
    rows = mediation([needle_check(slope=-4.0, shift=0.03)])
    assert {row.arm.name for row in rows} == {"nvfp4_lora", "nf4_lora"} | {"mxfp4_lora"}
    by_arm = {row.arm.name: row for row in rows}
    row = by_arm["nvfp4_lora"]
    assert row.slope.value == pytest.approx(-4.0, abs=0.15)
    assert holds(row.slope, -4.0)
    assert holds(row.shift, 0.03)
    assert holds(row.mediated, -0.12)
    assert row.observed.value == pytest.approx(-0.12, abs=0.02)
    assert row.mediated.value == pytest.approx(row.slope.value * row.shift.value)
    assert by_arm["nf4_lora"].mediated.value == pytest.approx(-0.06, abs=0.01)
    assert row.observed.n == 16


def test_what_a_format_does_beside_entropy_is_not_mediated() -> None:
    (row,) = (
        row
        for row in mediation([needle_check(slope=-4.0, shift=0.002, direct=-0.5)])
        if row.arm.name == "nvfp4_lora"
    )
    assert holds(row.mediated, -0.008)
    assert row.mediated.low is not None
    assert row.mediated.low > -0.1
    assert row.observed.high is not None
    assert row.observed.high < -0.4


def test_the_interval_of_the_observed_is_the_paired_t_interval_and_widens_with_fewer_seeds() -> (
    None
):
    many, few = (
        mediation([needle_check(slope=-4.0, shift=0.03, seeds=seeds)])[0] for seeds in (16, 5)
    )

    def width(interval: Interval) -> float:
        assert interval.low is not None
        assert interval.high is not None
        return interval.high - interval.low

    assert width(few.observed) > width(many.observed)
    assert width(few.slope) > width(many.slope)


def test_too_few_seeds_no_controls_and_no_records_give_nothing() -> None:
    assert mediation([]) == []
    assert mediation([checked_of(find("needle_4"), {})]) == []
    assert mediation([needle_check(slope=-4.0, shift=0.03, seeds=4)]) == []
    full = needle_check(slope=-4.0, shift=0.03)
    for name in ("opening_warmer", "opening_colder", "rollout_colder"):
        del full.evidence.records[name]
    assert mediation([full]) == []
    assert mediation_table([]) == []
    assert in_words([]) == ""


def test_a_control_that_does_not_take_off_is_left_out() -> None:
    checked = needle_check(slope=-4.0, shift=0.03)
    # Its steps are those at which the runs ended, the same for all.
    lost = changed(checked, "rollout_colder", took_off=0.0, take_off_steps=130.0)
    assert mediation([lost])[0].slope.value == pytest.approx(-4.0, abs=0.3)
    counted = changed(checked, "rollout_colder", took_off=1.0, take_off_steps=130.0)
    assert abs(mediation([counted])[0].slope.value + 4.0) > 0.3


def test_table_and_sentence_carry_the_numbers() -> None:
    rows = mediation([needle_check(slope=-4.0, shift=0.03)])
    text = "\n".join(mediation_table(rows))
    (row,) = (row for row in rows if row.arm.name == "nvfp4_lora")
    assert f"| {math.exp(row.observed.value):.3g} (" in text
    assert "jackknife" in text
    assert text.count("| `needle_4` |") == 3
    assert f"NVFP4 would take {math.exp(row.mediated.value):.3g} (" in in_words(rows)
