"""Draw one token a row from logits by inverting the cumulative distribution, in Triton.

With temperature alone, three reads of the logits suffice, spread over many programs:

    1. each part of the vocabulary leaves its maximum and its sum of exp(z - maximum)
    2. one program a row joins the parts, scales the row's uniform number by the total, and finds
       the part in which the cumulative sum passes it
    3. the same program walks that part and takes the first token at which the sum passes

The token is a function of the row's own logits and uniform number: it does not depend on the
batch, and parts are cut by the vocabulary's size alone. Filters (top_k, top_p, min_p) go through
the reference, whose sort dominates their cost.

Easy to get wrong: the cumulative sum is in float32 and its last value may round below the total,
so the last token with any probability is taken when nothing passes; and a part's own running sum
starts from the joined sum of the parts before it, in the same order as the search. Against the
reference, which sums in float64, another token can come out when the uniform number falls within
rounding of a boundary; its logprob is its own then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference_decode

_PART = 2048


@triton.jit
def _parts_kernel(logits, maxima, sums, inverse_temperature, stride, V, parts, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    z = tl.load(logits + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    z *= inverse_temperature
    top = tl.max(z, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(maxima + row * parts + part, top)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(z - safe), 0))


@triton.jit
def _draw_kernel(
    logits, uniforms, maxima, sums, ids, logprobs, inverse_temperature, stride, V, parts,
    PART: tl.constexpr, PARTS: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    held = p < parts
    m = tl.load(maxima + row * parts + p, mask=held, other=float("-inf"))
    top = tl.max(m, 0)
    n = tl.arange(0, PART)
    if GREEDY:
        part = tl.min(tl.where(m == top, p, PARTS), 0)
        at = part * PART + n
        z = tl.load(logits + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
        z *= inverse_temperature
        chosen = tl.min(tl.where(z == top, at, V), 0)
        tl.store(ids + row, chosen.to(tl.int64))
        tl.store(logprobs + row, 0.0)
    else:
        weight = tl.load(sums + row * parts + p, mask=held, other=0.0) * tl.exp(m - top)
        cumulative = tl.cumsum(weight, 0)
        total = tl.sum(weight, 0)
        threshold = tl.load(uniforms + row).to(tl.float32) * total
        passing = (cumulative > threshold) & (weight > 0.0)
        last = tl.max(tl.where(weight > 0.0, p, 0), 0)
        part = tl.minimum(tl.min(tl.where(passing, p, PARTS), 0), last)
        before = tl.sum(tl.where(p < part, weight, 0.0), 0)
        at = part * PART + n
        z = tl.load(logits + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
        z *= inverse_temperature
        weights = tl.exp(z - top)
        running = before + tl.cumsum(weights, 0)
        passing = (running > threshold) & (weights > 0.0)
        last = tl.max(tl.where(weights > 0.0, n, 0), 0)
        chosen = tl.minimum(tl.min(tl.where(passing, n, PART), 0), last)
        z_chosen = tl.max(tl.where(n == chosen, z, float("-inf")), 0)
        tl.store(ids + row, (part * PART + chosen).to(tl.int64))
        tl.store(logprobs + row, z_chosen - top - tl.log(total))


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row; `kernels.reference.sample_tokens` is the specification.

    Without filters nothing waits for the device and the call can be captured in a CUDA graph;
    rows are then not checked for NaN or for having no allowed token.

    Parameters
    ----------
    logits : Tensor, (B, V), floating
        Rows may be strided.
    uniforms : Tensor, (B,), floating
        In [0, 1).
    temperature
        0 takes the most likely token, the first of equals, with logprob 0.
    top_k, top_p, min_p
        0, 1.0 and 0.0 switch each off.

    Returns
    -------
    ids : Tensor, (B,), int64
    logprobs : Tensor, (B,), float32
        Of the drawn token under the distribution drawn from.

    Raises
    ------
    ValueError
        When the shapes differ or a setting is out of its range.
    """
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        return reference_decode.sample_tokens(logits, uniforms, temperature, top_k, top_p, min_p)
    if logits.dim() != 2 or uniforms.shape != logits.shape[:1] or temperature < 0:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, uniforms {tuple(uniforms.shape)}, "
            f"temperature is {temperature}; needed are (B, V), (B,) and 0 or more"
        )
    B, V = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    parts = triton.cdiv(V, _PART)
    ids = torch.empty(B, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(B, dtype=torch.float32, device=logits.device)
    maxima = torch.empty(2, B, parts, dtype=torch.float32, device=logits.device)
    inverse = 1.0 if temperature == 0 else 1.0 / temperature
    if B:
        _parts_kernel[(B, parts)](
            logits, maxima[0], maxima[1], inverse, logits.stride(0), V, parts, _PART, num_warps=4
        )
        _draw_kernel[(B,)](
            logits, uniforms, maxima[0], maxima[1], ids, logprobs, inverse, logits.stride(0), V,
            parts, _PART, triton.next_power_of_2(parts), temperature == 0, num_warps=4,
        )  # fmt: skip
    return ids, logprobs
