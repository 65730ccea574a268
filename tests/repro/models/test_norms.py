"""PerturbableRMSNorm is transformers' norm when off, and the paper's Eq. 10 when on."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from repro.models.norms import PerturbableRMSNorm, block_norms, final_norm, wrap_norms


@pytest.mark.parametrize("norm_class", [Qwen2RMSNorm, Qwen3RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_without_noise_is_bit_equal_to_transformers(norm_class, dtype):
    generator = torch.Generator().manual_seed(0)
    norm = norm_class(96, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(96, generator=generator) * 3)
    x = (torch.randn(4, 7, 96, generator=generator) * 5).to(dtype)
    assert torch.equal(PerturbableRMSNorm(norm)(x), norm(x))


def test_noise_is_added_to_the_gain_and_never_written_to_it():
    generator = torch.Generator().manual_seed(1)
    norm = Qwen2RMSNorm(32, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(32, generator=generator))
    before = norm.weight.detach().clone()
    wrapped = PerturbableRMSNorm(norm)
    noise = torch.randn(32, generator=generator) * 0.01
    x = torch.randn(5, 32, generator=generator)
    wrapped.noise = noise
    perturbed = wrapped(x)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (before.double() + noise.double()) * exact
    torch.testing.assert_close(perturbed.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(wrapped.weight, before)
    assert wrapped.weight is norm.weight
    wrapped.noise = None
    assert torch.equal(wrapped(x), norm(x))


def test_wrapping_keeps_names_parameters_and_logits(folder, token_ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    names = list(model.state_dict())
    before = model(input_ids=token_ids).logits
    wrapped = wrap_norms(model)
    assert len(wrapped) == 2 * 2 + 1
    assert list(model.state_dict()) == names
    assert torch.equal(model(input_ids=token_ids).logits, before)
    assert list(block_norms(model)) == [
        f"model.layers.{layer}.{norm}"
        for layer in (0, 1)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    assert final_norm(model) is model.model.norm


def test_wrapping_twice_raises(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(TypeError, match="call wrap_norms first"):
        block_norms(model)
    wrap_norms(model)
    with pytest.raises(ValueError, match="no norm left to wrap"):
        wrap_norms(model)
