"""Linear layers over packed 4-bit weights on Hopper, without gradients, with LoRA or without.

    y = x W^T + b + scaling * (x A^T) B^T

by the path that `kernels.tuning` names for (N, K, M). `packed_linear` is what an engine calls,
captured in CUDA graphs as it is; `kernels.dispatch.linear` gives it a gradient. An adapter rides in
the launch of few rows (`fuses_adapter`); for more, an engine makes its two products itself.

Easy to get wrong: rows of x must be contiguous and 16-byte aligned, or the loads fault (others are
copied first).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels import tuning
from kernels.cuda import fused_adapter, hopper
from kernels.cuda.hopper import Adapter, Choice
from kernels.packing import PackedWeight


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    adapter: Adapter | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x W^T (+ bias, + adapter), without gradients.

    Raises `ValueError` when a shape, type or device does not fit, or the launch of so many rows
    takes no adapter.

    Parameters
    ----------
    x : Tensor, (..., K), bfloat16 (float16 without adapter), CUDA
    weight
        (N, K), on x's device.
    bias : Tensor or None, (N,), bfloat16
    adapter
        LoRA factors in bfloat16, for as many rows as `fuses_adapter` says; several projections may
        share one weight.
    out : Tensor, (M, N), the type of x
        Where to write; None allocates.

    Returns
    -------
    Tensor, (..., N), the type of x
    """
    N, K = weight.shape
    _check(x, weight, bias)
    flat = _aligned(x.reshape(-1, K))  # (M, K)
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
    if adapter is not None:
        if x.dtype != torch.bfloat16 or not fuses_adapter(weight, M):
            raise ValueError(f"the launch of {M} rows of {x.dtype} takes no adapter")
        # NF4 at one row is faster by the choice of its layers alone, in whole steps too.
        rank, steps = adapter.b.shape[1], weight.format != "nf4" or M > 1
        choice, joining = tuning.choose_adapted(x.device.index, N, K, M, rank, steps)
        fused_adapter.narrow(x, weight, bias, out, choice, adapter, joining)
    elif x.dtype == torch.float16 or choice.path == "dense":
        dense_linear(x, weight, bias, out)
    elif choice.path == "wide":
        hopper.wide(x, weight, bias, out, choice)
    else:
        hopper.narrow(x, weight, bias, out, choice)


def _choice(weight: PackedWeight, M: int) -> Choice:
    # The table is NVFP4's. NF4's look-up costs the narrow kernel more, so it hands over sooner.
    rows = 32 if weight.format == "nf4" and 8 < M <= 16 else M
    return tuning.choose(weight.device.index, *weight.shape, rows)


def fuses_adapter(weight: PackedWeight, M: int) -> bool:
    """Tell whether `packed_linear` takes an adapter of M rows, in the layer's one launch.

    Up to 16 rows of NVFP4 and MXFP4 and up to 8 of NF4, by the tuned table.
    """
    return M <= fused_adapter.ROWS and _choice(weight, M).path == "narrow"


def goes_dense(weight: PackedWeight, M: int) -> bool:
    """Tell whether `packed_linear` multiplies M rows by way of a dense scratch."""
    return _choice(weight, M).path == "dense"


def dense_with_columns(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, a: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (x W^T + b, x A^T) from one product: A's rows are below W in the dense buffer.

    A product of its own for x A^T would read x once more.

    Raises `ValueError` when the bias does not have an entry for each row of both.

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


def dense_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """Write x W^T (+ bias) by way of a dense scratch and torch's product."""
    dense = hopper.dequantize_packs(weight, dtype=x.dtype)
    if bias is None:
        torch.mm(x, dense.t(), out=out)
    else:
        torch.addmm(bias, x, dense.t(), out=out)


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
