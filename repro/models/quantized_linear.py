"""A linear layer whose weight is 4-bit codes and scales, and the replacement of dense ones by it.

    y = x dequantize(W)^T + b

through `kernels.dispatch.linear`: a kernel that unpacks in registers where there is one, the plain
PyTorch reference elsewhere. The weight is frozen; gradients go to x only (and to adapters above).

Easy mistakes
-------------
* `model.to(torch.bfloat16)` casts every floating buffer, E4M3 block scales and the float32 global
  scale among them; that would change the weights in silence. `_apply` here moves, never casts.
* The reference dequantises the weight at every call, as the released code does. On one CPU core
  that is a third of a small model's training step or more, so a CPU policy may keep the dense
  float32 weight beside the codes (`dense_cache`): memory for time, 32 bits a weight, off for
  anything large. Outputs are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import dispatch
from kernels.formats import QuantizedWeight
from repro.models.decoder import causal_lm, fused_members, is_projection


class QuantizedLinear(nn.Module):
    """Frozen linear layer over a `QuantizedWeight`.

    Parameters
    ----------
    weight
        Codes and scales of an (N, K) weight.
    bias
        (N,) or None, kept in the dtype given.
    dense_cache
        Keep the dense float32 weight too, made at the first call: 4 N K bytes.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: nn.Parameter | None, *, dense_cache: bool = False
    ) -> None:
        super().__init__()
        N, K = weight.shape
        if bias is not None and bias.shape != (N,):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; the weight needs ({N},)")
        self.out_features, self.in_features = N, K
        self._weight = weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)
        self._dense: Tensor | None = None
        self.dense_cache = dense_cache

    @property
    def weight(self) -> QuantizedWeight:
        """The codes and scales."""
        return self._weight

    @property
    def qweight(self) -> Tensor:
        """The packed codes, under the name by which peft finds a quantised base's device."""
        return self._weight.codes

    @property
    def weight_format(self) -> str:
        """`nvfp4`, `mxfp4` or `nf4`."""
        return self._weight.format

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self._weight.device

    @property
    def dense(self) -> Tensor | None:
        """The cached dense weight, (N, K), float32; None when caching is off."""
        if not self.dense_cache:
            return None
        if self._dense is None:
            self._dense = dispatch.dequantize(self._weight, torch.float32)
        return self._dense

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dense weight, (N, K); callers must not write to it (it may be the cache)."""
        dense = self.dense
        return dispatch.dequantize(self._weight, dtype) if dense is None else dense.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, (..., N), in x's dtype."""
        dense = self.dense if x.dtype == torch.float32 else None
        if dense is None:
            return dispatch.linear(x, self._weight, self.bias)
        return functional.linear(x, dense, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        # Codes are integers, so `fn` moves them without a cast; the scales follow their device.
        device = fn(self._weight.codes).device
        if device != self.device:
            self._weight = self._weight.to(device)
            self._dense = None
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """Show the shape and the format."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"format={self.weight_format}, bias={self.bias is not None}, "
            f"dense_cache={self.dense_cache}"
        )


@torch.no_grad()
def quantize_linears(model: nn.Module, weight_format: str) -> list[str]:
    """Replace the seven projections of every layer of a dense model in memory; return their names.

    For a model on disk `load_policy` does the same without ever holding it dense.

    Raises
    ------
    ValueError
        When no dense projection is there, so that nothing would change.
    """
    decoder = causal_lm(model)
    dense = {
        name: module
        for name, module in decoder.named_modules()
        if is_projection(name) and isinstance(module, nn.Linear)
    }
    if not dense:
        raise ValueError(
            f"{type(decoder).__name__} has no dense projection to quantise to {weight_format}"
        )
    rounded = {name: module.weight.to(torch.bfloat16) for name, module in dense.items()}
    for name, module in dense.items():
        scale = None
        if weight_format == "nvfp4":
            scale = dispatch.shared_global_scale([rounded[n] for n in fused_members(name)])
        quantized = dispatch.quantize(rounded[name], weight_format, global_scale=scale)
        bias = module.bias
        if bias is not None:
            bias.requires_grad_(False)
        decoder.set_submodule(name, QuantizedLinear(quantized, bias))
    return list(dense)


def relative_error(dense: Tensor, quantized: QuantizedWeight) -> float:
    """Return ||W - dequantize(Q(W))||_F / ||W||_F, in float32; 0 for an all-zero weight."""
    reference = dense.to(torch.float32)
    norm = float(torch.linalg.vector_norm(reference))
    if norm == 0.0:
        return 0.0
    difference = dispatch.dequantize(quantized, torch.float32).sub_(reference)
    return float(torch.linalg.vector_norm(difference)) / norm
