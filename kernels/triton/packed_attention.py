r"""Causal attention of many rows that lie end to end, forward and backward, prompts shared.

The P prompts of a pass come first, each once, then the completions, those of one prompt side by
side. A completion's token sees its prompt and its own past, which is two calls of flash attention
whatever the number of rows and their lengths:

    1  every prompt and every completion over itself, causally
    2  all completions of a prompt over that prompt, whole

Their outputs o1, o2 and log-sums l1, l2 join as

    l = log(e^l1 + e^l2)        o = e^(l1 - l) o1 + e^(l2 - l) o2

Backward calls flash attention's backward twice with the *joined* o and l: it forms probabilities
as e^(s - l) and subtracts (do . o), which are those of the whole softmax in either part, so the two
parts' gradients simply add up.

Easy to get wrong: a second call with its own o and l would give the gradient of another function;
a prompt's keys and values get gradients from both calls. Rotation is by position in the row, where
completions begin at their prompt's length.

The calls are torch's own flash attention (the operators behind `torch.nn.attention.varlen`, which
give l and take it back); no plan or compilation depends on lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.segments import Segments
from kernels.triton import FUSED


@triton.jit
def _rotate_kernel(
    q, k, v, q_stride, k_stride, v_stride,
    cos, sin, out, out_stride,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    inside = half < D // 2
    is_query = (head < HQ) & inside
    is_key = (head >= HQ) & (head < HQ + HK) & inside
    # Load all heads of a token, in halves, (HEADS, HALF) each.
    at_q = q + row * q_stride + head * D + half
    at_k = k + row * k_stride + (head - HQ) * D + half
    low = tl.load(at_q, mask=is_query, other=0.0).to(tl.float32)
    low += tl.load(at_k, mask=is_key, other=0.0).to(tl.float32)
    high = tl.load(at_q + D // 2, mask=is_query, other=0.0).to(tl.float32)
    high += tl.load(at_k + D // 2, mask=is_key, other=0.0).to(tl.float32)
    angle = row * D + half
    cos_low = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + D // 2, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + D // 2, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        # The transpose of what forward does.
        new_low = low * cos_low + high * sin_high
        new_high = high * cos_high - low * sin_low
    else:
        new_low = low * cos_low - high * sin_low
        new_high = high * cos_high + low * sin_high
    target = out + row * out_stride + head * D + half
    turned = (head < HQ + HK) & inside
    tl.store(target, new_low.to(out.dtype.element_ty), mask=turned)
    tl.store(target + D // 2, new_high.to(out.dtype.element_ty), mask=turned)
    if BACK:
        # Values are not rotated; forward leaves them where they are.
        n = tl.arange(0, KEYS)[:, None]
        for part in tl.static_range(2):
            where = n * D + part * (D // 2) + half
            kept = (n < HK) & inside
            value = tl.load(v + row * v_stride + where, mask=kept, other=0.0)
            target = out + row * out_stride + (HQ + HK) * D + where
            tl.store(target, value.to(out.dtype.element_ty), mask=kept)


def _rotate(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, back: bool
) -> None:
    """Write rotated q and k, (M, heads, D), and with `back` v, into the columns of `out`."""
    (M, query, D), key = q.shape, k.shape[1]
    if M:
        given = (q, k, v, q.stride(0), k.stride(0), v.stride(0))
        blocks = (triton.next_power_of_2(n) for n in (query + key, key, D // 2))
        constants = (query, key, D, *blocks, back)
        _rotate_kernel[(M,)](*given, cos, sin, out, out.stride(0), *constants, num_warps=4, **FUSED)


# Strides are numbers of tokens, and l1 begins behind the prompts': a kernel for each divisor of
# theirs would be compiled in a step.
@triton.jit(do_not_specialize=["l1_stride", "l2_stride"], do_not_specialize_on_alignment=["l1"])
def _join_kernel(
    o1, l1, o2, l2, l1_stride, l2_stride,
    H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK)[None, :]
    valid = head < H
    first = tl.load(l1 + head * l1_stride + row, mask=valid, other=0.0)
    second = tl.load(l2 + head * l2_stride + row, mask=valid, other=0.0)
    top = tl.maximum(first, second)
    whole = top + tl.log(tl.exp(first - top) + tl.exp(second - top))
    tl.store(l1 + head * l1_stride + row, whole, mask=valid)
    # Weigh both outputs, (HEADS, BLOCK), and store over the first.
    where = row * H * D + head[:, None] * D + d
    kept = valid[:, None] & (d < D)
    out = tl.exp(first - whole)[:, None] * tl.load(o1 + where, mask=kept, other=0.0).to(tl.float32)
    out += tl.exp(second - whole)[:, None] * tl.load(o2 + where, mask=kept, other=0.0).to(
        tl.float32
    )
    tl.store(o1 + where, out.to(o1.dtype.element_ty), mask=kept)


def _join(o1: Tensor, l1: Tensor, o2: Tensor, l2: Tensor) -> None:
    """Join outputs (M, H, D) and log-sums (H, M) of two parts of the keys, in the first's place."""
    M, H, D = o1.shape
    if M:
        sizes = (H, D, triton.next_power_of_2(H), triton.next_power_of_2(D))
        _join_kernel[(M,)](o1, l1, o2, l2, l1.stride(0), l2.stride(0), *sizes, num_warps=4, **FUSED)


