"""The statistics against scipy or counting by hand; for those in tests/test_fuzz.py, the edges."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
from scipy import stats

from repro.evidence.estimate import Interval, mean_interval
from repro.evidence.verdicts import statistics as st


def test_a_single_value_has_no_interval():
    assert mean_interval([2.0]) == Interval(value=2.0, low=None, high=None, n=1)


def test_differences_that_cancel_have_a_mean_of_zero():
    # Of accuracies: 98.2 - 97.6 and 97.6 - 98.2, and so on; their plain mean is about 3e-15.
    ends = [(98.2, 97.6), (97.6, 98.2), (98.4, 98.0), (97.0, 97.4)]
    differences = [first - second for first, second in ends]
    assert st.mean(differences) == 0
    assert st.mean([*differences, 0.001]) == pytest.approx(0.0002)
    assert st.mean([1e-15, 2e-15, 3e-15]) == pytest.approx(2e-15)


@pytest.mark.parametrize(("n", "k"), [(2, 3), (5, 4), (8, 4), (4, 5)])
def test_pages_test_is_scipys_exact_one(n, k):
    data = np.random.default_rng(n * 10 + k).normal(size=(n, k)) + 0.4 * np.arange(k)
    statistic, p = st.page_trend(data.tolist())
    by_scipy = stats.page_trend_test(data, method="exact")
    assert statistic == by_scipy.statistic
    assert p == pytest.approx(by_scipy.pvalue, abs=1e-12)


def test_pages_test_with_ties_permutes_the_midranks():
    blocks = [[1.0, 1.0, 2.0], [3.0, 2.0, 2.0]]
    ranks = [[1.5, 1.5, 3.0], [3.0, 1.5, 1.5]]
    score = [
        sum(i * r for i, r in enumerate(a, 1)) + sum(i * r for i, r in enumerate(b, 1))
        for a in itertools.permutations(ranks[0])
        for b in itertools.permutations(ranks[1])
    ]
    observed = sum(sum(i * r for i, r in enumerate(block, 1)) for block in ranks)
    statistic, p = st.page_trend(blocks)
    assert statistic == observed
    assert p == pytest.approx(sum(s >= observed for s in score) / len(score))


def test_the_detectable_effect_has_the_power_it_promises():
    for n in (2, 3, 5, 8, 100):
        shift = st.minimum_detectable_effect(2.5, n) / 2.5 * math.sqrt(n)
        assert stats.nct.sf(stats.t.ppf(0.975, n - 1), n - 1, shift) == pytest.approx(0.8, abs=1e-5)


def test_the_sign_flip_test_counts_the_patterns_of_signs():
    assert st.sign_flip([98.0, 26.8, 21.4, 36.8, 18.8]) == pytest.approx(1 / 32)
    differences = [1.0, -1.5, 2.0, -1.0, 0.5, 3.0]
    means = [np.mean([s * d for s, d in zip(signs, differences, strict=True)])
             for signs in itertools.product((1, -1), repeat=6)]  # fmt: skip
    share = np.mean([mean >= np.mean(differences) - 1e-12 for mean in means])
    assert st.sign_flip(differences) == pytest.approx(share)


def test_of_many_pairs_the_patterns_are_drawn_and_the_same_each_time():
    differences = [float(d) for d in np.random.default_rng(3).normal(0.25, 1.0, size=30)]
    p = st.sign_flip(differences)
    assert p == st.sign_flip(differences)
    # Of 30 normal differences, the t test's one-sided p is all but the same.
    students = stats.ttest_1samp(differences, 0, alternative="greater").pvalue
    assert p == pytest.approx(students, abs=0.01)


@pytest.mark.parametrize("n", [6, 9, 12, 15])
def test_median_intervals_are_those_of_scipys_quantile_test(n):
    values = [float(value) for value in np.random.default_rng(n).normal(size=n)]
    interval, level = st.median_interval(values)
    own = stats.quantile_test(np.array(values), q=0, p=0.5).confidence_interval(0.95)
    assert (interval.low, interval.high) == (own.low, own.high)
    assert interval.value == np.median(values)
    assert level >= 0.95


def test_few_values_have_their_range_and_its_own_level():
    interval, level = st.median_interval([19.0, 98.0, 27.0, 21.0, 37.0])
    assert (interval.low, interval.value, interval.high) == (19.0, 27.0, 98.0)
    assert level == pytest.approx(1 - 2 / 32)


OLD, NEW = (10.0, 10.2, 9.9, 10.1, 10.0), (10.6, 10.4, 10.9)


@pytest.mark.parametrize(("old", "paired"), [(OLD, False), (OLD[:3], True)])
def test_a_difference_of_two_sides_is_scipys(old, paired):
    ours = st.difference(old, NEW, paired=paired)
    test = stats.ttest_rel if paired else partial(stats.ttest_ind, equal_var=False)
    interval = test(NEW, old).confidence_interval(0.95)
    above = test(NEW, old, alternative="greater").pvalue
    assert (ours.p_above, ours.p_below) == pytest.approx((above, 1 - above), rel=1e-9)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_a_single_new_value_is_given_the_spread_of_the_old_ones():
    ours = st.difference(OLD, (10.4,))
    # A new value lies outside the old ones' prediction interval: t of n - 1 degrees.
    t = (10.4 - 10.04) / (stats.tstd(OLD) * (1 + 1 / 5) ** 0.5)
    assert ours.p_above == pytest.approx(stats.t.sf(t, 4), rel=1e-9)


@pytest.mark.parametrize(
    ("old", "new", "paired", "found"),
    [
        # Two values a side show no spread; equal ones differ for certain or not at all.
        ((1.0, 1.1), (2.0, 2.1), False, (1.0, None, None, None, None)),
        ((3.0,) * 3, (4.0,) * 3, False, (1.0, 1.0, 1.0, 0.0, 1.0)),
        ((3.0,) * 3, (3.0,) * 3, False, (0.0, 0.0, 0.0, 1.0, 1.0)),
        (OLD, OLD, True, (0.0, 0.0, 0.0, 1.0, 1.0)),
    ],
)
def test_without_a_spread_there_is_a_difference_and_no_test(old, new, paired, found):
    ours = st.difference(old, new, paired=paired)
    shown = (ours.value, ours.low, ours.high, ours.p_above, ours.p_below)
    assert [value if value is None else pytest.approx(value) for value in shown] == [*found]
