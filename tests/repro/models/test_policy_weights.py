"""A decoder written from `DecoderWeights` alone has the logits of the policy's model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from repro.models.norms import block_norms, final_norm, wrap_norms
from repro.models.policy import load_policy, trainable_parameters
from repro.models.policy_weights import DecoderWeights, policy_weights
from tests.repro.models.conftest import random_model


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def head_norm(x: torch.Tensor, gain: torch.Tensor | None, eps: float) -> torch.Tensor:
    if gain is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def lean_logits(w: DecoderWeights, ids: torch.Tensor) -> torch.Tensor:
    """Compute logits (B, T, V) from the fields of `w` and nothing else."""
    B, T = ids.shape
    h = w.embedding[ids]
    cos, sin = w.rotary(h, torch.arange(T)[None].expand(B, T))
    cos, sin = cos[:, None], sin[:, None]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    for layer in w.layers:
        n = layer.input_norm(h)
        q, k, v = (
            functional.linear(n, p.weight, p.bias).view(B, T, -1, w.head_dim).transpose(1, 2)
            for p in (layer.q, layer.k, layer.v)
        )
        q = rotate(head_norm(q, layer.q_norm, w.head_norm_eps), cos, sin)
        k = rotate(head_norm(k, layer.k_norm, w.head_norm_eps), cos, sin)
        assert q.shape[1] == w.query_heads
        assert k.shape[1] == w.key_heads
        k, v = (x.repeat_interleave(w.query_heads // w.key_heads, dim=1) for x in (k, v))
        scores = (q @ k.transpose(2, 3) * w.scaling).masked_fill(future, -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1)
        h = h + functional.linear(mixed, layer.o.weight, layer.o.bias)
        n = layer.post_norm(h)
        gate, up = (functional.linear(n, p.weight, p.bias) for p in (layer.gate, layer.up))
        h = h + functional.linear(w.activation(gate) * up, layer.down.weight, layer.down.bias)
    return w.final_norm(h) @ w.lm_head.T


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4", "nf4"])
@pytest.mark.parametrize("training", ["lora", "none", "full"])
def test_lean_decoder_has_the_logits_of_the_model(folder, token_ids, weight_format, training):
    if training == "full" and weight_format != "bf16":
        pytest.skip("full training is defined for bf16 weights only")
    policy = load_policy(
        folder, weight_format=weight_format, training=training, lora_rank=4, lora_alpha=8.0, seed=0
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for norm in [*block_norms(policy.model).values(), final_norm(policy.model)]:
            norm.noise = torch.randn(128, generator=generator) * 0.1
        expected = policy.model(input_ids=token_ids).logits
        logits = lean_logits(policy_weights(policy), token_ids)
        # Merging reorders float32 sums; wrong scaling or noise would be off by more than 0.1.
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        for norm in block_norms(policy.model).values():
            norm.noise = None
        assert float((policy.model(input_ids=token_ids).logits - expected).abs().max()) > 0.1


def test_weights_are_a_snapshot_and_norms_are_live(make_checkpoint):
    policy = load_policy(
        make_checkpoint("qwen2"),
        weight_format="nvfp4",
        training="lora",
        lora_rank=4,
        lora_alpha=4.0,
        seed=0,
    )
    before = policy_weights(policy)
    original = before.layers[0].q.weight.clone()
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(1.0)
    assert torch.equal(before.layers[0].q.weight, original)
    assert not torch.equal(policy_weights(policy).layers[0].q.weight, original)
    assert (
        before.layers[1].post_norm
        is block_norms(policy.model)["model.layers.1.post_attention_layernorm"]
    )
    assert before.lm_head is before.embedding


def test_sliding_windows_are_refused(make_checkpoint):
    changes: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    }
    policy = load_policy(make_checkpoint("qwen2"), weight_format="bf16")
    # Loading refuses such a checkpoint; a model that came otherwise is refused here.
    policy.model = random_model("qwen2", **changes)
    wrap_norms(policy.model)
    with pytest.raises(ValueError, match=r"model\.layers\.1 has a sliding window of 8"):
        policy_weights(policy)