# Where sequences of queries and of keys end, and the tokens of the longest of each.
Bounds = tuple[Tensor, Tensor, int, int]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return outputs (M, Hq, D) and log-sums (Hq, M) of sequences."""
    out = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, causal, False, scale=scale)
    return out[0], out[1]


def _flash_backward(
    given: Sequence[Tensor], bounds: Bounds, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v; given that of the output, and q, k, v, out and log-sums."""
    # The state of a random generator, which without dropout nothing reads.
    unused = torch.empty(2, dtype=torch.uint64, device=given[0].device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *given, *bounds, 0.0, causal, unused, unused, scale=scale
    )
    return grads


def _own(s: Segments) -> Bounds:
    return s.ends, s.ends, s.longest, s.longest


def _joined(s: Segments) -> Bounds:
    return s.query_ends, s.key_ends, s.longest_queries, s.longest_keys


def _attend(q: Tensor, k: Tensor, v: Tensor, s: Segments, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention's output, (M, Hq, D), and the log-sums, (Hq, M)."""
    out, log_sums = _flash(q, k, v, _own(s), True, scale)
    if s.shared:
        rest, seen = slice(s.begin, s.end), slice(0, s.seen)
        o2, l2 = _flash(q[rest], k[seen], v[seen], _joined(s), False, scale)
        _join(out[rest], log_sums[:, rest], o2, l2)
    return out, log_sums


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, s: Segments, heads: int, scale: float
    ) -> Tensor:
        q, k, v = _split(qkv, heads, cos.shape[1])
        # In place: nobody reads the product again before the rotation.
        _rotate(q, k, v, cos, sin, qkv, back=False)
        out, log_sums = _attend(q, k, v, s, scale)
        ctx.save_for_backward(qkv, cos, sin, out, log_sums)
        ctx.s, ctx.heads, ctx.scale = s, heads, scale
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, out, log_sums = ctx.saved_tensors
        s, scale = ctx.s, ctx.scale
        q, k, v = _split(qkv, ctx.heads, cos.shape[1])
        grad = grads[0].view(out.shape)
        dq, dk, dv = _flash_backward((grad, q, k, v, out, log_sums), _own(s), True, scale)
        if s.shared:
            rest, seen = slice(s.begin, s.end), slice(0, s.seen)
            after = (out[rest], log_sums[:, rest].contiguous())
            given = (grad[rest], q[rest], k[seen], v[seen], *after)
            again = _flash_backward(given, _joined(s), False, scale)
            torch._foreach_add_([dq[rest], dk[seen], dv[seen]], list(again))
        grad_qkv = torch.empty_like(qkv)
        _rotate(dq, dk, dv, cos, sin, grad_qkv, back=True)
        return grad_qkv, None, None, None, None, None


def _split(qkv: Tensor, query_heads: int, D: int) -> Sequence[Tensor]:
    """Return views of q, k and v, (M, heads, D) each."""
    heads = qkv.view(qkv.shape[0], -1, D)
    return heads.tensor_split((query_heads, (query_heads + heads.shape[1]) // 2), dim=1)


def packed_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, segments: Segments, *, query_heads: int, scale: float
) -> Tensor:
    """Rotate queries and keys and attend causally inside each row of a packed pass.

    `kernels.reference_train.packed_attention` is the specification. qkv, (M, (Hq + 2 Hkv) D), is
    contiguous, in bfloat16 or float16; its queries and keys are rotated in place.
    """
    out: Tensor = _PackedAttention.apply(qkv, cos, sin, segments, query_heads, scale)
    return out
