"""Attention over paged blocks, and the draw of tokens, against independent computations."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.reference_step import decode_attention, sample_tokens


def _paged(
    keys: list[Tensor], block_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
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
def test_decode_attention_agrees_with_float64_attention_of_each_row(
    dtype: torch.dtype, heads: tuple[int, int], assertions: SimpleNamespace
) -> None:
    Hq, Hkv = heads
    D, lengths = 16, [1, 4, 13, 8]
    generator = torch.Generator().manual_seed(Hq)
    keys = [torch.randn(n, Hkv, D, generator=generator).to(dtype) for n in lengths]
    values = [torch.randn(n, Hkv, D, generator=generator).to(dtype) for n in lengths]
    q = torch.randn(len(lengths), Hq, D, generator=generator).to(dtype)
    key_cache, table = _paged(keys, 4, torch.Generator().manual_seed(1))
    value_cache, _ = _paged(values, 4, torch.Generator().manual_seed(1))
    out = decode_attention(q, key_cache, value_cache, table, torch.tensor(lengths), D**-0.5)

    def plain(work: torch.dtype) -> Tensor:
        rows = []
        for row, (key, value) in enumerate(zip(keys, values, strict=True)):
            repeated = [t.repeat_interleave(Hq // Hkv, dim=1).to(work) for t in (key, value)]
            scores = (repeated[0] * q[row].to(work)).sum(-1) / math.sqrt(D)
            weights = torch.softmax(scores, dim=0)
            rows.append((weights.unsqueeze(-1) * repeated[1]).sum(0))
        return torch.stack(rows)

    assertions.within_twice(out, plain(dtype), plain(torch.float64))


def test_a_row_of_length_zero_is_zero() -> None:
    cache = torch.randn(2, 4, 1, 8)
    q, table = torch.randn(2, 2, 8), torch.zeros(2, 1, dtype=torch.int64)
    out = decode_attention(q, cache, cache, table, torch.tensor([0, 3]), 1.0)
    assert torch.equal(out[0], torch.zeros(2, 8))
    assert out[1].abs().sum() > 0


def _softmax(logits: list[float], temperature: float) -> list[float]:
    """Return one row's distribution in plain Python floats."""
    highest = max(logits)
    p = [math.exp((z - highest) / temperature) for z in logits]
    total = math.fsum(p)
    return [v / total for v in p]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_the_draw_inverts_the_distribution_of_the_definition(temperature: float) -> None:
    generator = torch.Generator().manual_seed(21)
    logits = 3 * torch.randn(6, 40, generator=generator)
    for row in logits:
        p = _softmax(row.double().tolist(), temperature)
        points = torch.linspace(0, 1, 400, dtype=torch.float64)[:-1] + 1e-4
        ids, logprobs = sample_tokens(row.expand(399, 40), points, temperature)
        edges, at, expected = torch.tensor(p, dtype=torch.float64).cumsum(0), 0, []
        for point in points.tolist():
            while edges[at] <= point:
                at += 1
            expected.append(at)
        clear = (points.unsqueeze(1) - edges).abs().amin(1) > 1e-6
        assert float(clear.double().mean()) > 0.95
        assert torch.equal(ids[clear], torch.tensor(expected)[clear])
        truth = torch.tensor([math.log(p[i]) for i in ids.tolist()])
        torch.testing.assert_close(logprobs, truth, rtol=0, atol=2e-6)


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    logits, uniforms = torch.randn(9, 50, generator=generator), torch.rand(9, generator=generator)
    ids, logprobs = sample_tokens(logits, uniforms, 0.7)
    for row in range(9):
        part = slice(row, row + 1)
        alone = sample_tokens(logits[part], uniforms[part], 0.7)
        assert torch.equal(alone[0], ids[part])
        assert torch.equal(alone[1], logprobs[part])


def test_the_ends_of_the_unit_interval_take_the_first_and_last_possible_token() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, 0.5, -torch.inf]])
    assert int(sample_tokens(logits, torch.tensor([0.0]), 1.0)[0]) == 1
    below_one = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert int(sample_tokens(logits, below_one, 1.0)[0]) == 3


def test_temperature_zero_is_greedy_with_logprob_zero() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 0.0]])
    ids, logprobs = sample_tokens(logits, torch.tensor([0.9, 0.9]), 0.0)
    assert ids.tolist() == [1, 0]
    assert logprobs.tolist() == [0.0, 0.0]
