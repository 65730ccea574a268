"""Log-probabilities of completions: shift, temperature, padding, positions, rows that are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.rl.rows import Rows, make_rows
from repro.rl.single_run.packed import packed_logprobs


@pytest.fixture
def rows(make_policy: Any, make_completion: Any) -> Rows:
    """Three prompts of unequal length, three completions each, of 1 to 9 tokens."""
    generator = torch.Generator().manual_seed(4)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 90, (count,), generator=generator).tolist()

    prompts = [tokens(5), tokens(17), tokens(2)]
    completions = [make_completion(tokens(n)) for n in (3, 9, 1, 4, 4, 2, 8, 1, 5)]
    return make_rows(prompts, completions, group_size=3)


def by_hand(policy: Any, rows: Rows, row: int, temperature: float) -> tuple[Tensor, Tensor]:
    """One row, alone, through the whole model: each token from the logits before it."""
    prompt = list(rows.prompts[int(rows.prompt_of_row[row])])
    tokens = rows.token_ids[row, : int(rows.lengths()[row])].tolist()
    logits = policy.model(torch.tensor([prompt + tokens])).logits[0].double() / temperature
    logp = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    chosen = logp[torch.arange(len(tokens)), torch.tensor(tokens)]
    return chosen, -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_token_is_scored_by_the_logits_before_it(
    make_policy: Any, nudge: Any, rows: Rows, temperature: float
) -> None:
    policy = make_policy()
    nudge(policy)
    logprobs, entropy = packed_logprobs(policy, rows, temperature)
    assert logprobs.shape == entropy.shape == rows.mask.shape
    for row in range(len(rows)):
        length = int(rows.lengths()[row])
        expected, expected_entropy = by_hand(policy, rows, row, temperature)
        assert (logprobs[row, :length] - expected).abs().max() < 2e-5
        assert (entropy[row, :length] - expected_entropy).abs().max() < 2e-5
        assert logprobs[row, length:].tolist() == [0.0] * (logprobs.shape[1] - length)


def test_end_token_counts_and_nothing_after_it_although_padding_is_the_same_token(
    make_completion: Any,
) -> None:
    end = 0  # also what rows are padded with
    completions = [
        make_completion([5, 6, end]),
        make_completion([5, 6, 7, 8], "length"),
        make_completion([end]),
    ]
    rows = make_rows([[1], [2], [3]], completions, group_size=1)
    assert rows.lengths().tolist() == [3, 4, 1]
    assert rows.mask.tolist()[0] == [True, True, True, False]
    assert rows.truncated.tolist() == [False, True, False]
    # The comparison with the padding token would lose every end token.
    assert int((rows.token_ids != end).sum()) == 6 < int(rows.mask.sum()) == 8


def test_broken_completions_raise(make_completion: Any) -> None:
    with pytest.raises(ValueError, match="a completion is empty"):
        make_rows([[1]], [make_completion([])], group_size=1)
    with pytest.raises(ValueError, match="a prompt or a completion is empty"):
        make_rows([[]], [make_completion([5])], group_size=1)
    with pytest.raises(ValueError, match="need 2"):
        make_rows([[1]], [make_completion([5])], group_size=2)
    bad = dataclasses.replace(make_completion([5]), sampled_logprobs=(float("nan"),))
    with pytest.raises(ValueError, match="not finite"):
        make_rows([[1]], [bad], group_size=1)


def test_temperature_must_be_positive(make_policy: Any, rows: Rows) -> None:
    with pytest.raises(ValueError, match="temperature is 0"):
        packed_logprobs(make_policy(), rows, 0.0)
