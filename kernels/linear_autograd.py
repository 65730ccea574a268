"""The packed linear layer as training uses it: gradients of x, the bias and the adapter.

    y  = x W^T + b + scaling * (x A^T) B^T
    dx = dy W + scaling * (dy B) A
    dA = scaling * (dy B)^T x,   dB = scaling * dy^T (x A^T),   db = sum over rows of dy

Forward is `kernels.linear.packed_linear`. Backward rebuilds W once, into a scratch that lives for
the call, and multiplies: at the row counts of training, writing W costs a tenth of the product or
less, and no 16-bit copy of a layer outlives its use.

Easy to get wrong: gradients of A and B are accumulated by cuBLAS in float32 and rounded to the
masters' type.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from kernels.hopper import Adapter
from kernels.linear import grad_input, packed_linear
from kernels.packing import PackedWeight


def _gradients(
    grad: Tensor,
    x: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    scaling: float,
    needed: tuple[bool, bool, bool, bool],
    weight: PackedWeight,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, bias, A and B, None where none is wanted."""
    grad = grad.contiguous()
    rows = grad.view(-1, grad.shape[-1])  # (M, N)
    grad_x = grad_input(grad, weight) if needed[0] else None
    grad_bias = rows.sum(0) if needed[1] else None  # (N,)
    grad_a = grad_b = None
    if x is not None and a is not None and b is not None:
        x_rows = x.reshape(-1, x.shape[-1])  # (M, K)
        through = rows @ b  # (M, R)
        if grad_x is not None:
            flat = grad_x.view(-1, grad_x.shape[-1])  # (M, K)
            grad_x = torch.addmm(flat, through, a, alpha=scaling).view(grad_x.shape)  # (..., K)
        if needed[2]:
            grad_a = (through.t() @ x_rows) * scaling
        if needed[3]:
            grad_b = (rows.t() @ functional.linear(x_rows, a)) * scaling
    return grad_x, grad_bias, grad_a, grad_b


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        scaling: float,
    ) -> Tensor:
        # x is needed for the adapter's gradients only.
        ctx.save_for_backward(None if a is None else x, a, b)
        ctx.weight, ctx.scaling, ctx.has_bias = weight, scaling, bias is not None
        adapter = None if a is None or b is None else Adapter(a=a, b=b, scaling=scaling)
        return packed_linear(x, weight, bias, adapter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_x, grad_bias, grad_a, grad_b = _gradients(
            grads[0], x, a, b, ctx.scaling, (needs[0], ctx.has_bias and needs[2], *needs[3:5]),
            ctx.weight,
        )  # fmt: skip
        return grad_x, None, grad_bias, grad_a, grad_b, None


def _call(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    scaling: float,
) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    return cast(Tensor, _PackedLinear.apply(x, weight, bias, a, b, scaling))


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply by a packed weight; gradients go to x and to the bias.

    `kernels.reference.linear` is the specification; arguments as `packed_linear`'s.
    """
    return _call(x, weight, bias, None, None, 0.0)


def lora_linear(
    x: Tensor,
    weight: PackedWeight,
    A: Tensor,
    B: Tensor,
    scaling: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply by a packed weight plus its adapter; gradients go to x, A, B and the bias.

    Parameters
    ----------
    x : Tensor, (..., K), bfloat16
    weight
        (N, K).
    A : Tensor, (R, K), floating
        Masters may be float32; the product is in x's type. R a multiple of 16 up to 128 is fused,
        any other R is added by two products.
    B : Tensor, (N, R), floating
    scaling
        alpha / rank.
    bias : Tensor or None, (N,)

    Raises
    ------
    ValueError
        When a shape does not fit.
    """
    N, K = weight.shape
    if A.dim() != 2 or B.dim() != 2 or A.shape[1] != K or B.shape != (N, A.shape[0]):
        raise ValueError(
            f"adapter A has shape {tuple(A.shape)} and B {tuple(B.shape)}; "
            f"a weight ({N}, {K}) needs A (R, {K}) and B ({N}, R)"
        )
    a, b = A.to(x.dtype), B.to(x.dtype)
    rank = A.shape[0]
    if rank % 16 or rank > 128 or x.dtype != torch.bfloat16:
        base = linear(x, weight, bias)
        return base + functional.linear(functional.linear(x, a), b) * scaling
    return _call(x, weight, bias, a.contiguous(), b.contiguous(), float(scaling))
