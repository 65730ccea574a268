"""Attention and cache writes of a prefill with padding, in Triton's interpreter, in float32.

The interpreter has to be chosen before Triton is imported, so a process of its own does the work.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreted import require_equal

ROOT = Path(__file__).parents[2]
START = """
import torch
from kernels import prefill_attention, rotary

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
def drawn(*shape):
    return torch.randn(*shape, generator=generator)
HQ, HKV, D, BLOCK = 4, 2, 32, 8
keys, values = drawn(12, BLOCK, HKV, D), drawn(12, BLOCK, HKV, D)
# Nobody's block.
keys[0] = values[0] = float("nan")
def empty(*shape, **options):
    return torch.full(shape, float("nan"), dtype=options["dtype"])
torch.empty = empty
"""
ATTENTION = """
# Row 0: 5 tokens from position 9 on; row 1: 21 tokens from the beginning, in two tiles.
table = torch.tensor([[3, 7, 0], [5, 1, 9]], dtype=torch.int32)
tiles = [[0, 0, 5, 9], [1, 5, 16, 0], [1, 21, 5, 16]]
q = drawn(26, HQ, D)
plain = prefill_attention.prefill_attention(
    q, keys, values, table, torch.tensor(tiles, dtype=torch.int32), 0.2, tile=16)
for begin, count, first, blocks in ((0, 5, 9, [3, 7]), (5, 21, 0, [5, 1, 9])):
    k = keys[blocks].view(-1, HKV, D).repeat_interleave(2, 1).double()
    v = values[blocks].view(-1, HKV, D).repeat_interleave(2, 1).double()
    for i in range(count):
        end = first + i + 1
        scores = torch.einsum("hd,shd->hs", q[begin + i].double(), k[:end]) * 0.2
        wanted = torch.einsum("hs,shd->hd", scores.softmax(-1), v[:end]).reshape(-1)
        assert (plain[begin + i] - wanted).abs().max() < 1e-5
# The same with 22 tokens of padding, whose queries are not finite, rows and tiles to spare.
padded_q = torch.cat((q, torch.full((22, HQ, D), float("nan"))))
padded_table = torch.cat((table, torch.zeros(3, 3, dtype=torch.int32)))
padding = [[-1, 26, 16, 0], [-1, 42, 6, 16], [-1, 0, 0, 0], [-1, 0, 0, 0]]
padded = prefill_attention.prefill_attention(
    padded_q, keys, values, padded_table, torch.tensor(tiles + padding, dtype=torch.int32), 0.2,
    tile=16)
assert torch.equal(padded[:26], plain)
assert torch.equal(padded[26:], torch.zeros(22, HQ * D))
print("equal")
"""
WRITE = """
qkv = drawn(3, (HQ + 2 * HKV) * D)
cos, sin = drawn(20, D), drawn(20, D)
positions = torch.tensor([4, 0, 0], dtype=torch.int32)
slots = torch.tensor([11, -1, -1], dtype=torch.int32)
held = keys.clone(), values.clone()
qkv[1:] = float("nan")
rotary.rotary_write(qkv, cos, sin, positions, slots, keys, values, query_heads=HQ)
for cache, before in zip((keys, values), held):
    changed = (cache != before) & ~(cache.isnan() & before.isnan())
    assert changed.view(-1, HKV, D).any(-1).any(-1).nonzero().flatten().tolist() == [11]
    assert not cache[1].isnan().any()
print("equal")
"""


@pytest.mark.parametrize("program", [ATTENTION, WRITE], ids=["attention", "write"])
def test_padding_changes_no_bit_of_a_row_and_none_of_the_cache(program: str) -> None:
    require_equal(START + program)
