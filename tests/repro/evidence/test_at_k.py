"""pass@k and maj@k against enumeration of every subset."""

from collections import Counter
from itertools import combinations, product

import pytest

from repro.evidence.at_k import majority_at_k, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n in range(1, 9):
        for c, k in product(range(n + 1), range(1, n + 1)):
            subsets = list(combinations(range(n), k))
            share = sum(min(subset) < c for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share)


def _majority_by_enumeration(answers, right, k):
    """Return the share of k-subsets won by a right answer, ties shared; `-` abstains."""
    won = 0.0
    subsets = list(combinations(answers, k))
    for subset in subsets:
        votes = Counter(answer for answer in subset if answer != "-")
        if votes:
            winners = [a for a, count in votes.items() if count == max(votes.values())]
            won += sum(a in right for a in winners) / len(winners)
    return won / len(subsets)


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        ("aab", "a"),
        ("abc", "a"),
        ("aabbccd", "a"),
        ("aabbccdd", "ad"),
        ("abbbcc-", "a"),
        ("--a", "a"),
        ("---", "a"),
        ("aaaaaaaa", "a"),
        ("bbbbbbaa", "a"),
        ("bcdefgh", "a"),
    ],
)
def test_majority_at_k_is_the_share_of_subsets_won_with_ties_shared(answers, right):
    votes = Counter(answers.replace("-", ""))
    for_right = [n for answer, n in votes.items() if answer in right]
    for_wrong = [n for answer, n in votes.items() if answer not in right]
    for k in range(1, len(answers) + 1):
        expected = _majority_by_enumeration(list(answers), set(right), k)
        estimate = majority_at_k(for_right, for_wrong, len(answers), k)
        assert estimate == pytest.approx(expected)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match="must lie in"):
        pass_at_k(n, c, k)
