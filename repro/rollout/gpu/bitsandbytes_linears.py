"""NF4 projections multiplied by bitsandbytes' own kernel: what QLoRA's users have.

Only the product by the 4-bit weight is bitsandbytes': one call per projection, as its `Linear4bit`
makes it. The adapter, attention, captured steps and the draw are the engine's, so that an arm on
these products differs from one on this project's by the kernel alone (and is faster than
transformers with bitsandbytes, whose steps are not captured).

Easy to get wrong: bitsandbytes keeps the even element in the high half of a byte, this project in
the low half; read the wrong way, a product is plausible and false.

bitsandbytes is an optional extra, imported here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.formats import swap_nibbles
from repro.models.lora import base_linear
from repro.models.quantized_linear import QuantizedLinear
from repro.rollout.gpu.fused_linears import Factors
from repro.rollout.linears import Product
from repro.spec.checks import require


class BitsandbytesGroup:
    """NF4 projections that share an input, each by `bitsandbytes.matmul_4bit`.

    Raises `ImportError` when bitsandbytes is not installed; `ValueError` when a projection is not
    NF4.
    """

    road = "bitsandbytes"

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        bases = [base_linear(module) for module in modules]
        self._weights = [_foreign(base) for base in bases]
        self._biases = [cast(Any, base).bias for base in bases]
        self._factors = Factors(modules, torch.bfloat16)

    def __call__(self, x: Tensor) -> Product:
        """Return (M, N1 + N2 + ...), the adapter's share still to be added."""
        import bitsandbytes

        parts = [
            bitsandbytes.matmul_4bit(x, codes.t(), state, bias=bias)
            for (codes, state), bias in zip(self._weights, self._biases, strict=True)
        ]
        base = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        factors = self._factors
        if factors.a is None:
            return Product(base=base)
        return factors.product(base, functional.linear(x, factors.a))

    def refresh(self) -> None:
        """Take up the adapters as they are now, in place."""
        self._factors.refresh()


def _foreign(base: nn.Module) -> tuple[Tensor, Any]:
    """Return NF4 codes, (N * K / 2, 1), uint8, and a `QuantState`, as bitsandbytes keeps them."""
    kind = base.weight_format if isinstance(base, QuantizedLinear) else type(base).__name__
    require(kind == "nf4", f"products by bitsandbytes need NF4 codes; found {kind}")
    from bitsandbytes.functional import QuantState, get_4bit_type

    weight = cast(QuantizedLinear, base).codes()
    codes = swap_nibbles(weight.codes)
    state = QuantState(
        absmax=weight.block_scales.reshape(-1),
        shape=torch.Size(weight.shape),
        code=get_4bit_type("nf4", device=codes.device),
        blocksize=weight.block,
        quant_type="nf4",
        dtype=torch.bfloat16,
    )
    return codes.reshape(-1, 1), state
