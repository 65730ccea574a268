"""The linear layer over packed weights: adapters, gradients, capture, and errors that tell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels import linear, linear_autograd, reference
from kernels.hopper import Adapter
from kernels.packing import PackedWeight, pack

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)")


def _layer(N: int, K: int, seed: int = 0) -> tuple[Tensor, PackedWeight]:
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(N, K, device="cuda", generator=generator) * 0.05
    quantized = reference.quantize(weight, "nvfp4")
    return reference.dequantize(quantized), pack(quantized)


def _adapted(x: Tensor, dense: Tensor, adapter: Adapter) -> Tensor:
    """Return the sum of base and adapter, each projection by its own, in x's type."""
    y = x @ dense.to(x.dtype).t()
    rank = adapter.b.shape[1]
    edges = (0, *adapter.ends, dense.shape[0])
    for i in range(len(edges) - 1):
        z = x @ adapter.a[i * rank : (i + 1) * rank].to(x.dtype).t()
        own = slice(edges[i], edges[i + 1])
        y[:, own] += adapter.scaling * (z @ adapter.b[own].to(x.dtype).t())
    return y


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("M", [1, 8, 24, 33, 100, 300])
@pytest.mark.parametrize(("rank", "ends"), [(32, ()), (16, (512, 640)), (48, (512,)), (128, ())])
def test_an_adapter_is_added(
    M: int, rank: int, ends: tuple[int, ...], assertions: SimpleNamespace
) -> None:
    N, K = 768, 512
    dense, packed = _layer(N, K)
    generator = torch.Generator("cuda").manual_seed(1)
    a = torch.randn(rank * (len(ends) + 1), K, device="cuda", generator=generator) * 0.05
    b = torch.randn(N, rank, device="cuda", generator=generator) * 0.05
    adapter = Adapter(a=a.bfloat16(), b=b.bfloat16(), ends=ends, scaling=2.0)
    x = torch.randn(M, K, device="cuda", generator=generator).bfloat16()
    exact = _adapted(x.float(), dense, adapter)
    ours = linear.packed_linear(x, packed, adapter=adapter)
    assertions.within_twice(ours, _adapted(x, dense, adapter), exact, f"M {M}, rank {rank}")


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
            y = linear_autograd.lora_linear(
                x, packed, leaves["A"], leaves["B"], 0.5, leaves["bias"]
            )
        else:
            low = x @ leaves["A"].to(dtype).t() @ leaves["B"].to(dtype).t()
            y = x @ dense.to(dtype).t() + leaves["bias"].to(dtype) + 0.5 * low
        return torch.autograd.grad(y, tuple(leaves.values()), upstream.to(dtype))

    for name, actual, plain, exact in zip(
        values, grads("ours"), grads("plain"), grads("exact"), strict=True
    ):
        assertions.within_twice(actual, plain, exact, f"gradient of {name}")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("M", [1, 16, 64, 200])
def test_a_captured_call_repeats_the_eager_one(M: int, assertions: SimpleNamespace) -> None:
    _, packed = _layer(512, 1024)
    x = torch.randn(M, 1024, device="cuda").bfloat16()
    eager = linear.packed_linear(x, packed)
    out = torch.zeros_like(eager)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        linear.packed_linear(x, packed, out=out)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            linear.packed_linear(x, packed, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assertions.bitwise(out, eager, "replay")


@pytest.mark.gpu
@hopper
def test_strided_and_misaligned_rows_are_taken(assertions: SimpleNamespace) -> None:
    _, packed = _layer(128, 256)
    wide = torch.randn(9, 300, device="cuda").bfloat16()
    for start in (0, 3, 8):
        x = wide[:, start : start + 256]
        assertions.bitwise(
            linear.packed_linear(x, packed), linear.packed_linear(x.contiguous(), packed)
        )


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
