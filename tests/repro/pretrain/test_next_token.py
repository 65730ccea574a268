"""The next-token losses: transformers' own function, weighted where asked, blind to padding."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from repro.pretrain.batches import Part, shard_batches, source_of
from repro.pretrain.next_token import logits_of, mean_loss, weighted_loss
from repro.pretrain.training import new_model
from tests.repro.pretrain.small import PROXY, TINY


def first_part(tokenizer: Any) -> Part:
    source = source_of(PROXY, tokenizer, (), 0)
    (batch, *_) = shard_batches(source, Tokenizer.from_str(source.tokenizer), 0)
    return batch[0]


def test_padding_has_neither_loss_nor_influence(tiny_tokenizer):
    model = new_model(TINY, tiny_tokenizer, 0)
    rows = [[9, 30, 270, 271, 40, 1], [50, 60, 1]]
    padded = [rows[0], rows[1] + [tiny_tokenizer.pad_token_id] * 3]
    part = Part(
        ids=np.array(padded, dtype=np.int32),
        prompts=np.zeros(2, dtype=np.int32),
        lengths=np.array([6, 3], dtype=np.int32),
    )
    total = 0.0
    for row in rows:
        logprobs = model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        total -= logprobs[torch.arange(len(row) - 1), row[1:]].sum()
    torch.testing.assert_close(mean_loss(model, part), total / (5 + 2))


def test_the_lean_forward_is_transformers_own_function(proxy_tokenizer):
    recipe = dataclasses.replace(PROXY, heads=4, key_value_heads=2, initializer_range=0.2)
    model = new_model(recipe, proxy_tokenizer, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
    ids = torch.randint(
        3, len(proxy_tokenizer), (3, 40), generator=torch.Generator().manual_seed(1)
    )
    expected = model(input_ids=ids).logits
    torch.testing.assert_close(logits_of(model, ids, torch.float32), expected)
    in_sixteen = logits_of(model, ids, torch.bfloat16)
    assert in_sixteen.dtype == torch.bfloat16
    error = (in_sixteen.float() - expected).norm() / expected.norm()
    assert error < 0.03


def test_the_loss_weighs_prompt_and_completion_and_leaves_padding_out(proxy_tokenizer):
    model = new_model(PROXY, proxy_tokenizer, 0)
    part = first_part(proxy_tokenizer)
    weight = part.weights(0.25)
    loss = weighted_loss(
        model, torch.from_numpy(part.ids).long(), torch.from_numpy(weight), torch.float32
    )
    total = 0.0
    for row, prompt, length in zip(part.ids, part.prompts, part.lengths, strict=True):
        ids = torch.from_numpy(row[:length]).long()[None]
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        losses = -logprobs[torch.arange(length - 1), ids[0, 1:]]
        total += 0.25 * losses[: prompt - 1].sum() + losses[prompt - 1 :].sum()
    torch.testing.assert_close(loss, total)
    assert weight.sum() == pytest.approx(
        float((0.25 * (part.prompts - 1) + part.lengths - part.prompts).sum())
    )


def test_sixteen_bit_arithmetic_gives_nearly_the_same_gradient_on_float32_masters(proxy_tokenizer):
    model = new_model(PROXY, proxy_tokenizer, 0)
    part = first_part(proxy_tokenizer)
    ids = torch.from_numpy(part.ids).long()[:4]
    weight = torch.from_numpy(part.weights(0.25))[:4]

    def gradient(dtype):
        model.zero_grad()
        weighted_loss(model, ids, weight, dtype).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact, rounded = gradient(torch.float32), gradient(torch.bfloat16)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.995
