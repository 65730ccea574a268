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

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference, reference_train
from kernels.formats import E8M0, FORMATS, QuantizedWeight
from kernels.packing import PackedWeight, unpack

# Names the kernels that serve: `portable`, or unset for the device's own.
ROAD = "REPRO_KERNELS"
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
P = ParamSpec("P")
Result = TypeVar("Result")


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


def _portable(tensor: Tensor, *others: object) -> bool:
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
        lossless = "lost_blocks" not in weight.extras or FORMATS[weight.format].scale_dtype != E8M0
        if weight.packs.is_cuda and dtype in _SIXTEEN_BITS and lossless:
            return _packed_dense(weight, dtype)
        weight = unpack(weight)
    if _portable(weight.codes):
        from kernels.triton import dequantize as portable

        return portable.dequantize(weight, dtype)
    return reference.dequantize(weight, dtype)


def _same_types(hidden: Tensor, lm_head_weight: Tensor, *others: object) -> bool:
    return _portable(hidden) and hidden.dtype == lm_head_weight.dtype


def _sixteen_bits(qkv: Tensor, *others: object) -> bool:
    return _portable(qkv) and qkv.dtype in _SIXTEEN_BITS


def _with_kernel(
    plain: Callable[P, Result], module: str, serves: Callable[..., bool] = _portable
) -> Callable[P, Result]:
    """Return what calls a module's kernel of the reference's name where that serves.

    `serves` is asked with the arguments by position.
    """

    @functools.wraps(plain)
    def chosen(*args: P.args, **named: P.kwargs) -> Result:
        if not serves(*args):
            return plain(*args, **named)
        kernels = importlib.import_module(f"kernels.triton.{module}")
        kernel: Callable[P, Result] = getattr(kernels, plain.__name__)
        return kernel(*args, **named)

    return chosen


shared_global_scale = reference.shared_global_scale
quantize = _with_kernel(reference.quantize, "quantize")
rms_norm = _with_kernel(reference.rms_norm, "rms_norm")
swiglu = _with_kernel(reference.swiglu, "swiglu")
projected = _with_kernel(reference_train.projected, "projections")
packed_attention = _with_kernel(reference_train.packed_attention, "packed_attention", _sixteen_bits)
token_logprobs = _with_kernel(reference.token_logprobs, "logprobs", _same_types)
