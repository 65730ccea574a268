"""Gradients of the packed linear layer, with plain PyTorch in the kernels' place, on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernels import linear_autograd, reference
from kernels.hopper import Adapter
from kernels.packing import PackedWeight, pack, unpack

N, K, M, RANK = 48, 256, 10, 16
Leaves = dict[str, Tensor]


@pytest.fixture(scope="module")
def packed() -> PackedWeight:
    generator = torch.Generator().manual_seed(0)
    return pack(reference.quantize(torch.randn(N, K, generator=generator) * 0.05, "nvfp4"))


@pytest.fixture(scope="module")
def dense(packed: PackedWeight) -> Tensor:
    return reference.dequantize(unpack(packed))


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, packed: PackedWeight, dense: Tensor) -> None:
    """Multiply by the dense weight, once it is sure that the packed one was handed on whole."""

    def known(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        assert (weight.format, weight.shape) == (packed.format, packed.shape)
        assert torch.equal(weight.packs, packed.packs)
        assert torch.equal(weight.gain, packed.gain)
        assert torch.equal(weight.extras["encode_scale"], packed.extras["encode_scale"])
        return dense.to(dtype)

    def product(
        x: Tensor, weight: PackedWeight, bias: Tensor | None = None, adapter: Adapter | None = None
    ) -> Tensor:
        y = functional.linear(x, known(weight, x.dtype), bias)
        return y if adapter is None else y + adapter.scaling * (x @ adapter.a.t() @ adapter.b.t())

    monkeypatch.setattr(linear_autograd, "packed_linear", product)
    monkeypatch.setattr(
        linear_autograd, "grad_input", lambda grad, weight: grad @ known(weight, grad.dtype)
    )


def leaves(*, frozen: tuple[str, ...] = ()) -> Leaves:
    generator = torch.Generator().manual_seed(1)
    shapes = {"x": (2, M // 2, K), "bias": (N,), "A": (RANK, K), "B": (N, RANK)}
    by_name = {
        name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()
    }
    # Masters in float32, as in training; x is bfloat16.
    by_name["x"] = by_name["x"].bfloat16()
    return {name: value.requires_grad_(name not in frozen) for name, value in by_name.items()}


def gradients(given: Leaves, y: Tensor) -> Leaves:
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return {name: value.grad for name, value in given.items() if value.grad is not None}


def adapted(given: Leaves, packed: PackedWeight) -> Tensor:
    return linear_autograd.lora_linear(
        given["x"], packed, given["A"], given["B"], 0.5, given["bias"]
    )


def test_gradients_are_those_of_plain_autograd(packed: PackedWeight, dense: Tensor) -> None:
    given, plain = leaves(), leaves()
    computed = gradients(given, adapted(given, packed))
    x = plain["x"].float()
    expected = gradients(
        plain,
        functional.linear(x, dense, plain["bias"]) + 0.5 * (x @ plain["A"].t() @ plain["B"].t()),
    )
    assert computed.keys() == expected.keys() == given.keys()
    for name, value in expected.items():
        assert computed[name].dtype == given[name].dtype, name
        error = (computed[name].float() - value.float()).norm() / value.float().norm()
        assert error < 0.01, name  # bfloat16


@pytest.mark.parametrize("frozen", [("x",), ("A", "B"), ("bias", "A")])
def test_a_frozen_leaf_changes_no_other_gradient(
    packed: PackedWeight, frozen: tuple[str, ...]
) -> None:
    given, part = leaves(), leaves(frozen=frozen)
    expected = gradients(given, adapted(given, packed))
    computed = gradients(part, adapted(part, packed))
    assert computed.keys() == expected.keys() - set(frozen)
    for name, value in computed.items():
        assert torch.equal(value, expected[name]), name


def test_a_checkpointed_layer_without_adapter_has_the_same_gradient(packed: PackedWeight) -> None:
    given, again = leaves(), leaves()
    plain = gradients(given, linear_autograd.linear(given["x"], packed, given["bias"]))
    y = checkpoint(linear_autograd.linear, again["x"], packed, again["bias"], use_reentrant=False)
    replayed = gradients(again, y)
    assert plain.keys() == replayed.keys() == {"x", "bias"}
    for name, value in plain.items():
        assert torch.equal(replayed[name], value), name


def test_without_gradients_nothing_is_kept(packed: PackedWeight) -> None:
    with torch.no_grad():
        y = adapted(leaves(), packed)
    assert y.grad_fn is None
    assert y.shape == (2, M // 2, N)
