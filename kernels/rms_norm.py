"""RMSNorm with perturbed gain and fused residual addition, forward and backward, in Triton.

    h     = x + residual                        (with a residual; h is returned too)
    r     = 1 / sqrt(mean(h^2) + eps)           float32
    y     = (gain + noise) * T(h * r)           T rounds to x's type, as transformers does

Added noise (AQN) joins the gain in float32, inside the norm: the gain itself is never touched, and
a bfloat16 gain cannot swallow the noise. Backward, with n = h * r and g = (gain + noise) * dy:

    dh    = r * (g - n * mean(g * n))           dgain = sum over rows of dy * n

Easy to get wrong: h is rounded to x's type before it is squared, because the next layer sees the
rounded h; the sum of dgain over rows runs in a fixed order (one partial row a program), so that
the bits do not depend on scheduling. One program handles one row in forward and several in
backward; a row of H elements sits in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of partial sums of the gain's gradient; a few waves of a large GPU.
_PARTIALS = 264


@triton.jit
def _forward_kernel(
    x, residual, gain, noise, y, hidden, rstd, eps,
    x_stride, residual_stride, H: tl.constexpr, BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NOISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    held = at < H
    value = tl.load(x + row * x_stride + at, mask=held, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * residual_stride + at, mask=held, other=0.0).to(tl.float32)
        value = value.to(hidden.dtype.element_ty)
        tl.store(hidden + row * H + at, value, mask=held)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / H + eps)
    tl.store(rstd + row, scale)
    normed = (value * scale).to(x.dtype.element_ty).to(tl.float32)
    factor = tl.load(gain + at, mask=held, other=0.0).to(tl.float32)
    if HAS_NOISE:
        factor += tl.load(noise + at, mask=held, other=0.0)
    tl.store(y + row * H + at, (factor * normed).to(y.dtype.element_ty), mask=held)


@triton.jit
def _backward_kernel(
    grad_y, grad_hidden, hidden, gain, noise, rstd, grad_x, grad_gain, rows,
    H: tl.constexpr, BLOCK: tl.constexpr, HAS_NOISE: tl.constexpr,
    HAS_GRAD_HIDDEN: tl.constexpr, WANTS_GAIN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    held = at < H
    factor = tl.load(gain + at, mask=held, other=0.0).to(tl.float32)
    if HAS_NOISE:
        factor += tl.load(noise + at, mask=held, other=0.0)
    partial = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        base = tl.cast(row, tl.int64) * H
        scale = tl.load(rstd + row)
        normed = tl.load(hidden + base + at, mask=held, other=0.0).to(tl.float32) * scale
        dy = tl.load(grad_y + base + at, mask=held, other=0.0).to(tl.float32)
        if WANTS_GAIN:
            partial += dy * normed
        g = factor * dy
        dx = scale * (g - normed * (tl.sum(g * normed) / H))
        if HAS_GRAD_HIDDEN:
            dx += tl.load(grad_hidden + base + at, mask=held, other=0.0).to(tl.float32)
        tl.store(grad_x + base + at, dx.to(grad_x.dtype.element_ty), mask=held)
    if WANTS_GAIN:
        tl.store(grad_gain + program.to(tl.int64) * H + at, partial, mask=held)


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 4096 else 16


def _forward(
    x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, H = x.shape
    block = triton.next_power_of_2(H)
    y = torch.empty(rows, H, dtype=torch.promote_types(x.dtype, gain.dtype), device=x.device)
    hidden = x if residual is None else torch.empty(rows, H, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _forward_kernel[(rows,)](
            x, residual, gain, noise, y, hidden, rstd, eps,
            x.stride(0), 0 if residual is None else residual.stride(0), H, block,
            residual is not None, noise is not None, num_warps=_warps(block),
        )  # fmt: skip
    return y, hidden, rstd


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        gain: Tensor,
        eps: float,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        shape = x.shape
        flat = x.reshape(-1, shape[-1])
        added = None if residual is None else residual.reshape(-1, shape[-1])
        y, hidden, rstd = _forward(flat, added, gain, eps, noise)
        ctx.save_for_backward(hidden, gain, noise, rstd)
        ctx.has_residual = residual is not None
        y, hidden = y.view(shape), hidden.view(shape)
        if residual is None:
            ctx.mark_non_differentiable(hidden)
        return y, hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_y, grad_hidden = grads
        hidden, gain, noise, rstd = ctx.saved_tensors
        H = gain.shape[0]
        if grad_y is None:
            grad_y = torch.zeros_like(hidden)
        shape = grad_y.shape
        flat = grad_y.reshape(-1, H).contiguous()
        joined = None
        if ctx.has_residual and grad_hidden is not None:
            joined = grad_hidden.reshape(-1, H).contiguous()
        kept = hidden.reshape(-1, H).contiguous()
        rows = flat.shape[0]
        grad_x = torch.empty(rows, H, dtype=hidden.dtype, device=hidden.device)
        programs = max(1, min(rows, _PARTIALS))
        wants_gain = ctx.needs_input_grad[2]
        partials = torch.zeros(
            programs if wants_gain else 1, H, dtype=torch.float32, device=hidden.device
        )
        block = triton.next_power_of_2(H)
        if rows:
            _backward_kernel[(programs,)](
                flat, joined, kept, gain, noise, rstd, grad_x, partials, rows, H, block,
                noise is not None, joined is not None, wants_gain, num_warps=_warps(block),
            )  # fmt: skip
        grad_x = grad_x.view(shape)
        grad_gain = partials.sum(0).to(gain.dtype) if wants_gain else None
        return grad_x, grad_x if ctx.has_residual else None, grad_gain, None, None


def _check(x: Tensor, gain: Tensor, noise: Tensor | None) -> None:
    if x.shape[-1:] != gain.shape:
        raise ValueError(
            f"x's last dimension is {x.shape[-1]} and gain has shape {tuple(gain.shape)}; "
            "they must agree"
        )
    if noise is not None and (noise.shape != gain.shape or noise.dtype != torch.float32):
        raise ValueError(
            f"noise is {noise.dtype} of shape {tuple(noise.shape)}; "
            f"it must be torch.float32 of shape {tuple(gain.shape)}"
        )


def rms_norm(x: Tensor, gain: Tensor, eps: float, noise: Tensor | None = None) -> Tensor:
    """Normalise by the root mean square; `kernels.reference.rms_norm` is the specification.

    Parameters
    ----------
    x : Tensor, (..., H), floating
    gain : Tensor, (H,), floating
    eps
        Added to the mean square.
    noise : Tensor or None, (H,), float32
        Added to the gain in float32.

    Returns
    -------
    Tensor, (..., H), the wider type of x and gain
    """
    _check(x, gain, noise)
    return _RMSNorm.apply(x, None, gain, eps, noise)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum, in one pass; differentiable in both.

    Parameters
    ----------
    x, residual : Tensor, (..., H), floating, one type
    gain, eps, noise
        As `rms_norm`'s.

    Returns
    -------
    normed : Tensor, (..., H)
    hidden : Tensor, (..., H)
        x + residual, rounded to their type.
    """
    _check(x, gain, noise)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual is {residual.dtype} of shape {tuple(residual.shape)}; x is {x.dtype} of "
            f"shape {tuple(x.shape)}"
        )
    return _RMSNorm.apply(x, residual, gain, eps, noise)
