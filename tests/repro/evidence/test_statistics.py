"""The statistics, each against scipy or against counting by hand."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from scipy import special, stats

from repro.evidence import statistics as st


@pytest.mark.parametrize("df", [1, 2, 3, 4, 9, 30, 200])
@pytest.mark.parametrize("p", [0.001, 0.025, 0.3, 0.5, 0.8, 0.975, 0.9995])
def test_t_quantiles_are_those_of_scipy(df: int, p: float) -> None:
    assert st.t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (2, 0.5), (1, 3), (40, 0.5), (5.5, 7.25)])
def test_the_incomplete_beta_function_is_that_of_scipy(a: float, b: float) -> None:
    for x in np.linspace(0, 1, 41):
        assert st.incomplete_beta(a, b, float(x)) == pytest.approx(
            special.betainc(a, b, x), abs=1e-12
        )


def test_mean_intervals_are_students() -> None:
    values = [3.1, 4.7, 2.2, 5.0, 4.4]
    interval = st.mean_interval(values)
    low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert (interval.low, interval.high) == pytest.approx((low, high))


def test_a_single_value_has_no_interval_and_none_is_an_error() -> None:
    assert st.mean_interval([2.0]) == st.Interval(value=2.0, low=None, high=None, n=1)
    with pytest.raises(ValueError, match="no values"):
        st.mean_interval([])


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 10), (1198, 1319), (30, 30)])
def test_wilson_intervals_are_those_of_scipy(k: int, n: int) -> None:
    ours = st.wilson_interval(k, n)
    theirs = stats.binomtest(k, n).proportion_ci(method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_differences_that_cancel_have_a_mean_of_zero() -> None:
    # Of accuracies: 98.2 - 97.6 and 97.6 - 98.2, and so on; their plain mean is about 3e-15.
    ends = [(98.2, 97.6), (97.6, 98.2), (98.4, 98.0), (97.0, 97.4)]
    differences = [first - second for first, second in ends]
    assert st.paired(differences).mean == 0
    assert st.paired([*differences, 0.001]).mean == pytest.approx(0.0002)
    small = [1e-15, 2e-15, 3e-15]
    assert st.paired(small).mean == pytest.approx(2e-15)


def test_paired_comparisons_are_scipys_t_test() -> None:
    differences = [0.4, 1.2, -0.3, 0.9, 0.7, 0.1]
    ours = st.paired(differences, bound=0.25)
    assert ours.p_two_sided == pytest.approx(stats.ttest_1samp(differences, 0.25).pvalue)


def test_the_sign_flip_test_counts_every_sign() -> None:
    differences = [0.4, 1.2, -0.3, 0.9]
    observed = sum(differences)
    sums = [
        sum(s * abs(d) for s, d in zip(signs, differences, strict=True))
        for signs in itertools.product((-1, 1), repeat=4)
    ]
    assert st.sign_flip(differences) == sum(s >= observed - 1e-9 for s in sums) / 16


def test_five_pairs_are_the_fewest_that_can_be_significant() -> None:
    assert st.sign_flip([1.0] * 4) == 1 / 16
    assert st.sign_flip([1.0] * 5) == 1 / 32 < 0.05


def test_sampled_signs_are_those_of_pythons_generator() -> None:
    differences = [0.3 * (place % 7) - 0.8 for place in range(40)]
    draw, hits = random.Random(20251013), 0
    for _ in range(50_000):
        drawn = [abs(value) if draw.random() < 0.5 else -abs(value) for value in differences]
        hits += sum(drawn) >= sum(differences) - 1e-10
    assert 0 < hits < 50_000
    assert st.sign_flip(differences) == (hits + 1) / 50_001


def test_sampled_sign_flips_agree_with_exact_ones() -> None:
    rng = np.random.default_rng(3)
    values = list(rng.normal(0.25, 1, 20))
    scipys = stats.permutation_test(
        (values,), np.sum, permutation_type="samples", alternative="greater", rng=rng
    ).pvalue
    assert st.sign_flip(values) == pytest.approx(scipys, abs=0.02)


@pytest.mark.parametrize(("n", "k"), [(2, 3), (5, 4), (8, 4), (4, 5)])
def test_pages_test_is_scipys_exact_one(n: int, k: int) -> None:
    data = np.random.default_rng(n * 10 + k).normal(size=(n, k)) + 0.4 * np.arange(k)
    statistic, p = st.page_trend(data.tolist())
    theirs = stats.page_trend_test(data, method="exact")
    assert statistic == theirs.statistic
    assert p == pytest.approx(theirs.pvalue, abs=1e-12)


def test_pages_test_with_ties_permutes_the_midranks() -> None:
    blocks = [[1.0, 1.0, 2.0], [3.0, 2.0, 2.0]]
    ranks = [st.midranks(block) for block in blocks]
    score = [
        sum(i * r for i, r in enumerate(a, 1)) + sum(i * r for i, r in enumerate(b, 1))
        for a in itertools.permutations(ranks[0])
        for b in itertools.permutations(ranks[1])
    ]
    observed = sum(sum(i * r for i, r in enumerate(block, 1)) for block in ranks)
    statistic, p = st.page_trend(blocks)
    assert statistic == observed
    assert p == pytest.approx(sum(s >= observed for s in score) / len(score))


def test_all_blocks_in_order_have_the_known_chance() -> None:
    assert st.page_trend([[1, 2, 3, 4]] * 2)[1] == pytest.approx(1 / 24**2)


def test_midranks_are_scipys() -> None:
    values = [3.0, 1.0, 3.0, 2.0, 2.0, 2.0]
    assert st.midranks(values) == list(stats.rankdata(values))


def test_holms_correction_steps_down() -> None:
    assert st.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert st.holm([0.9, 0.8]) == [1.0, 1.0]
    assert st.holm([]) == []


def test_the_probability_of_improvement_counts_ties_half() -> None:
    assert st.probability_of_improvement([1, 2], [1, 0]) == (0.5 + 1 + 1 + 1) / 4


@pytest.mark.parametrize("n", [2, 3, 5, 10, 40])
@pytest.mark.parametrize("effect", [0.0, 0.5, 1.5, 3.0])
def test_power_is_that_of_the_noncentral_t(n: int, effect: float) -> None:
    critical = stats.t.ppf(0.975, n - 1)
    theirs = stats.nct.sf(critical, n - 1, effect * math.sqrt(n)) if effect else 0.025
    assert st.power(effect, n) == pytest.approx(theirs, abs=2e-4)


def test_the_detectable_effect_has_the_power_it_promises() -> None:
    effect = st.minimum_detectable_effect(2.5, 5)
    shift = effect / 2.5 * math.sqrt(5)
    assert stats.nct.sf(stats.t.ppf(0.975, 4), 4, shift) == pytest.approx(0.8, abs=1e-3)


def test_the_seeds_needed_are_the_first_with_enough_power() -> None:
    n = st.seeds_needed(1.0, 1.0)
    assert n is not None
    assert st.power(1.0, n) >= 0.8 > st.power(1.0, n - 1)
    assert st.seeds_needed(0.0, 1.0) is None
    assert st.seeds_needed(1e-9, 1.0) is None


def test_the_slope_of_a_block_is_the_least_squares_one() -> None:
    block = [3.0, 2.0, 5.0, 9.0]
    assert st.trend_slope(block) == pytest.approx(np.polyfit(range(4), block, 1)[0])
