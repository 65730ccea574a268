"""Advantages: the baseline, its scale, who belongs to a group, and what shaping adds."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from repro.rl.advantage import group_advantages, informative_groups, overlong_penalty


def advantages(rewards: Any, ids: Any, scale_by_std: bool = True, epsilon: float = 1e-4) -> Any:
    return group_advantages(rewards, ids, scale_by_std=scale_by_std, epsilon=epsilon)


def test_standard_deviation_has_one_degree_of_freedom_less() -> None:
    rewards = [0.0, 1.0, 1.0, 0.2]
    result = advantages(rewards, [0] * 4).values.tolist()
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    assert result == pytest.approx([(r - mean) / (std + 1e-4) for r in rewards], abs=1e-12)
    population = [(r - mean) / (statistics.pstdev(rewards) + 1e-4) for r in rewards]
    assert result != pytest.approx(population, abs=1e-3)


@pytest.mark.parametrize("value", [0.0, 0.2, 1.0 / 3.0, 1.2, -0.7])
@pytest.mark.parametrize("scale_by_std", [False, True])
def test_a_group_of_equal_rewards_gives_exactly_zero(value: float, scale_by_std: bool) -> None:
    result = advantages([value] * 7 + [0.0, 1.0], [4] * 7 + [5] * 2, scale_by_std)
    assert result.values[:7].tolist() == [0.0] * 7
    assert (result.groups, result.zero_variance_groups) == (2, 1)
    assert result.values[7:].abs().min() > 0


def test_groups_are_centred_on_their_own_mean_and_not_the_batch() -> None:
    result = advantages([0.0, 1.0, 5.0, 7.0], [0, 0, 1, 1], scale_by_std=False).values
    assert result.tolist() == [-0.5, 0.5, -1.0, 1.0]


def test_order_of_rows_does_not_change_their_advantages() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(24, generator=generator, dtype=torch.float64)
    ids = torch.arange(6).repeat_interleave(4)
    sorted_ones = advantages(rewards.tolist(), ids).values
    order = torch.randperm(24, generator=generator)
    permuted = advantages(rewards[order].tolist(), ids[order]).values
    torch.testing.assert_close(permuted, sorted_ones[order], rtol=0, atol=1e-14)
    # A reshape to (-1, G) of the permuted rows would pair rows of different prompts.
    wrong = rewards[order].view(-1, 4)
    wrong = ((wrong - wrong.mean(1, keepdim=True)) / (wrong.std(1, keepdim=True) + 1e-4)).flatten()
    assert not torch.allclose(wrong, permuted, atol=1e-3)


def test_groups_may_differ_in_size_after_filtering() -> None:
    result = advantages([1.0, 0.0, 0.0, 4.0, 2.0], [7, 7, 7, 9, 9], scale_by_std=False).values
    assert result.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1.0, -1.0])


def test_a_missing_reward_leaves_its_group_and_is_not_a_zero() -> None:
    result = advantages([1.0, None, 0.0, 1.0], [0, 0, 0, 0])
    without = advantages([1.0, 0.0, 1.0], [0, 0, 0])
    assert result.scored.tolist() == [True, False, True, True]
    assert result.values[1] == 0
    assert result.values[[0, 2, 3]].tolist() == without.values.tolist()


def test_a_group_with_one_or_no_reward_left_gives_zero() -> None:
    result = advantages([None, 1.0, None, None], [0, 0, 1, 1])
    assert result.values.tolist() == [0.0] * 4
    assert result.zero_variance_groups == 2


def test_rewards_that_are_not_numbers_raise() -> None:
    with pytest.raises(ValueError, match="not finite"):
        advantages([1.0, math.nan], [0, 0])


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, 0.0),
        (79, 0.0),
        (80, 0.0),
        (81, -0.05),
        (90, -0.5),
        (99, -0.95),
        (100, -1.0),
        (101, -1.0),
    ],
)
def test_overlong_penalty_at_its_boundaries(length: int, expected: float) -> None:
    penalty = overlong_penalty(length, max_new_tokens=100, buffer=0.2)
    assert penalty == pytest.approx(expected, abs=1e-12)


def test_overlong_penalty_is_off_without_buffer() -> None:
    assert overlong_penalty(10_000, max_new_tokens=100, buffer=0.0) == 0.0


def test_informative_groups_go_by_accuracy() -> None:
    ids = [3, 3, 1, 1, 2, 2, 5, 5]
    assert informative_groups([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, None, 1.0], ids) == [3]
