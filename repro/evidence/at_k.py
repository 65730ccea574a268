"""Unbiased estimators of pass@k and maj@k from n samples of a problem.

With c of n samples right, drawing k of them without replacement gives

    pass@k = 1 - C(n - c, k) / C(n, k),

and maj@k is the probability that the most frequent answer among the k is a right one, ties broken
evenly. It is summed exactly: for each answer a and each number j of its votes, count the ways in
which t other answers also get j votes and none gets more, each way winning with 1 / (t + 1).

Easy to get wrong: `1 - (1 - c/n)^k` is biased upward in error (it samples with replacement);
drawing k samples once is unbiased and noisy; a tie that goes to the first answer seen favours
whatever order the samples came in. Source for pass@k: arXiv 2107.03374, section 2.1.

Of more than `VOTING_SAMPLES` samples no majority is formed and no votes are kept: for 200 problems
of 256, maj@64 takes a minute each time a record is read, and votes are most of the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

VOTING_SAMPLES = 64


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k for one problem, c of whose n samples are right.

    Raises `ValueError` unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"c is {c} of n = {n} samples; it must lie in [0, n]")
    _require_k(k, n)
    return 1.0 - comb(n - c, k) / comb(n, k)


def majority_at_k(right: Sequence[int], wrong: Sequence[int], n: int, k: int) -> float:
    """Return the unbiased estimate of maj@k for one problem, ties broken evenly.

    Raises `ValueError` if k is not in [1, n].

    `right` and `wrong` say how many of the n samples gave each right and each wrong answer; more
    than one spelling may be right. Samples without an answer are among the k that are drawn and do
    not vote: if all abstain, it fails.
    """
    _require_k(k, n)
    counts = [*right, *wrong]
    abstentions = n - sum(counts)
    if k == n:  # all of them vote, in one way
        most = max(counts, default=0)
        return sum(1 / counts.count(most) for count in right if count == most > 0)
    favourable = 0.0
    for place, count in enumerate(right):
        others = counts[:place] + counts[place + 1 :]
        for votes in range(1, min(count, k) + 1):
            ways = comb(count, votes)
            favourable += ways * _shared_wins(others, abstentions, votes, k - votes)
    return favourable / comb(n, k)


def _shared_wins(others: Sequence[int], abstentions: int, votes: int, drawn: int) -> float:
    """Return the ways to draw others, none above `votes`, each way counted 1 / (ties + 1)."""
    # ways[ties][m]: ways to draw m samples so that `ties` answers have exactly `votes` of them.
    ways = [[0] * (drawn + 1) for _ in range(len(others) + 1)]
    for absent in range(min(abstentions, drawn) + 1):
        ways[0][absent] = comb(abstentions, absent)
    for count in others:
        following = [[0] * (drawn + 1) for _ in ways]
        for ties, row in enumerate(ways):
            for m, number in enumerate(row):
                if number:
                    for taken in range(min(count, votes, drawn - m) + 1):
                        target = following[ties + (taken == votes)]
                        target[m + taken] += number * comb(count, taken)
        ways = following
    return sum(row[drawn] / (ties + 1) for ties, row in enumerate(ways))


def _require_k(k: int, n: int) -> None:
    """Raise unless k lies in [1, n]."""
    if not 1 <= k <= n:
        raise ValueError(f"k is {k} with n = {n} samples; it must lie in [1, n]")
