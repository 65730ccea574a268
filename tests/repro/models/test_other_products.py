"""Other products multiply by the same weights, with the same gradients, their own way."""

import pytest
import torch

from kernels import dispatch
from repro.models import other_products
from repro.models.lora import adapter_layers, base_linear
from repro.models.other_products import missing_library, take_products
from repro.models.random_policy import random_policy
from tests.repro.architectures import qwen2_shape

SHAPE = qwen2_shape(64)


def make(weight_format):
    return random_policy(
        SHAPE, weight_format=weight_format, lora_rank=16, compute_dtype="float32", seed=0,
        device="cpu",
    )  # fmt: skip


def logits_and_gradients(policy):
    logits = policy.model(torch.arange(24).view(2, 12)).logits
    logits.square().mean().backward()
    gradients = {
        n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None
    }
    return logits.detach(), gradients


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("linears", "weight_format"),
    [("dequantised", "nvfp4"), ("dequantised", "mxfp4"), ("bitsandbytes", "nf4")],
)
def test_logits_and_gradients_are_those_of_the_kernels(linears, weight_format, packed, monkeypatch):
    if linears == "bitsandbytes":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed here")
    expected, gradients = logits_and_gradients(make(weight_format))
    # As where the device's kernels read packed weights.
    monkeypatch.setattr(dispatch, "reads_packed", lambda device, dtype: packed)
    policy = make(weight_format)
    take_products(policy.model, linears, torch.float32)
    bases = [base_linear(layer) for _, layer in adapter_layers(policy.model)]
    assert all(base.product is not None for base in bases)
    logits, computed = logits_and_gradients(policy)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert computed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(computed[name], gradient, rtol=1e-3, atol=1e-6)
    for base in bases if linears == "bitsandbytes" else ():
        assert base.weight_format == "nf4"
        assert base.device.type == "meta"  # no second copy of the codes
        assert base.fused is None


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(other_products.importlib.util, "find_spec", lambda name: None)
    assert missing_library("dequantised") is None
    assert "not installed" in str(missing_library("bitsandbytes"))


def test_a_fully_trained_random_policy_has_float32_masters_under_autocast():
    policy = random_policy(
        SHAPE, weight_format="bf16", lora_rank=0, seed=0, device="cpu", full=True
    )
    assert policy.training == "full"
    assert all(p.dtype == torch.float32 and p.requires_grad for p in policy.model.parameters())
    assert policy.facts["compute"].startswith("bfloat16 by autocast")
    with pytest.raises(ValueError, match="needs bf16 and 0"):
        random_policy(SHAPE, weight_format="nf4", lora_rank=0, seed=0, device="cpu", full=True)
