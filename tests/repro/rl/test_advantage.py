"""Advantages: the baseline, its scale, who belongs to a group, and what shaping adds."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.rl.advantage import group_advantages, overlong_penalty


def advantages(rewards, ids, scale_by_std=True, epsilon=1e-4):
    return group_advantages(rewards, ids, scale_by_std=scale_by_std, epsilon=epsilon)


@pytest.mark.parametrize("value", [0.0, 0.2, 1.0 / 3.0, 1.2, -0.7])
@pytest.mark.parametrize("scale_by_std", [False, True])
def test_a_group_of_equal_rewards_gives_exactly_zero(value, scale_by_std):
    result = advantages([value] * 7 + [0.0, 1.0], [4] * 7 + [5] * 2, scale_by_std)
    assert result.values[:7].tolist() == [0.0] * 7
    assert (result.groups, result.zero_variance_groups) == (2, 1)
    assert result.values[7:].abs().min() > 0


REWARD = st.none() | st.sampled_from([0.0, 0.2, 1.0, 1.2, -3.5])


@given(st.lists(st.tuples(st.integers(0, 4), REWARD), min_size=1, max_size=20), st.booleans())
def test_each_group_of_named_rows_is_centred_by_itself_whatever_their_order(rows, scale_by_std):
    ids, rewards = zip(*rows, strict=True)
    result = advantages(rewards, ids, scale_by_std)
    assert result.scored.tolist() == [reward is not None for reward in rewards]
    constant = 0
    for group in set(ids):
        # A reward that could not be computed is no zero: it leaves its group.
        own = [reward for number, reward in rows if number == group and reward is not None]
        constant += len(set(own)) < 2
        for row, (number, reward) in enumerate(rows):
            if number != group:
                continue
            expected = 0.0
            if reward is not None and len(set(own)) >= 2:
                # The standard deviation has one degree of freedom less than rewards.
                scale = statistics.stdev(own) + 1e-4 if scale_by_std else 1.0
                expected = (reward - statistics.mean(own)) / scale
            assert float(result.values[row]) == pytest.approx(expected, abs=1e-12)
    assert (result.groups, result.zero_variance_groups) == (len(set(ids)), constant)


def test_rewards_that_are_not_numbers_raise():
    with pytest.raises(ValueError, match="not finite"):
        advantages([1.0, math.nan], [0, 0])


def test_overlong_penalty_falls_to_one_over_its_buffer_and_is_off_without():
    for length in range(1, 120):
        expected = -min(max(length - 80, 0) / 20, 1.0)
        penalty = overlong_penalty(length, max_new_tokens=100, buffer=0.2)
        assert penalty == pytest.approx(expected, abs=1e-12)
        assert overlong_penalty(length, max_new_tokens=100, buffer=0.0) == 0.0
