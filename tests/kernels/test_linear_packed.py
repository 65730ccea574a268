"""The linear layer over packed weights: its gradients, and errors that tell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels import dispatch, linear, reference
from kernels.hopper import Adapter
from kernels.packing import PackedWeight, pack

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)")


def _layer(N: int, K: int, seed: int = 0) -> tuple[Tensor, PackedWeight]:
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(N, K, device="cuda", generator=generator) * 0.05
    quantized = reference.quantize(weight, "nvfp4")
    return reference.dequantize(quantized), pack(quantized)


@pytest.mark.gpu
@hopper
def test_gradients_reach_x_the_bias_and_the_adapter(assertions: SimpleNamespace) -> None:
    N, K, M, rank = 272, 512, 70, 32
    dense, packed = _layer(N, K)
    values = {
        "x": torch.randn(M, K, device="cuda").bfloat16(),
        "A": torch.randn(rank, K, device="cuda") * 0.05,
        "B": torch.randn(N, rank, device="cuda") * 0.05,
        "bias": torch.randn(N, device="cuda"),
    }
    upstream = torch.randn(M, N, device="cuda").bfloat16()

    def grads(kind: str) -> tuple[Tensor, ...]:
        leaves = {k: v.clone().requires_grad_() for k, v in values.items()}
        x = leaves["x"].float() if kind == "exact" else leaves["x"]
        dtype = x.dtype
        if kind == "ours":
            y = dispatch.lora_linear(x, packed, leaves["A"], leaves["B"], 0.5, leaves["bias"])
        else:
            low = x @ leaves["A"].to(dtype).t() @ leaves["B"].to(dtype).t()
            y = x @ dense.to(dtype).t() + leaves["bias"].to(dtype) + 0.5 * low
        return torch.autograd.grad(y, tuple(leaves.values()), upstream.to(dtype))

    for name, actual, plain, exact in zip(
        values, grads("ours"), grads("plain"), grads("exact"), strict=True
    ):
        assertions.within_twice(actual, plain, exact, f"gradient of {name}")


def test_wrong_inputs_are_named() -> None:
    weight = pack(reference.quantize(torch.randn(32, 256), "nvfp4"))
    with pytest.raises(ValueError, match="last dimension is 255"):
        linear.packed_linear(torch.zeros(2, 255, dtype=torch.bfloat16), weight)
    with pytest.raises(ValueError, match="float32"):
        linear.packed_linear(torch.zeros(2, 256), weight)
    with pytest.raises(ValueError, match="on cpu"):
        linear.packed_linear(torch.zeros(2, 256, dtype=torch.bfloat16), weight)
    with pytest.raises(ValueError, match="rank is 24"):
        Adapter(a=torch.zeros(24, 256), b=torch.zeros(32, 24))
    with pytest.raises(ValueError, match="need 64"):
        Adapter(a=torch.zeros(32, 256), b=torch.zeros(32, 32), ends=(16,))
