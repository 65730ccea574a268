"""Pick the implementation of each operation: a kernel where one fits, else the reference.

Models and trainers import operations from here only. Names, signatures and meaning are those of
`kernels.reference`; this is the only module that asks what the hardware is.

    CUDA, Hopper         packed weights: CUDA C++ (`kernels.cuda.linear`); all else Triton
    CUDA, from 8.0 on    Triton
    elsewhere            the reference

`reads_packed` says which form of a 4-bit weight the device's linear kernels read; whoever loads a
model packs it once (`kernels.packing.pack`). `linear` and `dequantize` take either form. Where the
Hopper kernels cannot be compiled, one warning says why and the portable path serves; with
`REPRO_KERNELS=portable` it serves on a Hopper GPU, too, as it would on another card.
"""

from __future__ import annotations

import os
import warnings
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference, reference_train
from kernels.formats import QuantizedWeight
from kernels.packing import PackedWeight, unpack
from kernels.reference import shared_global_scale
from kernels.reference_train import Before, Projections
from kernels.segments import Segments

__all__ = [
    "PackedWeight",
    "QuantizedWeight",
    "dequantize",
    "fuses_codes",
    "launches_overlap",
    "linear",
    "packed_attention",
    "projected",
    "quantize",
    "reads_packed",
    "rms_norm",
    "shared_global_scale",
    "swiglu",
    "token_logprobs",
]

# Names the kernels that serve: `portable`, or unset for the device's own.
ROAD = "REPRO_KERNELS"
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@lru_cache(maxsize=16)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def portable_forced() -> bool:
    """Tell whether `REPRO_KERNELS` keeps the Hopper kernels from serving; others raise."""
    road = os.environ.get(ROAD, "")
    if road not in ("", "portable"):
        raise ValueError(f"{ROAD} is {road!r}; needs to be `portable` or unset")
    return bool(road)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _serves(device: torch.device) -> bool:
    """Tell whether Triton kernels serve a device."""
    return device.type == "cuda" and _has_triton() and _capability(_index(device)) >= (8, 0)


def _portable(tensor: Tensor) -> bool:
    return _serves(tensor.device)


def launches_overlap(device: torch.device) -> bool:
    """Tell whether kernels may be launched before the one ahead has ended (from 9.0 on)."""
    return _capability(_index(device)) >= (9, 0) and not portable_forced()


