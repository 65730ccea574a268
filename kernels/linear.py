"""Linear layers over packed 4-bit weights on Hopper, forward and backward, with LoRA or without.

    y  = x W^T + b + scaling * (x A^T) B^T
    dx = dy W + scaling * (dy B) A
    dA = scaling * (dy B)^T x,   dB = scaling * dy^T (x A^T),   db = sum over rows of dy

Forward takes the path that `kernels.tuning` names for (N, K, M). Backward rebuilds W once, into a
scratch that lives for the call, and multiplies: at the row counts of training, writing W costs a
tenth of the product or less, and no 16-bit copy of a layer outlives its use.

`packed_linear` is what an engine calls: no gradients, captured in CUDA graphs as it is.
`linear` and `lora_linear` are differentiable; they are registered operators (`qerl::...`), so
`torch.compile`, activation checkpointing and CUDA graphs see one opaque node.

Easy to get wrong: rows of x must be contiguous and 16-byte aligned, or the loads fault (others are
copied first); gradients of A and B are accumulated by cuBLAS in float32 and rounded to the
masters' type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels import fused_adapter, hopper, tuning
from kernels.hopper import Adapter, Choice
from kernels.packing import FORMAT_NUMBERS, PackedWeight

_FORMATS = {number: name for name, number in FORMAT_NUMBERS.items()}


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    adapter: Adapter | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x W^T (+ bias, + adapter), without gradients.

    Parameters
    ----------
    x : Tensor, (..., K), bfloat16 (float16 without adapter), CUDA
    weight
        (N, K), on x's device.
    bias : Tensor or None, (N,), bfloat16
    adapter
        LoRA factors in bfloat16; several projections may share one weight.
    out : Tensor, (M, N), the type of x
        Where to write; None allocates.

    Returns
    -------
    Tensor, (..., N), the type of x

    Raises
    ------
    ValueError
        When a shape, type or device does not fit.
    """
    N, K = weight.shape
    _check(x, weight, bias)
    flat = _aligned(x.reshape(-1, K))
    M = flat.shape[0]
    if out is None:
        out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    elif out.shape != (M, N) or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)}; it must be {x.dtype}, contiguous, "
            f"of shape {(M, N)}"
        )
    if M:
        _dispatch(flat, weight, bias, out, adapter)
    return out.view(*x.shape[:-1], N)


def _dispatch(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, adapter: Adapter | None
) -> None:
    N, K = weight.shape
    M = x.shape[0]
    choice = _choice(weight, M)
    if x.dtype == torch.float16 or choice.path == "dense":
        dense_linear(x, weight, bias, out, adapter)
        return
    if choice.path == "wide":
        hopper.wide(x, weight, bias, out, choice, adapter)
    elif adapter is None or not fuses_adapter(weight, M):
        hopper.narrow(x, weight, bias, out, choice)
        add_adapter(x, adapter, out)
    else:
        choice, joining = tuning.choose_adapted(x.device.index, N, K, M)
        fused_adapter.narrow(x, weight, bias, out, choice, adapter, joining)


def _choice(weight: PackedWeight, M: int) -> Choice:
    # The table is NVFP4's. NF4's look-up costs the narrow kernel more, so it hands over sooner.
    rows = 32 if weight.format == "nf4" and 8 < M <= 16 else M
    return tuning.choose(weight.device.index, *weight.shape, rows)


def fuses_adapter(weight: PackedWeight, M: int) -> bool:
    """Tell whether `packed_linear` makes the adapter of M rows in the layer's one launch.

    Up to 16 rows of NVFP4 and MXFP4 and up to 8 of NF4, by the tuned table.
    """
    return M <= fused_adapter.ROWS and _choice(weight, M).path == "narrow"


def goes_dense(weight: PackedWeight, M: int) -> bool:
    """Tell whether `packed_linear` multiplies M rows by way of a dense scratch."""
    return _choice(weight, M).path == "dense"


