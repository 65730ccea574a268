r"""Projections with a common input, their adapters, and the operation before them, differentiable.

    y = e(x) W^T + b + scaling * (e(x) A^T) B^T

e is nothing, RMSNorm or SwiGLU. W holds the rows of all projections, dense or in 4 bits; A their
factors one below another, and B, (N, n R), theirs as the blocks of a diagonal: one product each,
whatever their number. For backward x alone is kept, and the narrow z = e(x) A^T: e(x) is computed
again, which costs one pass over memory, while keeping it would double what a block keeps.

    dz = scaling * dy B        de = dz A + dy W        dA = dz^T e(x)
    dB = scaling * dy^T z      dx = e'(x) de  (+ the residual stream's own gradient)

A 4-bit W is rebuilt into a scratch that lives for one product: at the row counts of training that
costs a few percent of it, and no 16-bit copy of a layer outlives its use.

Easy to get wrong: the adapter's share is written first and the base product added to it, since
adding the narrow product to y afterwards would read and write y once more; dz carries the scaling,
z does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.reference_train import Before, Norm, Projections
from kernels.triton import decode_step, rms_norm, swiglu


def multiply(
    x: Tensor, p: Projections, a: Tensor | None, b: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return y, (M, N), and z = x A^T, (M, n R), of x (M, K), without gradients."""
    z: Tensor | None = None
    y: Tensor | None = None
    if a is not None and b is not None:
        z = x @ a.t()
        # Without a bias the first argument is not read.
        bias = p.bias if p.bias is not None else b.new_empty(1)
        y = torch.addmm(bias, z, b.t(), beta=int(p.bias is not None), alpha=p.scaling)
    elif p.bias is not None:
        y = p.bias.expand(len(x), -1).contiguous()
    begun = int(y is not None)
    y = x.new_empty(len(x), p.rows) if y is None else y
    for columns, dense in p.matrices(x.dtype):
        part = y[:, columns]
        torch.addmm(part, x, dense.t(), beta=begun, out=part)
    return y, z


def _grad_input(
    grad: Tensor, p: Projections, a: Tensor | None, b: Tensor | None, wanted: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of e(x), (M, K), and dz, (M, n R)."""
    dz = grad_x = None
    if a is not None and b is not None:
        dz = torch.addmm(b.new_empty(1), grad, b, beta=0, alpha=p.scaling)
        grad_x = dz @ a if wanted else None
    for columns, dense in p.matrices(grad.dtype) if wanted else ():
        part = grad[:, columns]
        grad_x = part @ dense if grad_x is None else grad_x.addmm_(part, dense)
    return grad_x, dz


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        before: Before,
        p: Projections,
    ) -> tuple[Tensor, Tensor]:
        # The stream's gradient is None where it goes on elsewhere.
        ctx.set_materialize_grads(False)
        entered = x
        if isinstance(before, Norm):
            if gain is None:
                raise ValueError("a norm before projections needs its gain; got None")
            entered, _ = rms_norm.norm_rows(x, gain, before.eps, before.noise, x.dtype)
        elif before == "swiglu":
            entered = decode_step.swiglu(x, overlap=False)
        y, z = multiply(entered, p, a, b)
        ctx.save_for_backward(x, gain, a, b, z)
        ctx.before, ctx.p = before, p
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, gain, a, b, z = ctx.saved_tensors
        before, p, grad = ctx.before, ctx.p, grads[0].contiguous()
        stream = None if grads[1] is None else grads[1].contiguous()
        wants_x, wants_gain = ctx.needs_input_grad[:2]
        wanted = wants_x or wants_gain
        grad_e, dz = _grad_input(grad, p, a, b, wanted)
        entered, grad_x, grad_gain = x, grad_e, None
        if isinstance(before, Norm):
            entered, rstd = rms_norm.norm_rows(x, gain, before.eps, before.noise, x.dtype)
            if grad_e is not None:
                grad_x, grad_gain = rms_norm.norm_backward(
                    grad_e, x, gain, before.noise, rstd, stream, wants_gain
                )
                stream = None
        elif before == "swiglu":
            if grad_e is None:
                entered = decode_step.swiglu(x, overlap=False)
            else:
                grad_x, entered = swiglu.swiglu_backward(x, grad_e, again=a is not None)
        if grad_x is not None and stream is not None:
            grad_x = grad_x + stream
        grad_a = grad_b = None
        if a is not None and dz is not None:
            grad_a = dz.t() @ entered
            grad_b = torch.addmm(b.new_empty(1), grad.t(), z, beta=0, alpha=p.scaling)
        return grad_x if wants_x else None, grad_gain, grad_a, grad_b, None, None


def projected(
    x: Tensor,
    projections: Projections,
    a: Tensor | None,
    b: Tensor | None,
    gain: Tensor | None = None,
    before: Before = None,
) -> tuple[Tensor, Tensor]:
    """Return the projections of e(x) with their adapters, and x for the residual stream.

    Differentiable in x, A, B and the gain. A stream that goes on with the x returned has its
    gradient added inside the norm's backward.

    Parameters
    ----------
    x : Tensor, (M, H), contiguous
        (M, 2 K) under SwiGLU, gate first.
    a : Tensor or None, (n R, K), the type of x
        The A of n projections, one below another; None without adapters.
    b : Tensor or None, (N, n R), the type of x
        Their B as the blocks of a diagonal.
    gain : Tensor or None, (H,), floating
        Of the norm.
    before
        What e is: a `Norm`, "swiglu", or None for nothing.

    Returns
    -------
    y : Tensor, (M, N), x : Tensor, both in the type of x
    """
    pair: tuple[Tensor, Tensor] = _Projected.apply(x, gain, a, b, before, projections)
    return pair
