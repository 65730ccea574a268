"""Packed rows: equal to padded ones, and each row by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from repro.models.policy import Policy
from repro.rl.logprobs import completion_logprobs
from repro.rl.packed import packed_logprobs
from repro.rl.rows import Rows
from tests.repro.rl.uneven_rows import LENGTHS, largest_gap, take_gradients


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("kept_blocks", [0, 1, None])
def test_packed_rows_give_the_padded_rows_values_and_gradients(
    rows: Rows,
    make_policy: Callable[..., Policy],
    nudge: Callable[[Policy, float], None],
    weight_format: str,
    kept_blocks: int | None,
) -> None:
    policy = make_policy(weight_format=weight_format)
    nudge(policy, 0.1)
    weights = torch.rand(rows.mask.shape, generator=torch.Generator().manual_seed(1))
    plain, plain_entropy = completion_logprobs(policy, rows, 0.7, layout="padded")
    (plain * weights).sum().backward()
    expected = take_gradients(policy)
    packed, entropy = packed_logprobs(policy, rows, 0.7, kept_blocks=kept_blocks)
    (packed * weights).sum().backward()
    torch.testing.assert_close(packed, plain, rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy, plain_entropy, rtol=0, atol=2e-5)
    assert largest_gap(take_gradients(policy), expected) < 1e-5


def test_a_row_does_not_see_its_neighbours(rows: Rows, policy: Policy) -> None:
    together = packed_logprobs(policy, rows, 1.0)[0]
    for row, length in enumerate(LENGTHS):
        alone = packed_logprobs(policy, rows.select(torch.tensor([row])), 1.0)[0]
        torch.testing.assert_close(together[row, :length], alone[0, :length], rtol=0, atol=2e-5)


def test_attention_is_as_it_was_after_a_packed_pass(rows: Rows, policy: Policy) -> None:
    config: Any = policy.decoder.config
    before = config._attn_implementation
    packed_logprobs(policy, rows, 1.0)[0].sum().backward()
    assert config._attn_implementation == before
