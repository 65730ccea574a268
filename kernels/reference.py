"""The operations in plain PyTorch: the specification that every kernel is compared with.

One name and signature per operation, here and in `kernels.dispatch`. Nothing here needs
Triton or a GPU; everything runs on either device. Quantisation is in `reference_quantize`,
logprobs in `reference_logprobs`; all these names are importable from here. The steps of decoding,
which the engine calls past `dispatch`, are in `reference_step`.

Easy to get wrong: `rms_norm` rounds the normalised x to its own type before the gain, as
transformers does, so that noise of zero changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.formats import QuantizedWeight
from kernels.reference_logprobs import token_logprobs as token_logprobs
from kernels.reference_quantize import dequantize as dequantize
from kernels.reference_quantize import quantize as quantize
from kernels.reference_quantize import shared_global_scale as shared_global_scale

# Of a weight in whatever layout the two have agreed on.
Product = Callable[[Tensor, Any, Tensor | None], Tensor]
Dequantize = Callable[[Any, torch.dtype], Tensor]


class _QuantizedLinear(torch.autograd.Function):
    """y = x W^T + b by a product that keeps no dense W; backward rebuilds W once more."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        product: Product,
        dequantize: Dequantize,
    ) -> Tensor:
        # Only 4-bit tensors are kept for backward; x is not needed, as W is frozen.
        ctx.weight, ctx.dequantize = weight, dequantize
        ctx.has_bias = bias is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ ctx.dequantize(ctx.weight, grad.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)  # (N,)
        return grad_x, None, grad_bias, None, None


_apply_linear: Callable[..., Tensor] = _QuantizedLinear.apply


def linear(
    x: Tensor,
    weight: Any,
    bias: Tensor | None = None,
    *,
    product: Product | None = None,
    dense: Dequantize | None = None,
) -> Tensor:
    """Multiply by a quantised weight; gradients go to x and to the bias.

    Raises `ValueError` when x's last dimension is not K.

    Parameters
    ----------
    x : Tensor, (..., K), floating
    weight
        (N, K), frozen; a `QuantizedWeight`, or in the layout that `product` and `dense` read.
    bias : Tensor or None, (N,)
        Cast to x's type.
    product
        Returns x W^T + b from x, the weight and the bias in x's type; None multiplies by `dense`.
    dense
        Returns W in a type; None dequantises. Backward multiplies by it.

    Returns
    -------
    Tensor, (..., N), the type of x
    """
    _check_columns("x", x, weight.shape[1])
    bias = None if bias is None else bias.to(x.dtype)
    return _apply_linear(x, weight, bias, product or _dense_product, dense or dequantize)


def _dense_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    return functional.linear(x, dequantize(weight, x.dtype), bias)


def rms_norm(x: Tensor, gain: Tensor, eps: float, noise: Tensor | None = None) -> Tensor:
    """Normalise by the root mean square, with added noise on the gain (AQN) or without.

    Raises `ValueError` when a shape does not fit, or noise is not float32.

    Parameters
    ----------
    x : Tensor, (..., H), floating
    gain : Tensor, (H,), floating
    eps
        Added to the mean square, in float32, or float64 for float64 inputs.
    noise : Tensor or None, (H,), float32
        Added to the gain in float32, so that a bfloat16 gain cannot swallow it.

    Returns
    -------
    Tensor, (..., H), the wider type of x and gain
        Without noise bit-equal to transformers' `Qwen2RMSNorm`; with noise of zero equal to that.
    """
    check_norm(x, gain, noise)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    if noise is None:
        return gain * normed
    dtype = torch.promote_types(gain.dtype, x.dtype)
    return ((gain.float() + noise) * normed.float()).to(dtype)


def check_norm(x: Tensor, gain: Tensor, noise: Tensor | None) -> None:
    """Raise `ValueError` for arguments that `rms_norm` cannot take."""
    if x.shape[-1:] != gain.shape:
        raise ValueError(f"x's last dimension is {x.shape[-1]}; gain has {tuple(gain.shape)}")
    if noise is not None and (noise.shape != gain.shape or noise.dtype != torch.float32):
        raise ValueError(
            f"noise is {noise.dtype} of shape {tuple(noise.shape)}; "
            f"it must be torch.float32 of shape {tuple(gain.shape)}"
        )


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of the two halves of the last dimension.

    Parameters
    ----------
    gate_up : Tensor, (..., 2 I), floating
        Gate first.

    Returns
    -------
    Tensor, (..., I), the type of `gate_up`
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up's last dimension is {gate_up.shape[-1]}; it must be even")
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their position, in transformers' half-split layout.

    Parameters
    ----------
    q : Tensor, (..., Hq, D), floating
        Heads second to last, as the projections leave them.
    k : Tensor, (..., Hkv, D)
    cos, sin : Tensor, (..., D)
        Both halves filled, as transformers' rotary embedding returns them.

    Returns
    -------
    tuple of Tensor
        Rotated q and k, in their own types.
    """
    _check_columns("cos", cos, q.shape[-1])
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (..., 1, D) each
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def _check_columns(name: str, tensor: Tensor, columns: int) -> None:
    if tensor.shape[-1] != columns:
        raise ValueError(f"{name}'s last dimension is {tensor.shape[-1]}; it must be {columns}")
