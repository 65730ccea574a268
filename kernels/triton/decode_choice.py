"""The end of a decode step, in Triton: draw a token per row and move the row on, without the host.

With temperature alone, three reads of the logits suffice, spread over many programs:

    1. each part of the vocabulary leaves its maximum and its sum of exp(z - maximum)
    2. one program per row joins the parts, scales the row's uniform number by the total, and finds
       the part in which the cumulative sum passes it
    3. the same program walks that part and takes the first token at which the sum passes

It then moves the row on. Parts are cut by the vocabulary's size alone, so the token does not depend
on the batch. `kernels.reference_step.choose` is the specification; a filter (top_p) goes before it
(`nucleus`).

Easy to get wrong: a maximum in Triton skips NaN, so NaN is looked for by itself; and the uniform
number belongs to the row's count, not to the step. The cumulative sum is in float32 and its last
value may round below the total, so the last token with any probability is taken when nothing
passes; against the reference, which sums in float64, another token can come out when the uniform
number falls within rounding of a boundary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_step import StepRows
from kernels.triton.decode_step import launch, wait

_PART = 2048


@triton.jit
def _parts_kernel(
    logits, maxima, sums, temperature, V, parts,
    PART: tl.constexpr, GREEDY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    wait(OVERLAP)
    # Load one part of the row's logits, (PART,); past the end of the vocabulary they weigh nothing.
    z = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    if not GREEDY:
        z = z / tl.load(temperature)
    # Mark a row to be refused by an infinite maximum: NaN is counted, since a maximum skips it.
    strange = tl.sum(((z != z) | (z == float("inf"))).to(tl.int32), 0)
    top = tl.max(z, 0)
    # A part without any allowed token has the sum 0, where -inf minus -inf would give NaN.
    safe = tl.where(top == float("-inf"), 0.0, top)
    top = tl.where(strange > 0, float("inf"), top)
    tl.store(maxima + row * parts + part, top)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(z - safe), 0))


@triton.jit
def _choose_kernel(
    logits, maxima, sums, temperature,
    tokens, positions, counts, limits, status, uniforms, out_tokens, out_logprobs, ends,
    V, parts, T,
    PART: tl.constexpr, PARTS: tl.constexpr, ENDS: tl.constexpr,
    GREEDY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    n = tl.arange(0, PART)
    wait(OVERLAP)
    position = tl.load(positions + row)
    count = tl.load(counts + row)
    # Join the parts' maxima, (PARTS,) -> (); an infinite one marks a faulty row.
    m = tl.load(maxima + row * parts + p, mask=p < parts, other=float("-inf"))
    top = tl.max(m, 0)
    faulty = (top == float("inf")) | (top == float("-inf"))
    top = tl.where(faulty, 0.0, top)
    scale = 1.0
    # Find the part: the first with the maximum, or the first whose cumulative sum passes the
    # scaled uniform number; the last with any probability where, by rounding, none does.
    if GREEDY:
        part = tl.min(tl.where(m == top, p, PARTS - 1), 0)
    else:
        scale = tl.load(temperature)
        weight = tl.load(sums + row * parts + p, mask=p < parts, other=0.0) * tl.exp(m - top)
        cumulative = tl.cumsum(weight, 0)
        total = tl.sum(weight, 0)
        number = tl.load(uniforms + row * T + tl.minimum(count, T - 1)).to(tl.float32)
        threshold = number * total
        passing = (cumulative > threshold) & (weight > 0.0)
        final = tl.max(tl.where(weight > 0.0, p, 0), 0)
        part = tl.minimum(tl.min(tl.where(passing, p, PARTS), 0), final)
        before = tl.sum(tl.where(p < part, weight, 0.0), 0)
    # A faulty row may have found no part; the load below must stay within the row all the same.
    part = tl.minimum(part, parts - 1)
    # Walk that part, (PART,), for the token, by the same rule.
    at = part * PART + n
    z = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    if GREEDY:
        chosen = tl.min(tl.where(z == top, n, PART - 1), 0)
        logprob = 0.0
    else:
        z = z / scale
        weights = tl.exp(z - top)
        running = before + tl.cumsum(weights, 0)
        passing = (running > threshold) & (weights > 0.0)
        final = tl.max(tl.where(weights > 0.0, n, 0), 0)
        chosen = tl.minimum(tl.min(tl.where(passing, n, PART), 0), final)
        logprob = tl.max(tl.where(n == chosen, z, float("-inf")), 0) - top - tl.log(total)
    token = (part * PART + chosen).to(tl.int64)
    # Move the row on; one that does not run stays as it is, and a faulty one takes no token.
    if position >= 0:
        if faulty:
            tl.store(status + row, 3)
            tl.store(positions + row, -1)
        else:
            tl.store(out_tokens + row * T + count, token.to(tl.int32))
            tl.store(out_logprobs + row * T + count, logprob)
            tl.store(counts + row, count + 1)
            end = tl.load(ends + tl.arange(0, ENDS))
            stopped = tl.sum((end == token).to(tl.int32), 0) > 0
            full = count + 1 >= tl.load(limits + row)
            if stopped | full:
                tl.store(status + row, tl.where(stopped, 1, 2))
                tl.store(positions + row, -1)
            else:
                tl.store(tokens + row, token)
                tl.store(positions + row, position + 1)


def choose(logits: Tensor, rows: StepRows, *, greedy: bool, overlap: bool) -> None:
    """Draw for the rows of `logits`, contiguous, and move their state on, in place.

    As `kernels.reference_step.choose`. The temperature is read by the kernel, so that a captured
    step serves all above 0; the number of `rows.ends` is a power of two.
    """
    M, V = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits are {logits.dtype}; they must be float32 and contiguous")
    parts = triton.cdiv(V, _PART)
    maxima, sums = torch.empty(2, M, parts, dtype=torch.float32, device=logits.device).unbind()
    drawn = (logits, maxima, sums, rows.temperature)
    _parts_kernel[(M, parts)](
        *drawn, V, parts, _PART, greedy, overlap, num_warps=4, **launch(overlap)
    )
    state = (rows.tokens, rows.positions, rows.counts, rows.limits, rows.status, rows.uniforms)
    outputs = (rows.out_tokens, rows.out_logprobs, rows.ends)
    numbers = (V, parts, rows.out_tokens.shape[1])
    constants = (_PART, triton.next_power_of_2(parts), len(rows.ends), greedy, overlap)
    _choose_kernel[(M,)](
        *drawn, *state, *outputs, *numbers, *constants, num_warps=8, **launch(overlap)
    )
