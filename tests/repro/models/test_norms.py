"""Norms are wrapped by name, once; that one is transformers' when off is in test_policy."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from repro.models.norms import block_norms, final_norm, wrap_norms


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
