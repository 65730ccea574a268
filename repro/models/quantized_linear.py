"""A linear layer whose weight is 4-bit codes and scales.

    y = x dequantize(W)^T + b

through `kernels.dispatch.linear`: a kernel that unpacks in registers where there is one, the plain
PyTorch reference elsewhere. The weight is frozen; gradients go to x only (and to adapters above).

Easy mistakes
-------------
* `model.to(torch.bfloat16)` casts every floating buffer, E4M3 block scales and the float32 global
  scale among them; that would change the weights in silence. `_apply` here moves, never casts.
* Keeping the dense weight beside the codes looks tempting, since the reference dequantises at
  every call. On one CPU core it saves 3 % of a training step (hidden size 128, 60 rows of 130
  tokens: 0.453 s against 0.466 s) and costs 32 bits per weight, so it is not done.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels import dispatch
from kernels.formats import QuantizedWeight
from kernels.packing import PackedWeight, unpack

# Another way to multiply by a layer's weight, to be compared with this project's: of x and a bias
# it returns x W^T + b, (..., N), in x's dtype.
Product = Callable[[Tensor, Tensor | None], Tensor]


class QuantizedLinear(nn.Module):
    """Frozen linear layer over the codes and scales of an (N, K) weight.

    `weight` is codes and scales, or the same as the kernels keep them; `fused` is the matrix, if
    any, of which it is a view. The bias, (N,) or None, keeps its dtype. `product` multiplies
    instead of `kernels.dispatch` where it is not None (`repro.models.other_products`).
    """

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        N, K = weight.shape
        if bias is not None and bias.shape != (N,):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; the weight needs ({N},)")
        self.out_features, self.in_features = N, K
        self.weight: QuantizedWeight | PackedWeight = weight
        self.fused: PackedWeight | QuantizedWeight | None = None
        self.product: Product | None = None
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    def codes(self) -> QuantizedWeight:
        """Return codes and scales in the checkpoint's layout, rebuilt (exactly) if packed."""
        return unpack(self.weight) if isinstance(self.weight, PackedWeight) else self.weight

    @property
    def qweight(self) -> Tensor:
        """The packed codes, under the name by which peft finds a quantised base's device."""
        weight = self.weight
        return weight.packs if isinstance(weight, PackedWeight) else weight.codes

    @property
    def weight_format(self) -> str:
        """`nvfp4`, `mxfp4` or `nf4`."""
        return self.weight.format

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.weight.device

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, (..., N), in x's dtype."""
        if self.product is not None:
            return self.product(x, self.bias)
        return dispatch.linear(x, self.weight, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        # Codes are integers, so `fn` moves them without a cast; the scales follow their device.
        device = fn(self.qweight[:0]).device
        if device != self.device:
            if isinstance(self.weight, PackedWeight):
                raise TypeError(
                    f"the packed weight is part of a fused matrix on {self.device}; it cannot go "
                    f"to {device}"
                )
            self.weight, self.fused = self.weight.to(device), None
        super()._apply(fn, recurse)
        return self


def relative_error(dense: Tensor, quantized: QuantizedWeight) -> float:
    """Return ||W - dequantize(Q(W))||_F / ||W||_F, in float32; 0 for an all-zero weight."""
    reference = dense.to(torch.float32)
    norm = float(torch.linalg.vector_norm(reference))
    if norm == 0.0:
        return 0.0
    difference = dispatch.dequantize(quantized, torch.float32).sub_(reference)
    return float(torch.linalg.vector_norm(difference)) / norm
