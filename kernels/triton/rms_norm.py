"""RMSNorm with perturbed gain, forward and backward, in Triton.

    r     = 1 / sqrt(mean(x^2) + eps)           float32
    y     = (gain + noise) * T(x * r)           T rounds to x's type, as transformers does

Added noise (AQN) joins the gain in float32, inside the norm: the gain itself is never touched, and
a bfloat16 gain cannot swallow the noise. Backward, with n = x * r and g = (gain + noise) * dy:

    dx    = r * (g - n * mean(g * n))           dgain = sum over rows of dy * n

Easy to get wrong: the sum of dgain over rows runs in a fixed order (one partial row per program),
so that the bits do not depend on scheduling. One program handles one row in forward and several in
backward; a row of H elements sits in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import check_norm
from kernels.triton import FUSED

# Rows of partial sums of the gain's gradient; a few waves of a large GPU.
_PARTIALS = 264


@triton.jit
def _forward_kernel(
    x, gain, noise, y, rstd, eps, x_stride,
    H: tl.constexpr, BLOCK: tl.constexpr, HAS_NOISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    valid = at < H
    value = tl.load(x + row * x_stride + at, mask=valid, other=0.0).to(tl.float32)
    # Reduce the row, (BLOCK,) -> (); backward reads the factor again.
    scale = tl.rsqrt(tl.sum(value * value) / H + eps)
    tl.store(rstd + row, scale)
    # Normalise, rounded before the gain, and store.
    normed = (value * scale).to(x.dtype.element_ty).to(tl.float32)
    factor = tl.load(gain + at, mask=valid, other=0.0).to(tl.float32)
    if HAS_NOISE:
        factor += tl.load(noise + at, mask=valid, other=0.0)
    tl.store(y + row * H + at, (factor * normed).to(y.dtype.element_ty), mask=valid)


# A kernel for each divisor of the number of rows would be compiled in a step.
@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad_y, x, gain, noise, rstd, beside, grad_x, grad_gain, rows,
    H: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NOISE: tl.constexpr, HAS_BESIDE: tl.constexpr, WANTS_GAIN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    valid = at < H
    factor = tl.load(gain + at, mask=valid, other=0.0).to(tl.float32)
    if HAS_NOISE:
        factor += tl.load(noise + at, mask=valid, other=0.0)
    partial = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        base = tl.cast(row, tl.int64) * H
        # Load a row of x, normalised by the factor of forward, and of dy, (BLOCK,) each.
        scale = tl.load(rstd + row)
        normed = tl.load(x + base + at, mask=valid, other=0.0).to(tl.float32) * scale
        dy = tl.load(grad_y + base + at, mask=valid, other=0.0).to(tl.float32)
        if WANTS_GAIN:
            partial += dy * normed
        # dx = scale (g - n mean(g n)), n the normed row.
        g = factor * dy
        dx = scale * (g - normed * (tl.sum(g * normed) / H))
        if HAS_BESIDE:
            dx += tl.load(beside + base + at, mask=valid, other=0.0).to(tl.float32)
        tl.store(grad_x + base + at, dx.to(grad_x.dtype.element_ty), mask=valid)
    if WANTS_GAIN:
        # A partial sum per program, (programs, H).
        tl.store(grad_gain + program.to(tl.int64) * H + at, partial, mask=valid)


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 4096 else 16


def norm_rows(
    x: Tensor, gain: Tensor, eps: float, noise: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the normed rows in `dtype`, (rows, H), and the factor of each, (rows,), float32."""
    rows, H = x.shape
    block = triton.next_power_of_2(H)
    y = torch.empty(rows, H, dtype=dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        constants = (H, block, noise is not None)
        _forward_kernel[(rows,)](
            x, gain, noise, y, rstd, eps, x.stride(0), *constants, num_warps=_warps(block), **FUSED
        )
    return y, rstd


def norm_backward(
    grad: Tensor,
    x: Tensor,
    gain: Tensor,
    noise: Tensor | None,
    rstd: Tensor,
    beside: Tensor | None,
    wants_gain: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of x, including the part that bypasses the norm, and that of the gain.

    Parameters
    ----------
    grad, x : Tensor, (rows, H), contiguous
    rstd : Tensor, (rows,), float32
        Of the forward pass.
    beside : Tensor or None, (rows, H), contiguous
        Added in float32: the residual stream's own gradient.
    """
    rows, H = x.shape
    grad_x = torch.empty_like(x)
    # Each program has a partial sum of the gain's gradient; else more programs hide latency.
    programs = max(1, min(rows, _PARTIALS if wants_gain else 16 * _PARTIALS))
    # What the kernel does not write into may be anything.
    partials = rstd.new_zeros(programs, H) if wants_gain else rstd
    block = triton.next_power_of_2(H)
    if rows:
        tensors = (grad, x, gain, noise, rstd, beside, grad_x, partials)
        constants = (H, block, noise is not None, beside is not None, wants_gain)
        _backward_kernel[(programs,)](*tensors, rows, *constants, num_warps=_warps(block), **FUSED)
    return grad_x, partials.sum(0).to(gain.dtype) if wants_gain else None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, noise: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # (rows, H)
        y, rstd = norm_rows(flat, gain, eps, noise, torch.promote_types(x.dtype, gain.dtype))
        ctx.save_for_backward(flat, gain, noise, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, noise, rstd = ctx.saved_tensors
        flat = grads[0].reshape(-1, x.shape[1]).contiguous()  # (rows, H)
        grad_x, grad_gain = norm_backward(
            flat, x.contiguous(), gain, noise, rstd, None, ctx.needs_input_grad[1]
        )
        return grad_x.view(grads[0].shape), grad_gain, None, None


def rms_norm(x: Tensor, gain: Tensor, eps: float, noise: Tensor | None = None) -> Tensor:
    """Normalise (..., H) by the root mean square, with gradients.

    `kernels.reference.rms_norm` is the specification.
    """
    check_norm(x, gain, noise)
    normed: Tensor = _RMSNorm.apply(x, gain, eps, noise)
    return normed
