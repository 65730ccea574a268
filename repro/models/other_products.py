"""Other ways to multiply by 4-bit weights, against which this project's kernels are measured.

`dequantised`
    As the released trainer does it: every pass turns a layer's codes into a dense matrix by plain
    torch operations and multiplies by that; autograd keeps the dense matrix for backward, and a
    block that is computed again is dequantised again. Rollouts are left to the engine's kernels,
    as the released code leaves them to its engine's.
`bitsandbytes`
    NF4 as people run QLoRA: bitsandbytes' own quantiser, kernels and backward pass, in trainer and
    rollouts alike, with the adapter beside it. Needs the package bitsandbytes.

Easy mistakes
-------------
* An engine rearranges the codes that a layer holds: what `dequantised` reads must be set aside
  before an engine is built.
* Counting memory with both our codes and bitsandbytes' on the device: ours are given up.
"""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import dispatch, reference
from kernels.formats import FORMATS, QuantizedWeight
from repro.models.decoder import causal_lm
from repro.models.quantized_linear import Product, QuantizedLinear
from repro.spec.step_scale import Linears


def dequantised_every_pass(codes: QuantizedWeight) -> Product:
    """Return a product that dequantises with plain torch at every call; autograd keeps W."""

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        with torch.no_grad():
            dense = reference.dequantize(codes, x.dtype)
        return functional.linear(x, dense, None if bias is None else bias.to(x.dtype))

    return product


def bitsandbytes_product(library: Any, dense: Tensor) -> Product:
    """Return a product by bitsandbytes' `matmul_4bit` with a dense weight, (N, K)."""
    block = FORMATS["nf4"].block
    packed, state = library.functional.quantize_4bit(dense, blocksize=block, quant_type="nf4")

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(x.dtype)
        return cast(Tensor, library.matmul_4bit(x, packed.t(), quant_state=state, bias=bias))

    return product


def missing_library(linears: str) -> str | None:
    """Return a sentence saying what a way of multiplying lacks on this machine, or None."""
    if linears != "bitsandbytes" or importlib.util.find_spec("bitsandbytes") is not None:
        return None
    return "needs the package bitsandbytes, which is not installed"


def take_products(model: nn.Module, linears: Linears, dtype: torch.dtype) -> None:
    """Let every 4-bit projection of `model` multiply as `linears` says, activations in `dtype`.

    `kernels` changes nothing; see the module docstring for the others.
    """
    if linears == "kernels":
        return
    for layer in [one for one in causal_lm(model).modules() if isinstance(one, QuantizedLinear)]:
        codes = layer.codes()
        if linears == "dequantised":
            layer.product = dequantised_every_pass(codes)
        else:
            library = importlib.import_module("bitsandbytes")
            layer.product = bitsandbytes_product(library, dispatch.dequantize(codes, dtype))
            # The weight's shape and format alone stay, once `product` holds its values.
            layer.weight, layer.fused = codes.to("meta"), None
