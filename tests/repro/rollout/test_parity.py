"""The float32 pass that engine and trainer are held against, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from repro.models.norms import block_norms
from repro.models.policy import Policy
from repro.rollout import parity
from repro.rollout.sampler import Completion, RolloutBatch

PROMPTS = [(5, 17, 42), (7, 1, 30, 2, 9)]
COMPLETIONS = [(3, 9, 12, 40), (8, 2), (1, 1, 64, 5, 6), (90,)]


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_logprobs_in_float32_are_the_policys_own_with_noise_and_adapter(
    make_policy: Callable[..., Policy],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    weight_format: str,
) -> None:
    policy = make_policy(architecture, weight_format)
    monkeypatch.setattr(parity, "_CHUNK", 3)
    for seed, norm in enumerate(block_norms(policy.decoder).values()):
        generator = torch.Generator().manual_seed(seed)
        noise = 0.2 * torch.randn(norm.weight.shape, generator=generator)
        monkeypatch.setattr(norm, "noise", noise)  # other tests have the same policy
    completions = [
        Completion(token_ids=tokens, sampled_logprobs=(0.0,) * len(tokens), finish_reason="length")
        for tokens in COMPLETIONS
    ]
    batch = RolloutBatch(prompt_ids=PROMPTS, completions=completions, group_size=2)
    before = {name: value.clone() for name, value in policy.decoder.named_parameters()}
    computed = parity.float32_logprobs(policy, batch, 0.7)
    model: Any = policy.model
    for row, tokens in enumerate(COMPLETIONS):
        prompt = PROMPTS[row // 2]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / 0.7).log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(computed[row], expected, rtol=0, atol=1e-4)
    assert all(torch.equal(p, before[name]) for name, p in policy.decoder.named_parameters())
