"""One row an operation: its reference, its kernel, its inputs, and what it must move and compute.

The parity test, the benchmark and the roofline are loops over `OPS`; adding an operation is one
file and one row.

`exact` rows must equal the reference bit for bit. The others may be off, against the reference in
float64 or float32, by at most twice what plain PyTorch is off in the same type. `interpretable`
rows run on a CPU under Triton's interpreter (`TRITON_INTERPRET=1`), in float32: its bfloat16
products and roundings are wrong (kernels/README.md), so bfloat16 is for GPUs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.formats import FORMATS, QuantizedWeight
from kernels.packing import pack

Shape = tuple[int, ...]


def _as_they_are(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation.

    Attributes
    ----------
    name
        Unique.
    reference
        Called with the inputs.
    kernel
        "module:function", imported on use; called with the inputs, prepared by `prepare`.
    inputs
        (shape, dtype, device, seed) to the arguments.
    shapes
        Small ones for tests, ragged on purpose.
    large
        What the benchmark takes, of Qwen2.5-7B.
    nbytes, flops
        Of one call at a shape in 16 bits: each input read once, each output written once.
    exact
        Must equal the reference bit for bit.
    interpretable
        Runs in Triton's interpreter.
    hopper
        Needs the Hopper kernels.
    prepare
        Turns the reference's arguments into the kernel's.
    """

    name: str
    reference: Callable[..., Any]
    kernel: str
    inputs: Callable[[Shape, torch.dtype, str, int], tuple[Any, ...]]
    shapes: tuple[Shape, ...]
    large: Shape
    nbytes: Callable[[Shape], float]
    flops: Callable[[Shape], float]
    exact: bool = False
    interpretable: bool = True
    hopper: bool = False
    prepare: Callable[[tuple[Any, ...]], tuple[Any, ...]] = _as_they_are

    def load(self) -> Callable[..., Any]:
        """Import the kernel."""
        module, function = self.kernel.split(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return found


def _random(*shape: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def _linear_inputs(
    format: str, shape: Shape, dtype: torch.dtype, device: str, seed: int
) -> tuple[Any, ...]:
    M, N, K = shape
    weight = _random(N, K, dtype=torch.float32, device=device, seed=seed) * 0.05
    quantized = reference.quantize(weight, format)
    x = _random(M, K, dtype=dtype, device=device, seed=seed + 1)
    return x, quantized, _random(N, dtype=dtype, device=device, seed=seed + 2)


def _packed(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    x, weight, bias = arguments
    return x, pack(weight), bias


def _weight_inputs(
    format: str, shape: Shape, dtype: torch.dtype, device: str, seed: int
) -> tuple[Any, ...]:
    weight = _random(*shape, dtype=torch.float32, device=device, seed=seed)
    return reference.quantize(weight, format), dtype


def _dense_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Any, ...]:
    weight = _random(*shape, dtype=dtype, device=device, seed=seed)
    weight[0, :32] = 0.0
    return (weight,)


def _quantized(
    quantize: Callable[..., QuantizedWeight], format: str, weight: Tensor
) -> tuple[Tensor, ...]:
    """Return codes and block scales, the latter as bytes where they are bytes."""
    found = quantize(weight, format)
    scales = found.block_scales
    return found.codes, scales if scales.dtype == torch.float32 else scales.view(torch.uint8)


def _quantize_kernel(format: str, weight: Tensor) -> tuple[Tensor, ...]:
    from kernels import quantize

    return _quantized(quantize.quantize, format, weight)


quantize_nvfp4 = partial(_quantize_kernel, "nvfp4")
quantize_mxfp4 = partial(_quantize_kernel, "mxfp4")
quantize_nf4 = partial(_quantize_kernel, "nf4")


def _norm_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Any, ...]:
    H = shape[-1]
    gain = _random(H, dtype=dtype, device=device, seed=seed + 1)
    noise = _random(H, dtype=torch.float32, device=device, seed=seed + 2) * 0.01
    return _random(*shape, dtype=dtype, device=device, seed=seed), gain, 1e-6, noise


def _swiglu_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Any, ...]:
    return (_random(shape[0], 2 * shape[1], dtype=dtype, device=device, seed=seed),)


def _logprob_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Any, ...]:
    T, H, V = shape
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (T,), generator=generator).to(device)
    hidden = _random(T, H, dtype=dtype, device=device, seed=seed + 1)
    head = _random(V, H, dtype=torch.float32, device=device, seed=seed + 2) * H**-0.5 * 3
    return hidden, head.to(dtype), ids, 0.7