def dense_with_columns(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, a: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (x W^T + b, x A^T) from one product: A's rows stand below the dense scratch of W.

    A product of its own for x A^T would read x once more.

    Parameters
    ----------
    x : Tensor, (M, K), bfloat16
    bias : Tensor or None, (N + R,), bfloat16
        Zeros for A's rows.
    a : Tensor, (R, K), bfloat16

    Returns
    -------
    y : Tensor, (M, N), z : Tensor, (M, R)
        Columns of one tensor, so their rows are strided.

    Raises
    ------
    ValueError
        When the bias does not have an entry for each row of both.
    """
    N, K = weight.shape
    _check(x, weight, None)
    rows = N + len(a)
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; W and A need ({rows},)")
    scratch = torch.empty(rows, K, dtype=x.dtype, device=x.device)
    hopper.dequantize_packs(weight, scratch[:N], x.dtype)
    scratch[N:].copy_(a)
    both = functional.linear(_aligned(x), scratch, bias)
    return both[:, :N], both[:, N:]


def dense_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, adapter: Adapter | None
) -> None:
    """Write x W^T (+ bias, + adapter) by way of a dense scratch and torch's product."""
    dense = hopper.dequantize_packs(weight, dtype=x.dtype)
    if bias is None:
        torch.mm(x, dense.t(), out=out)
    else:
        torch.addmm(bias, x, dense.t(), out=out)
    add_adapter(x, adapter, out)


def add_adapter(x: Tensor, adapter: Adapter | None, out: Tensor) -> None:
    """Add scaling * (x A^T) B^T to `out`, (M, N), in place, by torch's products."""
    if adapter is None:
        return
    rank = adapter.b.shape[1]
    z = functional.linear(x, adapter.a)
    starts = (0, *adapter.ends)
    ends = (*adapter.ends, out.shape[1])
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        part = out[:, start:end]
        part.addmm_(
            z[:, i * rank : (i + 1) * rank], adapter.b[start:end].t(), alpha=adapter.scaling
        )


def _check(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> None:
    N, K = weight.shape
    if x.shape[-1] != K:
        raise ValueError(f"x's last dimension is {x.shape[-1]}; the weight ({N}, {K}) needs {K}")
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}; packed weights take bfloat16 or float16")
    if not x.is_cuda:
        raise ValueError(f"x is on {x.device}; packed weights are multiplied on CUDA devices")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device} and the weight on {weight.device}; they must agree")
    if bias is not None and (bias.shape != (N,) or bias.dtype != x.dtype):
        raise ValueError(
            f"bias is {bias.dtype} of shape {tuple(bias.shape)}; it must be {x.dtype} of ({N},)"
        )


def _aligned(x: Tensor) -> Tensor:
    """Return x with contiguous, 16-byte aligned rows: itself where it has them."""
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _rebuilt(
    packs: Tensor, gain: Tensor, encode: Tensor, format: int, N: int, K: int
) -> PackedWeight:
    return PackedWeight(
        format=_FORMATS[format], shape=(N, K), packs=packs, gain=gain, kept={"encode_scale": encode}
    )


@torch.library.custom_op("qerl::packed_linear", mutates_args=())
def _linear_op(
    x: Tensor, packs: Tensor, gain: Tensor, encode: Tensor, bias: Tensor | None,
    a: Tensor | None, b: Tensor | None, scaling: float, format: int, N: int, K: int,
) -> Tensor:  # fmt: skip
    weight = _rebuilt(packs, gain, encode, format, N, K)
    adapter = None if a is None or b is None else Adapter(a=a, b=b, scaling=scaling)
    return packed_linear(x, weight, bias, adapter)


@_linear_op.register_fake
def _(
    x: Tensor, packs: Tensor, gain: Tensor, encode: Tensor, bias: Tensor | None,
    a: Tensor | None, b: Tensor | None, scaling: float, format: int, N: int, K: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(*x.shape[:-1], N)


def grad_input(grad: Tensor, weight: PackedWeight) -> Tensor:
    """Return dy W, (..., K), with W rebuilt for the call.

    Parameters
    ----------
    grad : Tensor, (..., N), bfloat16 or float16
    """
    return torch.matmul(grad, hopper.dequantize_packs(weight, dtype=grad.dtype))


@torch.library.custom_op("qerl::packed_grad_input", mutates_args=())
def _grad_input_op(
    grad: Tensor, packs: Tensor, gain: Tensor, encode: Tensor, format: int, N: int, K: int
) -> Tensor:
    return grad_input(grad, _rebuilt(packs, gain, encode, format, N, K))


@_grad_input_op.register_fake
def _(
    grad: Tensor, packs: Tensor, gain: Tensor, encode: Tensor, format: int, N: int, K: int
) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], K)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packs, gain, encode, bias, a, b, scaling, format, N, K = inputs
    # x is needed for the adapter's gradients only.
    ctx.save_for_backward(None if a is None else x, packs, gain, encode, a, b)
    ctx.numbers = (scaling, format, N, K)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, packs, gain, encode, a, b = ctx.saved_tensors
    scaling, format, N, K = ctx.numbers
    grad_x = grad_a = grad_b = grad_bias = None
    grad = grad.contiguous()
    if ctx.needs_input_grad[0]:
        grad_x = _grad_input_op(grad, packs, gain, encode, format, N, K)
    if a is not None and b is not None:
        rows = grad.reshape(-1, N)
        through = rows @ b
        if grad_x is not None:
            grad_x = torch.addmm(grad_x.view(-1, K), through, a, alpha=scaling).view(grad_x.shape)
        x_rows = x.reshape(-1, K)
        if ctx.needs_input_grad[5]:
            grad_a = (through.t() @ x_rows) * scaling
        if ctx.needs_input_grad[6]:
            grad_b = (rows.t() @ functional.linear(x_rows, a)) * scaling
    if ctx.has_bias and ctx.needs_input_grad[4]:
        grad_bias = grad.reshape(-1, N).sum(0)
    return (grad_x, None, None, None, grad_bias, grad_a, grad_b, None, None, None, None)


_linear_op.register_autograd(_backward, setup_context=_keep)


def _call(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    scaling: float,
) -> Tensor:
    encode = weight.kept.get("encode_scale", weight.gain)
    bias = None if bias is None else bias.to(x.dtype)
    return _linear_op(
        x, weight.packs, weight.gain, encode, bias, a, b, scaling,
        FORMAT_NUMBERS[weight.format], *weight.shape,
    )  # fmt: skip


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
