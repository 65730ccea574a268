"""Verdicts: four words, and what must lead to each."""

from __future__ import annotations

import math
from typing import Any

import pytest

from repro.evidence.expectation import Expectation
from repro.evidence.verdict import Verdict, judge, judge_expectation
from repro.spec.target import Claim, Metric

ACCURACY = Metric(name="accuracy", unit="percent", title="accuracy")
METRICS = {"accuracy": ACCURACY}


def claim(kind: str, arms: tuple[str, ...], **more: Any) -> Claim:
    return Claim(
        name="c", statement="s", source="p", kind=kind, arms=arms, metric="accuracy", **more
    )


def values(**arms: list[float]) -> dict[str, dict[str, dict[int, float]]]:
    return {"accuracy": {arm: dict(enumerate(found)) for arm, found in arms.items()}}


def verdict_of(
    a_claim: Claim, failed: dict[str, int] | None = None, **arms: list[float]
) -> Verdict:
    return judge([a_claim], METRICS, values(**arms), {}, failed or {})[0]


HIGH = [80.0, 82.0, 81.0, 83.0, 80.5]
LOW = [70.0, 71.0, 70.5, 72.5, 71.0]
NEAR = [80.5, 81.2, 81.4, 82.1, 81.3]
MORE = {"margin": 1.5, "because": "stated in advance"}


@pytest.mark.parametrize(
    ("a", "b", "status"),
    [(HIGH, LOW, "reproduced"), (LOW, HIGH, "contradicted"), (HIGH, NEAR, "inconclusive")],
)
def test_a_difference_is_judged_by_its_interval(
    a: list[float], b: list[float], status: str
) -> None:
    verdict = verdict_of(claim("difference", ("a", "b")), a=a, b=b)
    assert verdict.status == status
    assert verdict.n == 5
    if status == "inconclusive":
        assert "5 seeds would have shown an effect of" in verdict.sentence


def test_four_seeds_never_decide() -> None:
    verdict = verdict_of(claim("difference", ("a", "b")), a=HIGH[:4], b=LOW[:4])
    assert verdict.status == "inconclusive"
    assert "4 paired seed(s); a verdict needs 5" in verdict.sentence


def test_only_seeds_that_both_arms_have_are_paired() -> None:
    found = {"accuracy": {"a": dict(zip([0, 1, 2, 3, 4, 9], [*HIGH, 0.0], strict=True)),
                          "b": dict(enumerate(LOW))}}  # fmt: skip
    verdict = judge([claim("difference", ("a", "b"))], METRICS, found, {}, {})[0]
    assert verdict.n == 5


def test_pairing_finds_what_seed_noise_would_hide() -> None:
    noise = [-20.0, -10.0, 0.0, 10.0, 20.0]
    a = [50 + value + 1.0 + 0.1 * i for i, value in enumerate(noise)]
    b = [50 + value for value in noise]
    assert verdict_of(claim("difference", ("a", "b")), a=a, b=b).status == "reproduced"


def test_non_inferiority_needs_the_interval_above_minus_the_margin() -> None:
    a_claim = claim("non_inferior", ("a", "b"), **MORE)
    assert verdict_of(a_claim, a=NEAR, b=HIGH).status == "reproduced"
    assert verdict_of(a_claim, a=LOW, b=HIGH).status == "contradicted"


def test_a_control_that_gains_is_contradicted() -> None:
    a_claim = claim("no_gain", ("a",), mechanism=True, margin=15.0, because="drift")
    assert verdict_of(a_claim, a=[1.0, -2.0, 3.0, 0.0, 1.0]).status == "reproduced"
    gained = verdict_of(a_claim, a=[40.0, 42.0, 39.0, 41.0, 40.0])
    assert gained.status == "contradicted"
    assert gained.own_fault


def test_a_trend_is_pages_and_can_be_reversed() -> None:
    arms = {"a": LOW, "b": [v + 2 for v in LOW], "c": [v + 4 for v in LOW]}
    assert verdict_of(claim("trend", ("a", "b", "c")), **arms).status == "reproduced"
    assert verdict_of(claim("trend", ("c", "b", "a")), **arms).status == "contradicted"


def test_an_order_needs_its_pairs_beyond_the_trend() -> None:
    close = [71.2, 70.1, 71.0, 72.4, 71.1]
    arms = {"a": LOW, "b": close, "c": [v + 6 for v in LOW], "d": [v + 9 for v in LOW]}
    names = ("a", "b", "c", "d")
    assert verdict_of(claim("trend", names), **arms).status == "reproduced"
    verdict = verdict_of(claim("order", names), **arms)
    assert verdict.status == "inconclusive"
    assert "not resolved: a < b" in verdict.sentence


