"""Weights for other forward passes: a snapshot beside live norms; samplers' tests run on them."""

from __future__ import annotations

import torch

from repro.models.norms import block_norms
from repro.models.policy import load_policy, trainable_parameters
from repro.models.policy_weights import policy_weights


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
