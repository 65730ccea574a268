"""Expectations judged, and the false-discovery rate of a study."""

import dataclasses

import pytest

from repro.evidence.verdicts.expectation import Expectation
from repro.evidence.verdicts.verdict import Verdict, judge_expectation, with_discovery_rate
from repro.spec.claim import Metric

ACCURACY = Metric(name="accuracy", unit="percent", title="accuracy")
HIGH = [80.0, 82.0, 81.0, 83.0, 80.5]
BEFORE = ("reproduced", "contradicted", None)
BAR = Expectation(arm="a", metric="accuracy", accept=(70.0, None), source="derived", because="b")


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ((78.0, 85.0), "reproduced"),
        ((90.0, None), "contradicted"),
        ((None, 60.0), "contradicted"),
        ((81.0, 90.0), "inconclusive"),
    ],
)
def test_an_expectation_is_judged_by_the_means_interval(accept, status):
    expectation = dataclasses.replace(BAR, accept=accept)
    assert judge_expectation(expectation, ACCURACY, dict(enumerate(HIGH)), None).status == status


def test_a_bar_does_not_hold_while_planned_seeds_are_missing():
    values, missing = dict(enumerate(HIGH)), "1 of 6 planned seeds of a have no record (5)"
    assert judge_expectation(BAR, ACCURACY, values, None).status == "reproduced"
    verdict = judge_expectation(BAR, ACCURACY, values, None, lost=missing)
    assert verdict.status == "inconclusive"
    assert verdict.sentence.endswith(missing)
    missed = dataclasses.replace(BAR, accept=(90.0, None))
    verdict = judge_expectation(missed, ACCURACY, values, None, lost=missing)
    assert verdict.status == "contradicted"
    assert [dataclasses.replace(verdict, before=was).worse for was in BEFORE] == [
        True,
        False,
        False,
    ]


def shown(p, about="claim"):
    return Verdict(
        name="c", statement="s", source="Table 1", about=about, status="reproduced",
        sentence="because", p=p, p_alone=p,
    )  # fmt: skip


def test_a_small_p_among_many_statements_is_not_shown_over_the_study():
    study = [shown(0.03), *[shown(0.5)] * 9, shown(0.0001, about="mechanism")]
    first, *_, machinery = with_discovery_rate(study)
    assert first.q == pytest.approx(0.3)
    assert "Over the study's 10 statements q = 0.3" in first.sentence
    assert (machinery.q, machinery.sentence) == (None, "because")
    (alone,) = with_discovery_rate([shown(0.03)])
    assert (alone.q, alone.sentence) == (0.03, "because")