def test_a_ratio_is_tested_on_its_logarithm_and_told_as_a_ratio() -> None:
    a_claim = claim("ratio", ("a", "b"), margin=1.5, because="the headline")
    b = [100.0, 110.0, 90.0, 105.0, 95.0]
    twice = verdict_of(a_claim, a=[2 * v * (1 + 0.01 * i) for i, v in enumerate(b)], b=b)
    assert twice.status == "reproduced"
    wanted = sum(math.log(2 * (1 + 0.01 * i)) for i in range(5)) / 5
    assert twice.effect == pytest.approx(math.exp(wanted))
    slow = verdict_of(a_claim, a=[1.2 * v * (1 + 0.01 * i) for i, v in enumerate(b)], b=b)
    assert slow.status == "contradicted"


def test_holm_makes_a_weak_claim_among_many_inconclusive() -> None:
    weak = [1.0, 2.2, 0.3, 1.9, 0.9]
    alone = [claim("difference", ("a", "b"))]
    found = values(a=[50 + value for value in weak], b=[50.0] * 5)
    assert judge(alone, METRICS, found, {}, {})[0].status == "reproduced"
    many = [
        Claim(
            name=f"c{i}",
            statement="s",
            source="p",
            kind="difference",
            arms=("a", "b"),
            metric="accuracy",
        )
        for i in range(5)
    ]
    assert {v.status for v in judge(many, METRICS, found, {}, {})} == {"inconclusive"}


def test_a_failed_seed_takes_success_away() -> None:
    verdict = verdict_of(claim("difference", ("a", "b")), {"a": 1}, a=HIGH, b=LOW)
    assert verdict.status == "inconclusive"
    assert "1 run(s) of a failed" in verdict.sentence


def test_an_absent_arm_is_not_run_with_its_reason() -> None:
    verdict = judge(
        [claim("difference", ("a", "b"))], METRICS, values(a=HIGH), {"b": "needs a GPU"}, {}
    )[0]
    assert (verdict.status, verdict.sentence) == ("not run", "needs a GPU")


def test_equal_seeds_cannot_tell() -> None:
    verdict = verdict_of(claim("difference", ("a", "b")), a=[1.0] * 5, b=[1.0] * 5)
    assert verdict.status == "inconclusive"
    assert "agree to the last digit" in verdict.sentence


def test_a_contradicted_claim_of_the_papers_is_no_fault_of_ours() -> None:
    assert not verdict_of(claim("difference", ("a", "b")), a=LOW, b=HIGH).own_fault


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ((78.0, 85.0), "reproduced"),
        ((90.0, None), "contradicted"),
        ((None, 60.0), "contradicted"),
        ((81.0, 90.0), "inconclusive"),
    ],
)
def test_an_expectation_is_judged_by_the_means_interval(
    accept: tuple[float | None, float | None], status: str
) -> None:
    expectation = Expectation(
        arm="a", metric="accuracy", accept=accept, source="derived", because="b"
    )
    assert judge_expectation(expectation, ACCURACY, dict(enumerate(HIGH)), None).status == status


def test_one_seed_outside_breaks_an_expectation_of_every_seed() -> None:
    expectation = Expectation(
        arm="a",
        metric="accuracy",
        accept=(15.0, None),
        source="derived",
        because="b",
        statistic="every_seed",
    )
    verdict = judge_expectation(expectation, ACCURACY, {0: 40.0, 1: 14.9, 2: 41.0}, None)
    assert verdict.status == "contradicted"
    assert "2 of 3 inside" in verdict.sentence


def test_an_interaction_is_the_difference_of_two_differences() -> None:
    four = claim("interaction", ("a", "b", "c", "d"))
    verdict = verdict_of(four, a=HIGH, b=LOW, c=LOW, d=LOW)
    assert verdict.status == "reproduced"
    plain = verdict_of(claim("difference", ("a", "b")), a=HIGH, b=LOW)
    assert verdict.effect == pytest.approx(plain.effect)
    assert verdict.sentence.startswith("(a - b) - (c - d): +10")
    assert verdict_of(four, a=HIGH, b=LOW, c=HIGH, d=LOW).status == "inconclusive"
    assert verdict_of(four, a=LOW, b=LOW, c=HIGH, d=LOW).status == "contradicted"


def test_a_claim_paired_by_prompt_reads_the_prompts() -> None:
    paired = claim("difference", ("a", "b"), paired_by="prompt")
    found = values(a=HIGH * 4, b=LOW * 4)
    verdict = judge([paired], METRICS, values(a=LOW, b=HIGH), {}, {}, found)[0]
    assert verdict.status == "reproduced"
    assert verdict.n == 20
    assert "n = 20 prompts" in verdict.sentence
    assert judge([paired], METRICS, found, {}, {})[0].status == "not run"


def test_a_verdict_says_how_many_seeds_would_decide() -> None:
    undecided = verdict_of(claim("difference", ("a", "b")), a=[*HIGH[:4], 81.0], b=NEAR)
    assert undecided.needed is not None
    assert f"{undecided.needed} seeds would decide" in undecided.sentence
    decided = verdict_of(claim("difference", ("a", "b")), a=HIGH, b=LOW)
    assert decided.needed is not None
    assert decided.needed <= decided.n
