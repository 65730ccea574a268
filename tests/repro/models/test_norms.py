"""PerturbableRMSNorm is transformers' norm when off; the paper's Eq. 10 is in rl/test_noise."""

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


def test_wrapping_keeps_names_and_is_done_once(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    names = list(model.state_dict())
    with pytest.raises(TypeError, match="call wrap_norms first"):
        block_norms(model)
    assert len(wrap_norms(model)) == 2 * 2 + 1
    assert list(model.state_dict()) == names
    assert list(block_norms(model)) == [
        f"model.layers.{layer}.{norm}"
        for layer in (0, 1)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    assert final_norm(model) is model.model.norm
    with pytest.raises(ValueError, match="no norm"):
        wrap_norms(model)
