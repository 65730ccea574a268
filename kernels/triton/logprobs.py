"""Token logprobs and entropy from hidden states, with one pass over each chunk of logits.

    z_t = W h_t / temperature,   logprob = z[id] - lse(z),   entropy = lse(z) - sum_v p_v z_v

Rows go in chunks. cuBLAS writes a chunk's products in float32 and one Triton program a row then
reads them once, keeping a running maximum, sum of exponentials and weighted sum (so that the
softmax itself never exists); plain PyTorch reads and writes the same logits half a dozen times.
Backward multiplies a chunk again and turns it, in one more pass, into the gradient of the logits
in the hidden states' type, which two products carry on. Nothing of size T * V is kept.

Chunks are as large as the memory bound allows, in whole 1024s of rows, since the product of few
rows is limited by reading W, and of a small vocabulary by its launches: 1024 rows of 152 064
logits are 594 MiB, and as much again by half in backward; of 896 logits all rows of a step fit.

Easy to get wrong: the weighted sum is taken of z - maximum, or entropy cancels where logits are
large; float32 inputs multiply in float32, not TF32; p * z is 0 * -inf where a logit is -inf.

`kernels.reference.token_logprobs` is the specification.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_logprobs import checked_vocabulary, float32_product
from kernels.triton import FUSED

# Logits held at once, bytes. Backward holds half as much again.
_CHUNK_BYTES = 640 << 20

# Logits of a row that a program reads at once, at most.
_BLOCK = 4096


def chunk_rows(V: int) -> int:
    """Return the rows of V float32 logits that go at once: whole 1024s, or all that fit."""
    rows = max(1, _CHUNK_BYTES // (4 * V))
    return rows - rows % 1024 if rows > 1024 else rows


@triton.jit
def _forward_kernel(
    logits, token_ids, logprobs, entropy, normaliser, inverse_temperature, V, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    # A running triple in every lane, joined once at the end.
    for first in range(0, V, BLOCK):
        valid = first + at < V
        z = tl.load(logits + row * V + first + at, mask=valid, other=float("-inf"))
        z *= inverse_temperature
        new_top = tl.maximum(top, z)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        # At the first logit of a lane there is nothing to rescale, and -inf - -inf is NaN.
        rescale = tl.where(top == float("-inf"), 0.0, tl.exp(top - safe))
        shift = tl.where(top == float("-inf"), 0.0, top - safe)
        e = tl.where(z == float("-inf"), 0.0, tl.exp(z - safe))
        # sum of exp(z - m) * (z - m) when m moves by shift.
        weighted = rescale * (weighted + shift * total)
        weighted += e * tl.where(z == float("-inf"), 0.0, z - safe)
        total = total * rescale + e
        top = new_top
    # Join the lanes: (BLOCK,) -> ().
    whole_top = tl.max(top, 0)
    shift = tl.where(top == float("-inf"), 0.0, top - whole_top)
    rescale = tl.where(top == float("-inf"), 0.0, tl.exp(shift))
    whole = tl.sum(total * rescale, 0)
    mean = tl.sum(rescale * (weighted + shift * total), 0) / whole
    lse = tl.log(whole)
    # The token's own logit, read again.
    token = tl.load(token_ids + row).to(tl.int64)
    chosen = tl.load(logits + row * V + token)
    tl.store(logprobs + row, chosen * inverse_temperature - whole_top - lse)
    tl.store(entropy + row, lse - mean)
    tl.store(normaliser + row, whole_top + lse)


@triton.jit
def _backward_kernel(
    logits, token_ids, normaliser, entropy, grad_logprobs, grad_entropy, grad,
    inverse_temperature, V, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = at < V
    z = tl.load(logits + row * V + at, mask=valid, other=float("-inf"))
    # Probabilities from the normaliser that forward stored.
    logp = z * inverse_temperature - tl.load(normaliser + row)
    p = tl.exp(logp)
    # d / dz: see `kernels.reference_logprobs._grad_logits`.
    g = tl.load(grad_logprobs + row)
    h = tl.load(grad_entropy + row)
    inner = tl.where(p == 0.0, 0.0, logp + tl.load(entropy + row))
    value = -(g + h * inner) * p
    value += tl.where(at == tl.load(token_ids + row), g, 0.0)
    value *= inverse_temperature
    tl.store(grad + row * V + at, value.to(grad.dtype.element_ty), mask=valid)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        T, V = hidden.shape[0], weight.shape[0]
        block = min(_BLOCK, triton.next_power_of_2(V))
        logprobs = torch.empty(T, dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for at in range(0, T, rows):
            part = slice(at, at + rows)
            logits = float32_product(hidden[part], weight.t())
            outputs = (logprobs[part], entropy[part], normaliser[part])
            _forward_kernel[(logits.shape[0],)](
                logits, token_ids[part], *outputs, 1.0 / temperature, V, block, num_warps=8, **FUSED
            )
            del logits
        ctx.save_for_backward(hidden, weight, token_ids, normaliser, entropy)
        ctx.temperature, ctx.rows = temperature, rows
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = (grad.contiguous() for grad in grads)
        hidden, weight, token_ids, normaliser, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        V = weight.shape[0]
        block = min(_BLOCK, triton.next_power_of_2(V))
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for at in range(0, hidden.shape[0], ctx.rows):
            part = slice(at, at + ctx.rows)
            logits = float32_product(hidden[part], weight.t())
            grad = torch.empty(logits.shape, dtype=hidden.dtype, device=hidden.device)
            saved = (token_ids[part], normaliser[part], entropy[part])
            given = (grad_logprobs[part], grad_entropy[part])
            _backward_kernel[(logits.shape[0], triton.cdiv(V, block))](
                logits, *saved, *given, grad, 1.0 / ctx.temperature, V, block, num_warps=8, **FUSED
            )
            del logits
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += float32_product(grad.t(), hidden[part])
            # Before the next chunk's logits are allocated, or both are held.
            del grad
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def token_logprobs(
    hidden: Tensor, lm_head_weight: Tensor, token_ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return logprob and entropy of the policy at each row, (T,) float32, differentiable.

    As `kernels.reference.token_logprobs`; hidden states and head have one type. Other shapes raise,
    and a temperature that is not positive.
    """
    V = checked_vocabulary(hidden, lm_head_weight, token_ids, temperature)
    if lm_head_weight.dtype != hidden.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and lm_head_weight {lm_head_weight.dtype}; they must agree"
        )
    rows = chunk_rows(V)
    return _TokenLogprobs.apply(hidden, lm_head_weight, token_ids, float(temperature), rows)
