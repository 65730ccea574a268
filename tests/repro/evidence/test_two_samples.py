"""The difference of two independent means, against scipy's."""

import pytest
from scipy import stats

from repro.evidence.verdicts.statistics import difference

OLD, NEW = (10.0, 10.2, 9.9, 10.1, 10.0), (10.6, 10.4, 10.9)


def test_welch_agrees_with_scipy():
    ours = difference(OLD, NEW)
    by_scipy = stats.ttest_ind(NEW, OLD, equal_var=False, alternative="greater")
    interval = stats.ttest_ind(NEW, OLD, equal_var=False).confidence_interval(0.95)
    assert ours.p_above == pytest.approx(by_scipy.pvalue, rel=1e-9)
    assert ours.p_below == pytest.approx(1 - by_scipy.pvalue, rel=1e-9)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_a_single_new_value_is_given_the_spread_of_the_old_ones():
    ours = difference(OLD, (10.4,))
    # A new value lies outside the old ones' prediction interval: t of n - 1 degrees.
    t = (10.4 - 10.04) / (stats.tstd(OLD) * (1 + 1 / 5) ** 0.5)
    assert ours.p_above == pytest.approx(stats.t.sf(t, 4), rel=1e-9)


def test_two_values_a_side_have_a_difference_and_no_test():
    ours = difference((1.0, 1.1), (2.0, 2.1))
    assert ours.value == pytest.approx(1.0)
    assert (ours.low, ours.high, ours.p_above, ours.p_below) == (None, None, None, None)


def test_pairs_agree_with_scipy():
    old, new = OLD[:3], (10.6, 10.9, 10.4)
    ours = difference(old, new, paired=True)
    by_scipy = stats.ttest_rel(new, old, alternative="greater")
    interval = stats.ttest_rel(new, old).confidence_interval(0.95)
    assert ours.p_above == pytest.approx(by_scipy.pvalue, rel=1e-9)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    same = difference(OLD, OLD, paired=True)
    assert (same.value, same.low, same.high, same.p_above, same.p_below) == (0, 0, 0, 1, 1)


def test_values_without_spread_differ_for_certain_or_not_at_all():
    assert difference((3.0,) * 3, (3.0,) * 3).p_above == 1.0
    apart = difference((3.0,) * 3, (4.0,) * 3)
    assert (apart.low, apart.high, apart.p_above, apart.p_below) == (1.0, 1.0, 0.0, 1.0)
