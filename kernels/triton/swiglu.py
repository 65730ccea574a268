"""SwiGLU with its gradient in one pass each, in Triton; forward is `decode_step.swiglu`.

    y   = silu(gate) * up,  silu(g) = g * sigmoid(g)
    du  = dy * silu(gate)
    dg  = dy * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))

gate and up are the two halves of the last dimension, as the fused projection leaves them. silu is
rounded to the input's type before the product, as PyTorch's two calls do.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import FUSED, decode_step


@triton.jit
def _backward_kernel(
    gate_up, grad_y, grad, active, I: tl.constexpr, BLOCK: tl.constexpr, AGAIN: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = at < I
    gate = tl.load(gate_up + row * 2 * I + at, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + at, mask=valid, other=0.0).to(tl.float32)
    dy = tl.load(grad_y + row * I + at, mask=valid, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    # d silu(g) / dg = s (1 + g (1 - s)), s the sigmoid.
    grad_gate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad + row * 2 * I + at, grad_gate.to(grad.dtype.element_ty), mask=valid)
    silu = gate * sigmoid
    tl.store(grad + row * 2 * I + I + at, (dy * silu).to(grad.dtype.element_ty), mask=valid)
    if AGAIN:
        # What forward returned, rounded as there.
        y = silu.to(active.dtype.element_ty).to(tl.float32) * up
        tl.store(active + row * I + at, y.to(active.dtype.element_ty), mask=valid)


def swiglu_backward(gate_up: Tensor, grad: Tensor, again: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of gate and up, and with `again` what the forward pass returned.

    Parameters
    ----------
    gate_up : Tensor, (rows, 2 I), contiguous
    grad : Tensor, (rows, I), contiguous

    Returns
    -------
    grad_gate_up : Tensor, (rows, 2 I), y : Tensor or None, (rows, I)
    """
    rows, I = grad.shape
    grad_gate_up = torch.empty_like(gate_up)
    y = torch.empty_like(grad) if again else None
    block = min(1024, triton.next_power_of_2(I))
    if rows:
        _backward_kernel[(rows, triton.cdiv(I, block))](
            gate_up, grad, grad_gate_up, y, I, block, again, num_warps=4, **FUSED
        )
    return grad_gate_up, y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        flat = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()  # (rows, 2 I)
        ctx.save_for_backward(flat)
        ctx.shape = gate_up.shape
        y = decode_step.swiglu(flat, overlap=False)
        return y.view(*gate_up.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (flat,) = ctx.saved_tensors
        grad = grads[0].reshape(len(flat), -1).contiguous()  # (rows, I), from (..., I)
        return swiglu_backward(flat, grad, again=False)[0].view(ctx.shape)  # (..., 2 I)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., I); `kernels.reference.swiglu` is the specification."""
    return _SwiGLU.apply(gate_up)
