"""Doses meet responses by name; the paper's dose is placed by its entropy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest

from repro.evidence.sizes import MINIMUM_DRAWS
from repro.evidence.statistics import Interval, mean_interval
from repro.judge.check import Checked
from repro.report.dose_response import (
    PAPER_RATIO,
    PAPER_RISE,
    Dose,
    arm_name,
    dose_response,
    doses,
    in_words,
    place_of,
)
from repro.targets import find
from tests.repro.made_up import DOSES, checked_of, dose_checks

START = find("dose_start")


def dose(arm: str, kl: float, rise: float | None) -> Dose:
    known = None if rise is None else Interval(value=rise, low=rise, high=rise, n=30)
    return Dose(arm=START.arm(arm), kl=kl, rise=known, draws=30)


@pytest.fixture(scope="module")
def checks() -> list[Checked]:
    return dose_checks()


def without(checks: Sequence[Checked], name: str) -> list[Checked]:
    return [checked for checked in checks if checked.selection.target.name != name]


def test_the_paper_has_23_percent_more_entropy_and_takes_off_in_43_percent_of_the_steps() -> None:
    assert pytest.approx(0.297 / 0.242 - 1, abs=5e-4) == PAPER_RISE
    assert pytest.approx(32.5 / 75) == PAPER_RATIO


def test_an_arm_of_the_trained_doses_is_measured_before_training_by_the_same_name() -> None:
    trained = {arm.name: arm for name in ("needle_dose", "needle_4") for arm in find(name).arms}
    for arm in START.arms:
        same = dataclasses.replace(
            arm, label=trained[arm.name].label, learning_rate=trained[arm.name].learning_rate
        )
        assert same == trained[arm.name]
    assert {arm.name for arm in find("needle_dose").arms} <= {arm.name for arm in START.arms}
    own, of_rung = (find(name).scales[next(iter(find(name).scales))] for name in
                    ("dose_start", "needle_dose"))  # fmt: skip
    assert (own.checkpoint, own.permuted) == (of_rung.checkpoint, of_rung.permuted)
    assert set(own.seeds) <= set(of_rung.seeds)
    assert len(own.seeds) > MINIMUM_DRAWS


def test_each_response_is_the_mean_log_quotient_with_an_interval_for_all_together(
    checks: list[Checked],
) -> None:
    response = dose_response(checks)
    assert response is not None
    assert len(response.responses) == len(DOSES) - 1
    assert response.axis == "kl"
    kls = [one.dose.on("kl") for one in response.responses]
    assert kls == sorted(kls)
    by_arm = {one.dose.arm.name: one for one in response.responses}
    steps = checks[1].evidence.values("take_off_steps")
    values = [
        math.log(steps["nvfp4_x4"][seed] / steps["bf16_lora"][seed]) for seed in steps["bf16_lora"]
    ]
    expected = mean_interval(values, 1 - 0.05 / 12)
    one = by_arm["nvfp4_x4"]
    assert expected.low is not None
    assert expected.high is not None
    assert (one.ratio, one.low, one.high) == pytest.approx(
        tuple(map(math.exp, (expected.value, expected.low, expected.high)))
    )
    assert one.ratio == pytest.approx(DOSES["nvfp4_x4"][2], rel=0.1)
    assert one.pairs == 12
    kinds = {name: one.dose.kind for name, one in by_arm.items()}
    assert {name for name, kind in kinds.items() if kind == "added noise"} == {
        "nvfp4_lora_aqn", "aqn_01", "aqn_03",
    }  # fmt: skip
    assert kinds["noise_as_nvfp4"] == "Gaussian noise"


def test_the_papers_dose_lies_between_neighbours_straight_on_the_logarithm() -> None:
    ladder = [
        dose("nvfp4_lora", 1e-3, 0.02),
        dose("aqn_03", 5e-3, None),
        dose("nvfp4_x2", 1e-2, 0.12),
        dose("nvfp4_x4", 1e-1, 0.32),
        dose("int2_lora", 1.0, 3.0),
    ]
    place = place_of(ladder, 0.17, "kl")
    assert place is not None
    assert (place.below.arm.name, place.above.arm.name) == ("nvfp4_x2", "nvfp4_x4")
    assert place.at == pytest.approx(10**-1.75)
    assert place.is_wide
    near = place_of([dose("nvfp4_x3", 3e-2, 0.1), dose("nvfp4_x4", 6e-2, 0.3)], 0.2, "kl")
    assert near is not None
    assert near.at == pytest.approx(math.sqrt(3e-2 * 6e-2))
    assert not near.is_wide
    # By the entropy itself nothing is interpolated.
    same = place_of(ladder, 0.17, "decision")
    assert same is not None
    assert (same.at, same.is_wide) == (0.17, False)
    assert (same.below, same.above) == (place.below, place.above)


def test_outside_of_the_recorded_entropies_the_paper_has_no_place() -> None:
    ladder = [dose("nvfp4_lora", 1e-3, 0.02), dose("nvfp4_x2", 1e-2, 0.12)]
    assert place_of(ladder, 0.227, "kl") is None
    assert place_of(ladder, 0.01, "decision") is None
    # Noise is no part of the paper's figure.
    assert place_of([*ladder, dose("noise_as_nvfp4", 5e-2, 0.3)], 0.227, "kl") is None
    assert place_of([], 0.227, "kl") is None


def test_before_doses_were_measured_arms_stand_by_the_deciding_tokens_entropy(
    checks: list[Checked],
) -> None:
    response = dose_response(without(checks, "dose_start"))
    assert response is not None
    assert response.axis == "decision"
    rises = {one.dose.arm.name: one.dose.on("decision") for one in response.responses}
    # A record's entropy is the policy's own, without added noise.
    assert rises.keys() == {name for name in DOSES if "aqn" not in name} - {"bf16_lora"}
    assert rises == pytest.approx({name: DOSES[name][1] for name in rises})
    assert list(rises.values()) == sorted(rises.values())
    assert response.place is not None
    assert response.place.at == PAPER_RISE
    with_kl = dose_response(checks)
    assert with_kl is not None
    assert with_kl.place is not None
    # The same arms lie around the paper's dose on either axis; the policy's own entropy falls here.
    for place in (response.place, with_kl.place):
        assert (place.below.arm.name, place.above.arm.name) == ("nvfp4_x3", "nvfp4_x4")
    by_ratio = {one.dose.arm.name: one.ratio for one in with_kl.responses}
    assert {one.dose.arm.name: one.ratio for one in response.responses}.items() <= by_ratio.items()


def test_an_arm_has_no_place_on_an_axis_that_it_was_not_measured_by() -> None:
    with pytest.raises(ValueError, match="aqn_03: it has no place on the axis decision"):
        dose("aqn_03", 5e-2, None).on("decision")


def test_where_most_runs_do_not_take_off_there_is_no_interval(checks: list[Checked]) -> None:
    start, trained, rung = checks
    numbers = {
        arm: {
            seed: {name: estimate.value or 0.0 for name, estimate in record.metrics.items()}
            | ({"took_off": 0.0} if arm == "int2_lora" and seed < 223 else {})
            for seed, record in seeds.items()
        }
        for arm, seeds in trained.evidence.records.items()
    }
    response = dose_response([start, checked_of(trained.selection.target, numbers), rung])
    assert response is not None
    by_arm = {one.dose.arm.name: one for one in response.responses}
    assert not by_arm["int2_lora"].took_off
    assert by_arm["int2_lora"].low is None
    assert by_arm["nvfp4_x4"].took_off
    assert "int2" not in in_words(response).lower()


def test_without_records_of_both_there_is_nothing(checks: list[Checked]) -> None:
    assert dose_response([]) is None
    assert dose_response([checks[0]]) is None
    empty = [checked_of(checked.selection.target, {}) for checked in checks]
    assert dose_response(empty) is None
    assert all(one.kl is None and one.rise is None for one in doses(empty[0].evidence, []))
    # The rung alone has formats and QeRL, and no BF16 arm of the doses' seeds: no quotient.
    assert dose_response(without(checks, "needle_dose")) is None


def test_the_words_say_what_is_sooner_and_where_the_paper_is(checks: list[Checked]) -> None:
    response = dose_response(checks)
    assert response is not None
    words = in_words(response)
    sooner = [one for one in response.responses if one.high is not None and one.high < 1]
    assert f"{len(sooner)} take off after fewer steps than BF16" in words
    assert arm_name(sooner[0].dose.arm) in words
    assert response.place is not None
    assert f"a KL of {response.place.at:.2g} nats" in words
    assert words.index("between NVFP4 x3") < words.index("and NVFP4 x4")
    nothing = dataclasses.replace(response, responses=response.responses[:1], place=None)
    assert "none takes off" in in_words(nothing)
    assert "No two recorded arms" in in_words(nothing)
