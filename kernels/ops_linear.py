"""Rows of `kernels.ops.OPS` over 4-bit weights: linear layers, adapters, and conversions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference
from kernels.cuda.hopper import Adapter
from kernels.formats import FORMATS, QuantizedWeight
from kernels.op import Arguments, Dense, Op, Shape, normal
from kernels.packing import pack

_RANK = 32
_SCALING = 0.5
_SHAPES = ((1, 64, 256), (5, 333, 320), (16, 129, 640), (24, 272, 512), (150, 400, 1344))
# An adapter rides in the launch up to 16 rows, of NF4 up to 8.
_ADAPTED = ((1, 768, 512), (5, 272, 512), (8, 768, 512))
# The widest layer of Qwen2.5-7B, gate and up in one.
_N, _K = 37888, 3584


def _weight(format: str, N: int, K: int, device: str, seed: int) -> QuantizedWeight:
    dense = normal(N, K, dtype=torch.float32, device=device, seed=seed)
    return reference.quantize(dense.mul_(0.05), format)


def _inputs(format: str, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    """Return x (M, K), the weight (N, K) and a bias (N,)."""
    M, N, K = shape
    x = normal(M, K, dtype=dtype, device=device, seed=seed + 1)
    bias = normal(N, dtype=dtype, device=device, seed=seed + 2)
    return x, _weight(format, N, K, device, seed), bias


def _adapted_inputs(
    format: str, shape: Shape, dtype: torch.dtype, device: str, seed: int
) -> Arguments:
    """Return x, the weight, A, B, their scaling and a bias."""
    _, N, K = shape
    x, weight, bias = _inputs(format, shape, dtype, device, seed)
    A = normal(_RANK, K, dtype=dtype, device=device, seed=seed + 3) * 0.05
    B = normal(N, _RANK, dtype=dtype, device=device, seed=seed + 4) * 0.05
    return x, weight, A, B, _SCALING, bias


def _column_inputs(
    format: str, shape: Shape, dtype: torch.dtype, device: str, seed: int
) -> Arguments:
    """Return x, the weight, a bias of N + R entries, zeros last, and A (R, K) of 3 projections."""
    M, N, K = shape
    x, weight, bias = _inputs(format, (M, N, K), dtype, device, seed)
    a = normal(3 * _RANK, K, dtype=dtype, device=device, seed=seed + 3) * 0.05
    return x, weight, torch.cat([bias, bias.new_zeros(3 * _RANK)]), a


def _stored_inputs(
    format: str, shape: Shape, dtype: torch.dtype, device: str, seed: int
) -> Arguments:
    N, K = shape
    return _weight(format, N, K, device, seed), dtype


def _dense_inputs(
    format: str, shape: Shape, dtype: torch.dtype, device: str, seed: int
) -> Arguments:
    weight = normal(*shape, dtype=dtype, device=device, seed=seed)
    weight[0, :32] = 0.0
    return weight, format


def _packed(arguments: Arguments) -> Arguments:
    return tuple(pack(a) if isinstance(a, QuantizedWeight) else a for a in arguments)


def _with_adapter(arguments: Arguments) -> Arguments:
    x, weight, A, B, scaling, bias = arguments
    return x, pack(weight), bias, Adapter(a=A, b=B, scaling=scaling)


def dense_with_columns(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, a: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (x W^T + b, x A^T); the reference of `kernels.cuda.linear.dense_with_columns`."""
    both = torch.cat([reference.dequantize(weight, x.dtype), a])
    y = functional.linear(x, both, bias)
    return y[:, : weight.shape[0]], y[:, weight.shape[0] :]


def adapted_linear(
    x: Tensor, weight: QuantizedWeight, A: Tensor, B: Tensor, scaling: float, bias: Tensor | None
) -> Tensor:
    """Return x W^T + b + scaling * (x A^T) B^T; what `packed_linear` does with an adapter."""
    update = functional.linear(functional.linear(x, A), B)
    return reference.linear(x, weight, bias) + update * scaling


def _dense_linear(arguments: Arguments) -> Dense:
    x, weight, bias = arguments
    return functional.linear, (x, reference.dequantize(weight, x.dtype), bias)


def _dense_adapted(arguments: Arguments) -> Dense:
    x, weight, A, B, scaling, bias = arguments
    dense = reference.dequantize(weight, x.dtype)
    return _adapted, (x, dense, A, B, scaling, bias)