@lru_cache(maxsize=16)
def _hopper(index: int) -> bool:
    """Tell whether the Hopper kernels compile and load on this device; if not, say why once."""
    if _capability(index)[0] != 9 or portable_forced():
        return False
    from kernels.cuda import compiler, driver

    files = ("fragments.cuh", "dequantize_packs.cu")
    try:
        driver.load(files, "dequantize_packs", (("FORMAT", 0), ("HALF", 0)), index)
    except (compiler.CompileError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        warnings.warn(f"Hopper kernels are off, Triton serves instead: {reason}", stacklevel=2)
        return False
    return True


def quantize(
    weight: Tensor,
    format: str,
    *,
    global_scale: Tensor | None = None,
    recipe: str = "float32",
) -> QuantizedWeight:
    """Quantise a weight matrix to 4 bits."""
    if _portable(weight):
        from kernels.triton import quantize as kernel

        return kernel.quantize(weight, format, global_scale=global_scale, recipe=recipe)
    return reference.quantize(weight, format, global_scale=global_scale, recipe=recipe)


def reads_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether the device's linear kernels read packed weights (`kernels.packing`).

    Hopper's do, for 16-bit activations; elsewhere codes are read as a checkpoint has them.
    """
    if device.type != "cuda" or dtype not in _SIXTEEN_BITS:
        return False
    return _hopper(_index(device))


def fuses_codes(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether projections that share an input are one matrix of codes on the device.

    So they are where Triton kernels multiply, from the checkpoint's layout.
    """
    return _serves(device) and dtype in _SIXTEEN_BITS and not reads_packed(device, dtype)


def _portable_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Multiply from the codes where rows are few, else by way of a dense W."""
    from kernels.triton import portable_linear

    rows = x.numel() // x.shape[-1]
    if x.dtype not in _SIXTEEN_BITS or portable_linear.goes_dense(weight, rows):
        return functional.linear(x, dequantize(weight, x.dtype), bias)
    return portable_linear.linear(x, weight, bias)


def _packed_product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    from kernels.cuda import linear as kernel

    return kernel.packed_linear(x, weight, bias)


def _packed_dense(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    from kernels.cuda import hopper

    return hopper.dequantize_packs(weight, dtype=dtype)


def linear(x: Tensor, weight: QuantizedWeight | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply by a quantised weight; gradients go to x and to the bias."""
    if isinstance(weight, PackedWeight):
        if x.is_cuda and x.dtype in _SIXTEEN_BITS:
            return reference.linear(x, weight, bias, product=_packed_product, dense=_packed_dense)
        return reference.linear(x, unpack(weight), bias)
    if _portable(x):
        return reference.linear(x, weight, bias, product=_portable_product, dense=dequantize)
    return reference.linear(x, weight, bias)


def dequantize(
    weight: QuantizedWeight | PackedWeight, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the dense matrix (N, K), computed in float32 and rounded once."""
    if isinstance(weight, PackedWeight):
        lossless = weight.format != "mxfp4" or "lost_blocks" not in weight.extras
        if weight.packs.is_cuda and dtype in _SIXTEEN_BITS and lossless:
            from kernels.cuda import hopper

            return hopper.dequantize_packs(weight, dtype=dtype)
        weight = unpack(weight)
    if _portable(weight.codes):
        from kernels.triton import dequantize as portable

        return portable.dequantize(weight, dtype)
    return reference.dequantize(weight, dtype)


def rms_norm(x: Tensor, gain: Tensor, eps: float, noise: Tensor | None = None) -> Tensor:
    """Normalise by the root mean square, with added noise on the gain (AQN) or without."""
    if _portable(x):
        from kernels.triton import rms_norm as kernel

        return kernel.rms_norm(x, gain, eps, noise)
    return reference.rms_norm(x, gain, eps, noise)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of the two halves of the last dimension."""
    if _portable(gate_up):
        from kernels.triton import swiglu as kernel

        return kernel.swiglu(gate_up)
    return reference.swiglu(gate_up)


def projected(
    x: Tensor,
    projections: Projections,
    a: Tensor | None,
    b: Tensor | None,
    gain: Tensor | None = None,
    before: Before = None,
) -> tuple[Tensor, Tensor]:
    """Multiply x, normed, gated or as it is, by projections with adapters; x comes back, too."""
    if _portable(x):
        from kernels.triton import projections as kernel

        return kernel.projected(x, projections, a, b, gain, before)
    return reference_train.projected(x, projections, a, b, gain, before)


def packed_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    segments: Segments,
    *,
    query_heads: int,
    scale: float,
) -> Tensor:
    """Rotate and attend inside each row of a packed pass; on a GPU one call whatever the rows."""
    if _portable(qkv) and qkv.dtype in _SIXTEEN_BITS:
        from kernels.triton import packed_attention as kernel

        return kernel.packed_attention(
            qkv, cos, sin, segments, query_heads=query_heads, scale=scale
        )
    return reference_train.packed_attention(
        qkv, cos, sin, segments, query_heads=query_heads, scale=scale
    )


def token_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    token_ids: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return logprob and entropy of the policy at each row, differentiable."""
    if _portable(hidden) and hidden.dtype == lm_head_weight.dtype:
        from kernels.triton import logprobs as kernel

        return kernel.token_logprobs(hidden, lm_head_weight, token_ids, temperature)
    return reference.token_logprobs(hidden, lm_head_weight, token_ids, temperature)
