"""Which groups go together in a pass: each once, within the limit, long ones apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from repro.rl.rows import Rows, make_rows
from repro.rl.stacked.batch import cut, largest_group, make_batch, padded_tokens
from repro.rollout.sampler import Completion

SIZE = 4
PROMPT = 20


def rows_of(longest: Sequence[int]) -> Rows:
    """Return a rollout with a group for each number, whose longest completion is that long."""
    completions = [
        Completion(
            token_ids=(1,) * length, sampled_logprobs=(0.0,) * length, finish_reason="length"
        )
        for most in longest
        for length in (most, *(1,) * (SIZE - 1))
    ]
    return make_rows([[1] * PROMPT] * len(longest), completions, group_size=SIZE)


def test_a_few_long_completions_go_apart_from_the_short() -> None:
    rows = [rows_of([9] * 7 + [1]), rows_of([9] * 8)]
    every = [list(range(8))] * 2
    assert cut(rows, every, SIZE, 10**6, learning=8) == [every]
    # One run's are enough: what it pads, all of them pad.
    rows[0] = rows_of([200, 200, *[9] * 6])
    pieces = cut(rows, every, SIZE, 10**6, learning=8)
    assert [piece[1] for piece in pieces] == [[0, 1], [2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("most", [1, 200, 700, 10**6])
def test_every_group_goes_once_in_its_order_and_within_the_limit(most: int) -> None:
    rows = [rows_of([90, 60, 30, 9, 5]), None, rows_of([128, 7, 7, 7, 7, 7])]
    groups = [[0, 1, 2, 3, 4], [], [5, 0, 3, 2]]
    pieces = cut(rows, groups, SIZE, most)
    in_order = [list(itertools.chain(*(piece[run] for piece in pieces))) for run in range(3)]
    assert in_order == groups
    for piece in pieces:
        batch = make_batch(rows, piece, SIZE)
        assert batch.prompt_ids.shape[2] % 8 == batch.token_ids.shape[3] % 8 == 0
        taken = batch.prompt_ids[0].numel() + batch.token_ids[0].numel()
        assert taken <= most or max(map(len, piece)) == 1
        assert taken <= padded_tokens(PROMPT, 128, SIZE) * batch.prompt_ids.shape[1]
    assert largest_group(rows, SIZE) == padded_tokens(PROMPT, 128, SIZE)