def _adapted(x: Tensor, W: Tensor, A: Tensor, B: Tensor, scaling: float, bias: Tensor) -> Tensor:
    update = functional.linear(functional.linear(x, A), B)
    return functional.linear(x, W, bias).add_(update, alpha=scaling)


def _dense_columns(arguments: Arguments) -> Dense:
    x, weight, bias, a = arguments
    both = torch.cat([reference.dequantize(weight, x.dtype), a])
    return functional.linear, (x, both, bias)


def weight_bytes(format: str, N: int, K: int) -> float:
    """Return the bytes of a weight matrix, codes and block scales."""
    spec = FORMATS[format]
    return N * K * (1 / 2 + spec.scale_dtype.itemsize / spec.block)


def _nbytes(format: str, columns: int, shape: Shape) -> float:
    """Return the bytes of a product with `columns` further columns of an adapter."""
    M, N, K = shape
    return weight_bytes(format, N, K) + 2 * M * (N + K) + 2 * columns * (N + K)


def _flops(columns: int, shape: Shape) -> float:
    M, N, K = shape
    return 2 * M * (N * K + columns * (N + K))


def _conversion_bytes(format: str, shape: Shape) -> float:
    return weight_bytes(format, *shape) + 2 * shape[0] * shape[1]


def _row(format: str, name: str, kernel: str, columns: int = 0, **fields: Any) -> Op:
    """Return the row of a kernel over 4-bit weights; its `inputs` are still to take the format."""
    common: dict[str, Any] = {
        "shapes": _SHAPES,
        "large": (8, _N, _K),
        "nbytes": partial(_nbytes, format, columns),
        "flops": partial(_flops, columns),
    }
    inputs = partial(fields.pop("inputs"), format)
    return Op(name=f"{name}_{format}", kernel=f"kernels.{kernel}", inputs=inputs, **common | fields)


def _rows(format: str) -> Iterator[Op]:
    """Yield the rows of products by packed weights and by the checkpoint's, and of conversions."""
    packed: dict[str, Any] = {"prepare": _packed, "interpretable": False, "hopper": True}
    product = partial(_row, format, reference=reference.linear, inputs=_inputs, dense=_dense_linear)
    with_columns = partial(
        _row,
        format,
        reference=dense_with_columns,
        inputs=_column_inputs,
        large=(1024, _N, _K),
        dense=_dense_columns,
    )
    conversion = partial(
        _row,
        format,
        shapes=((3, 64), (33, 320)),
        large=(_N, _K),
        nbytes=partial(_conversion_bytes, format),
        flops=lambda shape: float(shape[0] * shape[1]),
    )
    dequantization = partial(conversion, reference=reference.dequantize, inputs=_stored_inputs)
    yield product("linear", "cuda.linear:packed_linear", **packed)
    yield _row(
        format,
        "adapted_linear",
        "cuda.linear:packed_linear",
        _RANK,
        reference=adapted_linear,
        inputs=_adapted_inputs,
        shapes=_ADAPTED if format == "nf4" else (*_ADAPTED, (16, 272, 512)),
        dense=_dense_adapted,
        **packed | {"prepare": _with_adapter},
    )
    yield with_columns("dense_with_columns", "cuda.linear:dense_with_columns", **packed)
    yield dequantization(
        "dequantize_packs",
        "cuda.hopper:dequantize_packs",
        named=("dtype",),
        shapes=((16, 256), (33, 320), (272, 512)),
        # In value: a zero may lose its sign.
        bound=0.0,
        **packed,
    )
    # It takes 128 rows at most, one row without the matrix unit.
    few = ((1, 70, 1088), *_SHAPES[:4], (100, 65, 320))
    # Without the matrix unit's tiles other codes go by a dense W (`kernels.dispatch`).
    if FORMATS[format].is_e2m1:
        yield product("portable_linear", "triton.portable_linear:linear", shapes=few)
    portable = "triton.portable_linear:dense_with_columns"
    yield with_columns("portable_dense_with_columns", portable, shapes=_SHAPES[1:3])
    yield dequantization("dequantize", "triton.dequantize:dequantize", exact=True)
    yield conversion(
        "quantize",
        "triton.quantize:quantize",
        reference=reference.quantize,
        inputs=_dense_inputs,
        exact=True,
        # It looks whether every value is finite.
        captured=False,
    )


LINEAR_OPS: tuple[Op, ...] = tuple(op for format in FORMATS for op in _rows(format))
