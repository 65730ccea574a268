"""Equivalence, limits on an interval's width, unpaired arms, and measures beside the means."""

import dataclasses
import random
from functools import partial
from statistics import correlation, fmean

import numpy as np
import pytest
from scipy import stats

from repro.evidence.verdicts.secondary import secondary
from repro.spec.claim import Effect
from tests.repro.evidence.test_claim_verdicts import claim as any_claim
from tests.repro.evidence.test_claim_verdicts import verdict_of

BASE = [30.0, 31.5, 29.0, 33.0, 30.5, 28.5, 31.0, 32.0]
claim = partial(any_claim, "a", "b")
EQUAL = claim(test="tost", side="within", bound=1.35, because="half of the paper's")
ABOVE = claim(effect=Effect(paper=2.7, smallest=1.35, measure="units", because="half"))


def judged(stated, a, b):
    return verdict_of(stated, a=a, b=b)


def apart(*differences):
    return [b + d for b, d in zip(BASE, differences, strict=True)]


def test_two_one_sided_tests_are_those_of_scipy():
    draw = random.Random(3)
    seen = set()
    for shift in (0.0, 0.5, 1.0, 1.3, 2.5):
        a = apart(*(shift + draw.gauss(0, 1.0) for _ in BASE))
        verdict = judged(EQUAL, a, BASE)
        differences = [x - y for x, y in zip(a, BASE, strict=True)]
        low = stats.ttest_1samp(differences, -1.35, alternative="greater")
        high = stats.ttest_1samp(differences, 1.35, alternative="less")
        p = max(low.pvalue, high.pvalue)
        interval = stats.ttest_1samp(differences, 0).confidence_interval(0.9)
        assert (verdict.low, verdict.high) == pytest.approx((interval.low, interval.high))
        assert (verdict.status == "reproduced") == (p < 0.05)
        if abs(fmean(differences)) < 1.35:
            assert verdict.p == pytest.approx(p)
        seen.add(verdict.status)
    assert seen == {"reproduced", "inconclusive"} | (seen & {"contradicted"})
    assert "90 % interval" in verdict.sentence
    assert judged(EQUAL, apart(*[4.0, 4.2, 3.9, 4.1] * 2), BASE).status == "contradicted"


def test_an_interval_wider_than_the_limit_is_not_judged():
    wild = apart(9.0, -8.0, 12.0, -6.0, 5.0, 3.0, -2.0, 7.0)
    sure = apart(*[8.0, 8.4, 7.9, 8.1] * 2)
    for stated in (ABOVE, EQUAL):
        limited = dataclasses.replace(stated, widest=2.7)
        assert judged(stated, wild, BASE).status == "inconclusive"
        verdict = judged(limited, wild, BASE)
        assert verdict.status == "not judged"
        assert ((verdict.high or 0.0) - (verdict.low or 0.0)) / 2 > 2.7
        assert judged(limited, sure, BASE).status == judged(stated, sure, BASE).status
    ratio = claim(log=True, bound=1.0, widest=1.05, effect=Effect(paper=1.2, measure="ratio"))
    assert judged(ratio, wild, BASE).status == "not judged"
    assert judged(ratio, sure, BASE).status == "reproduced"


def test_unpaired_arms_are_compared_as_scipys_welch_does():
    loose = claim(effect=ABOVE.effect, unpaired_below=0.3)
    other = [2 * BASE[seed] - 27.0 for seed in (3, 0, 5, 1, 6, 7, 4, 2)]
    assert correlation(other, BASE) < 0.3
    verdict = judged(loose, other, BASE)
    wanted = stats.ttest_ind(other, BASE, equal_var=False)
    interval = wanted.confidence_interval(0.95)
    assert (verdict.low, verdict.high) == pytest.approx((interval.low, interval.high))
    assert verdict.p == pytest.approx(wanted.pvalue)
    assert "unpaired (correlation within pairs" in verdict.sentence
    # Pairs that correlate stay pairs, and without the declaration all do.
    paired = apart(*[3.0, 3.3, 2.8, 3.1] * 2)
    assert judged(loose, paired, BASE).sentence == judged(ABOVE, paired, BASE).sentence
    assert "unpaired" not in judged(ABOVE, other, BASE).sentence


def test_interquartile_means_and_the_probability_of_improvement_stand_beside_the_means():
    beside = claim(effect=ABOVE.effect, secondary=("iqm", "improvement"))
    # One collapse moves the mean and not the interquartile mean.
    a = [35.0, 36.0, 34.5, 37.0, 35.5, 34.0, 36.5, 2.0]
    verdict = judged(beside, a, BASE)
    middle = sum(sorted(a)[2:6]) / 4 - sum(sorted(BASE)[2:6]) / 4
    share = stats.mannwhitneyu(a, BASE).statistic / 64
    assert f"IQM {middle:+.3g} points (" in verdict.sentence
    assert f"probability of improvement {share:.2f} (" in verdict.sentence
    assert verdict.status == judged(ABOVE, a, BASE).status
    # The same values give the same intervals, and pairs drawn together narrower ones.
    assert judged(beside, a, BASE).sentence == verdict.sentence


def test_bootstrap_intervals_of_pairs_are_those_of_scipy_by_seed():
    both = claim(effect=ABOVE.effect, secondary=("iqm", "improvement"))
    a = apart(2.0, 3.0, 2.5, 1.0, 4.0, 2.2, 2.9, 3.1)
    blocks = list(zip(a, BASE, strict=True))
    found = secondary(both, blocks, paired=True)
    seeds = np.random.default_rng(11).integers(0, 8, (4000, 8))
    one, other = (stats.trim_mean(np.array(x)[seeds], 0.25, axis=1) for x in (a, BASE))
    low, high = np.quantile(one - other, [0.025, 0.975])
    assert (found["iqm"].low, found["iqm"].high) == pytest.approx((low, high), abs=0.15)
    loose = secondary(both, blocks, paired=False)
    assert found["iqm"].low > loose["iqm"].low
    turned = claim(contrast={"b": -1, "a": 1}, effect=ABOVE.effect, secondary=("improvement",))
    again = secondary(turned, [(y, x) for x, y in blocks], paired=True)
    assert again["improvement"].value == pytest.approx(found["improvement"].value)
