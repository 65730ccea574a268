r"""Projections that share an input, with their adapters and what stands before them, differentiable.

    y = e(x) W^T + b + scaling * [e(x) A_1^T B_1^T, e(x) A_2^T B_2^T, ...]

e is nothing, RMSNorm or SwiGLU. W holds the rows of all projections, dense or in 4 bits. For
backward x alone is kept, and the narrow z = e(x) A^T: e(x) is computed again, which costs one pass
over memory, while keeping it would double what a block keeps.

    dz_i = scaling * dy_i B_i        de = dz A + dy W        dA = dz^T e(x)
    dB_i = scaling * dy_i^T z_i      dx = e'(x) de  (+ the residual stream's own gradient)

A 4-bit W is rebuilt into a scratch that lives for one product: at the row counts of training that
costs a few percent of it, and no 16-bit copy of a layer outlives its use.

Easy to get wrong: the adapter's share is written first and the base product added to it, since
adding the narrow product to y afterwards would read and write y once more; dz carries the scaling,
z does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import rms_norm, swiglu
from kernels.reference_train import Projections


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norm:
    """RMSNorm before the projections; the gain is trained or not."""

    eps: float
    noise: Tensor | None


def _scaled(x: Tensor, y: Tensor, scale: float, out: Tensor) -> None:
    """Write scale * x y, (M, N), into `out`, whose rows may be strided."""
    torch.addmm(out, x, y, beta=0, alpha=scale, out=out)


def multiply(
    x: Tensor, p: Projections, a: Tensor | None, b: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return y, (M, N), and z = x A^T, (M, n R), of x (M, K), without gradients."""
    y, z, begun = x.new_empty(len(x), p.ends[-1]), None, False
    if a is not None and b is not None:
        z, begun = x @ a.t(), True
        for columns, own in p.parts(a):
            if p.bias is None:
                _scaled(z[:, own], b[columns].t(), p.scaling, y[:, columns])
            else:
                out, bias = y[:, columns], p.bias[columns]
                torch.addmm(bias, z[:, own], b[columns].t(), alpha=p.scaling, out=out)
    elif p.bias is not None:
        y, begun = p.bias.expand_as(y).contiguous(), True
    for columns, dense in p.matrices(x.dtype):
        part = y[:, columns]
        torch.addmm(part, x, dense.t(), beta=int(begun), out=part)
    return y, z


def _grad_input(
    grad: Tensor, p: Projections, a: Tensor | None, b: Tensor | None, wanted: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of e(x), (M, K), and dz, (M, n R)."""
    dz = grad_x = None
    if a is not None and b is not None:
        dz = grad.new_empty(len(grad), len(a))
        for columns, own in p.parts(a):
            _scaled(grad[:, columns], b[columns], p.scaling, dz[:, own])
    if not wanted:
        return None, dz
    if dz is not None and a is not None:
        grad_x = dz @ a
    for columns, dense in p.matrices(grad.dtype):
        part = grad[:, columns]
        grad_x = part @ dense if grad_x is None else grad_x.addmm_(part, dense)
    return grad_x, dz


def _grad_factors(
    grad: Tensor, entered: Tensor, z: Tensor, dz: Tensor, p: Projections, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of A, (n R, K), and B, (N, R)."""
    grad_b = torch.empty_like(b)
    for columns, own in p.parts(a):
        _scaled(grad[:, columns].t(), z[:, own], p.scaling, grad_b[columns])
    return dz.t() @ entered, grad_b


class _Read(torch.autograd.Function):
    """Projections of e(x); `before` is a `Norm`, "swiglu" or None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        before: Any,
        p: Projections,
    ) -> Any:
        entered = x
        if isinstance(before, Norm) and gain is not None:
            entered, _ = rms_norm.norm_rows(x, gain, before.eps, before.noise, x.dtype)
        elif before == "swiglu":
            entered = swiglu.swiglu_rows(x)
        y, z = multiply(entered, p, a, b)
        ctx.save_for_backward(x, gain, a, b, z)
        ctx.before, ctx.p = before, p
        # The stream goes on through here, so that its gradient is added inside the norm's backward.
        return (y, x.view_as(x)) if isinstance(before, Norm) else y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, gain, a, b, z = ctx.saved_tensors
        before, p, grad = ctx.before, ctx.p, grads[0].contiguous()
        wants_x, wants_gain = ctx.needs_input_grad[:2]
        wanted = wants_x or wants_gain
        grad_e, dz = _grad_input(grad, p, a, b, wanted)
        entered, grad_x, grad_gain = x, grad_e, None
        if isinstance(before, Norm):
            entered, rstd = rms_norm.norm_rows(x, gain, before.eps, before.noise, x.dtype)
            if grad_e is not None:
                grad_x, grad_gain = rms_norm.norm_backward(
                    grad_e, x, gain, before.noise, rstd, grads[1].contiguous(), wants_gain
                )
        elif before == "swiglu" and grad_e is not None:
            grad_x, entered = swiglu.swiglu_backward(x, grad_e, again=a is not None)
        grad_a = grad_b = None
        if a is not None:
            grad_a, grad_b = _grad_factors(grad, entered, z, dz, p, a, b)
        return grad_x if wants_x else None, grad_gain, grad_a, grad_b, None, None


def projected(x: Tensor, projections: Projections, a: Tensor | None, b: Tensor | None) -> Tensor:
    """Return the projections of x with their adapters, differentiable in x, A and B.

    Parameters
    ----------
    x : Tensor, (M, K), contiguous
    a : Tensor or None, (n R, K), the type of x
        The A of n projections, one below another; None without adapters.
    b : Tensor or None, (N, R), the type of x
        The B of all projections, one below another.

    Returns
    -------
    Tensor, (M, N), the type of x
    """
    y: Tensor = _Read.apply(x, None, a, b, None, projections)
    return y


def norm_projected(
    x: Tensor,
    gain: Tensor,
    eps: float,
    noise: Tensor | None,
    projections: Projections,
    a: Tensor | None,
    b: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the projections of the normed x, and x itself, with which the stream goes on.

    Parameters
    ----------
    x : Tensor, (M, H), contiguous
    gain : Tensor, (H,), floating
        Trained or not.
    eps, noise
        As `kernels.rms_norm.rms_norm`'s.
    projections, a, b
        As `projected`'s.

    Returns
    -------
    y : Tensor, (M, N), x : Tensor, (M, H)
    """
    pair: tuple[Tensor, Tensor] = _Read.apply(
        x, gain, a, b, Norm(eps=eps, noise=noise), projections
    )
    return pair


def swiglu_projected(
    gate_up: Tensor, projections: Projections, a: Tensor | None, b: Tensor | None
) -> Tensor:
    """Return the projections of silu(gate) * up, (M, N), of gate_up (M, 2 K), contiguous."""
    y: Tensor = _Read.apply(gate_up, None, a, b, "swiglu", projections)
    return y
