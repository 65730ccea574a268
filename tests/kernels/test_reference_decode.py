"""Attention over paged blocks, and the draw of tokens, against independent computations."""

import math

import pytest
import torch

from kernels.reference_step import decode_attention, sample_tokens
from repro.rollout.draw import draw
from repro.spec.config import SamplingConfig
from tests.kernels.conftest import assert_within_twice


def _paged(keys, block_size, generator):
    """Scatter sequences (S_b, Hkv, D) over blocks in random order; the rest of the cache is NaN."""
    counts = [-(-len(key) // block_size) for key in keys]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    cache = torch.full((len(order), block_size, *keys[0].shape[1:]), math.nan, dtype=keys[0].dtype)
    table = torch.full((len(keys), max(counts) + 1), 10**6, dtype=torch.int32)
    used = 0
    for row, (key, count) in enumerate(zip(keys, counts, strict=True)):
        for block in range(count):
            number = int(order[used])
            used += 1
            part = key[block * block_size : (block + 1) * block_size]
            cache[number, : len(part)] = part
            table[row, block] = number
    return cache, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
def test_decode_attention_agrees_with_float64_attention_of_each_row(dtype, heads):
    Hq, Hkv = heads
    D, lengths = 16, [1, 4, 13, 8]
    generator = torch.Generator().manual_seed(Hq)
    keys = [torch.randn(n, Hkv, D, generator=generator).to(dtype) for n in lengths]
    values = [torch.randn(n, Hkv, D, generator=generator).to(dtype) for n in lengths]
    q = torch.randn(len(lengths), Hq, D, generator=generator).to(dtype)
    key_cache, table = _paged(keys, 4, torch.Generator().manual_seed(1))
    value_cache, _ = _paged(values, 4, torch.Generator().manual_seed(1))
    out = decode_attention(q, key_cache, value_cache, table, torch.tensor(lengths), D**-0.5)

    def plain(work):
        rows = []
        for row, (key, value) in enumerate(zip(keys, values, strict=True)):
            repeated = [t.repeat_interleave(Hq // Hkv, dim=1).to(work) for t in (key, value)]
            scores = (repeated[0] * q[row].to(work)).sum(-1) / math.sqrt(D)
            weights = torch.softmax(scores, dim=0)
            rows.append((weights.unsqueeze(-1) * repeated[1]).sum(0))
        return torch.stack(rows)

    assert_within_twice(out, plain(dtype), plain(torch.float64))


def test_a_row_of_length_zero_is_zero():
    cache = torch.randn(2, 4, 1, 8)
    q, table = torch.randn(2, 2, 8), torch.zeros(2, 1, dtype=torch.int64)
    out = decode_attention(q, cache, cache, table, torch.tensor([0, 3]), 1.0)
    assert torch.equal(out[0], torch.zeros(2, 8))
    assert out[1].abs().sum() > 0


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.3])
def test_the_draw_is_that_of_the_plain_sampler_to_the_bit(temperature):
    # Which is held to the distribution's definition (tests/repro/rollout/test_draw.py).
    generator = torch.Generator().manual_seed(21)
    logits = 3 * torch.randn(200, 40, generator=generator)
    logits[:, [0, 7, 39]] = -torch.inf
    numbers = torch.rand(200, dtype=torch.float64, generator=generator)
    numbers[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    expected = draw(logits, numbers, SamplingConfig(temperature=temperature))
    for actual, plain in zip(sample_tokens(logits, numbers, temperature), expected, strict=True):
        assert torch.equal(actual, plain)
