"""The smallest set of tokens that holds a share of the mass, in Triton, without a sort.

A sort moves 150 000 logits a row, with their places, many times. The set is found from above
instead: it is cut at one logit, the smallest whose greater ones hold less than the share. A float32
in order-preserving bits is eleven digits of three bits. A pass over the row finds a digit of the
cut: the mass above each of its eight values decides. A last pass writes -inf below the cut, and
over those of its ties that come after the share is held.

`kernels.reference_step.keep_nucleus` is the specification. It sums in float64, the kernel in
float32, always in the same order, so that a smaller set never weighs more. Where the share falls
within rounding of a boundary, one more or one less token can stay.

Easy to get wrong: -0.0 and 0.0 are ties, whose bits differ; a row with NaN or infinity must stay as
it is, since `choose` refuses it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.decode_step import launch, wait

_BLOCK = 2048


@triton.jit
def _ordered(z):
    """Return float32 as uint32 of the same order; both zeros are one."""
    bits = (z + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def _nucleus_kernel(logits, temperature, share, V, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = logits + tl.program_id(0).to(tl.int64) * V
    n = tl.arange(0, BLOCK)
    digits = tl.arange(0, 8)
    wait(OVERLAP)
    scale = tl.load(temperature)
    # Find the row's maximum, and whether it may be drawn from at all.
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    strange = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        z = tl.load(row + start + n, mask=start + n < V, other=float("-inf"))
        strange += ((z != z) | (z == float("inf"))).to(tl.int32)
        tops = tl.maximum(tops, z)
    top = tl.max(tops, 0)
    sound = (tl.sum(strange, 0) == 0) & (top > float("-inf"))
    top = tl.where(sound, top, 0.0)
    # Sum the mass, as weights exp((z - top) / T).
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        z = tl.load(row + start + n, mask=start + n < V, other=float("-inf"))
        sums += tl.exp((z - top) / scale)
    bound = share * tl.sum(sums, 0)
    # Find the cut's digits from the highest: the smallest above which less than the bound lies.
    cut = tl.full((), 0, tl.uint32)
    above = tl.full((), 0, tl.float32)
    for level in range(11):
        shift = 30 - 3 * level
        values = (cut >> shift) + digits.to(tl.uint32)  # (8,)
        masses = tl.zeros((8, BLOCK), tl.float32)
        for start in range(0, V, BLOCK):
            z = tl.load(row + start + n, mask=start + n < V, other=float("-inf"))
            higher = (_ordered(z) >> shift)[None, :] > values[:, None]
            masses += tl.where(higher, tl.exp((z - top) / scale)[None, :], 0.0)
        mass = tl.sum(masses, 1)  # (8,)
        digit = tl.min(tl.where(mass < bound, digits, 7), 0)
        above = tl.sum(tl.where(digits == digit, mass, 0.0), 0)
        cut = cut | (digit.to(tl.uint32) << shift)
    # Keep what lies above the cut, and as many of its ties as the bound asks for.
    value = tl.where(cut >> 31 == 1, cut & 0x7FFFFFFF, ~cut).to(tl.float32, bitcast=True)
    wanted = (bound - above) / tl.exp((value - top) / scale)
    before = tl.full((), 0, tl.int32)
    changed = tl.where(sound, V, 0)
    for start in range(0, V, BLOCK):
        key = _ordered(tl.load(row + start + n, mask=start + n < V, other=float("-inf")))
        tie = (key == cut).to(tl.int32)
        rank = before + tl.cumsum(tie, 0) - tie
        gone = (key < cut) | ((tie == 1) & (rank >= wanted))
        tl.store(row + start + n, float("-inf"), mask=gone & (start + n < changed))
        before += tl.sum(tie, 0)


def keep_nucleus(logits: Tensor, temperature: Tensor, share: float, *, overlap: bool) -> None:
    """Forbid all tokens of a row, in place, but the nucleus; see `reference_step.keep_nucleus`."""
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits are {logits.dtype}; they must be float32 and contiguous")
    M, V = logits.shape
    _nucleus_kernel[(M,)](
        logits, temperature, share, V, _BLOCK, overlap, num_warps=16, **launch(overlap)
    )