def _attention_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Any, ...]:
    B, S, Hq, Hkv, D = shape
    block_size = 16
    per_row = -(-S // block_size)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(B * per_row, generator=generator).view(B, per_row) + 1
    lengths = torch.randint(S // 2, S + 1, (B,), generator=generator)
    lengths[0] = S
    cache = (B * per_row + 1, block_size, Hkv, D)
    keys = _random(*cache, dtype=dtype, device=device, seed=seed + 1)
    values = _random(*cache, dtype=dtype, device=device, seed=seed + 2)
    # Nobody's block: what is read of it must not matter.
    keys[0] = values[0] = float("nan")
    q = _random(B, Hq, D, dtype=dtype, device=device, seed=seed + 3)
    return q, keys, values, table.int().to(device), lengths.int().to(device)


_LINEAR_SHAPES = ((1, 64, 256), (5, 333, 320), (16, 129, 640), (24, 272, 512), (150, 400, 1344))


def _linear_op(format: str, hopper: bool) -> Op:
    return Op(
        name=f"linear_{format}" if hopper else f"portable_linear_{format}",
        reference=reference.linear,
        kernel="kernels.linear:linear" if hopper else "kernels.portable_linear:linear",
        inputs=partial(_linear_inputs, format),
        # The portable kernels take 128 rows at most, one row without the matrix unit.
        shapes=_LINEAR_SHAPES if hopper else ((1, 70, 1088), *_LINEAR_SHAPES[:4], (100, 65, 320)),
        large=(8, 37888, 3584),
        nbytes=lambda s: s[1] * s[2] * 9 / 16 + 2 * s[0] * (s[1] + s[2]),
        flops=lambda s: 2 * s[0] * s[1] * s[2],
        interpretable=not hopper,
        hopper=hopper,
        prepare=_packed if hopper else _as_they_are,
    )


OPS: tuple[Op, ...] = (
    *(_linear_op(format, hopper) for format in FORMATS for hopper in (True, False)),
    *(
        Op(
            name=f"dequantize_{format}",
            reference=reference.dequantize,
            kernel="kernels.dequantize:dequantize",
            inputs=partial(_weight_inputs, format),
            shapes=((3, 64), (33, 320)),
            large=(37888, 3584),
            nbytes=lambda s: s[0] * s[1] * (2 + 9 / 16),
            flops=lambda s: s[0] * s[1],
            exact=True,
        )
        for format in FORMATS
    ),
    *(
        Op(
            name=f"quantize_{format}",
            reference=partial(_quantized, reference.quantize, format),
            kernel=f"kernels.ops:quantize_{format}",
            inputs=_dense_inputs,
            shapes=((3, 64), (33, 320)),
            large=(37888, 3584),
            nbytes=lambda s: s[0] * s[1] * (2 + 9 / 16),
            flops=lambda s: s[0] * s[1],
            exact=True,
        )
        for format in FORMATS
    ),
    Op(
        name="rms_norm",
        reference=reference.rms_norm,
        kernel="kernels.rms_norm:rms_norm",
        inputs=_norm_inputs,
        shapes=((1, 64), (7, 100), (3, 2, 896)),
        large=(8192, 3584),
        nbytes=lambda s: 4 * s[0] * s[1],
        flops=lambda s: 4 * s[0] * s[1],
    ),
    Op(
        name="swiglu",
        reference=reference.swiglu,
        kernel="kernels.swiglu:swiglu",
        inputs=_swiglu_inputs,
        shapes=((1, 64), (5, 1100)),
        large=(4096, 18944),
        nbytes=lambda s: 6 * s[0] * s[1],
        flops=lambda s: 5 * s[0] * s[1],
    ),
    Op(
        name="token_logprobs",
        reference=reference.token_logprobs,
        kernel="kernels.logprobs:token_logprobs",
        inputs=_logprob_inputs,
        shapes=((5, 64, 5000), (17, 32, 300)),
        large=(2048, 3584, 152064),
        nbytes=lambda s: 2 * (s[0] * s[1] + s[1] * s[2]) + 8 * s[0] * s[2],
        flops=lambda s: 2 * s[0] * s[1] * s[2],
    ),
    Op(
        name="decode_attention",
        reference=reference.decode_attention,
        kernel="kernels.attention:decode_attention",
        inputs=_attention_inputs,
        shapes=((3, 100, 8, 2, 32), (2, 17, 7, 1, 64)),
        large=(64, 2048, 28, 4, 128),
        nbytes=lambda s: 4 * s[0] * s[1] * s[3] * s[4],
        flops=lambda s: 4 * s[0] * s[1] * s[2] * s[4],
    ),
)
