"""Which sampler a policy gets, and that it follows what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from repro.models.norms import block_norms
from repro.models.policy import load_policy
from repro.rollout.engine import Engine
from repro.rollout.engine_config import EngineConfig
from repro.rollout.for_policy import CopySampler, sampler_for
from repro.rollout.torch_sampler import TorchSampler
from repro.spec.config import SamplingConfig
from tests.repro.rl.conftest import score_by_text
from tests.repro.small_runs import train_alone

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; found none"
)


def test_on_a_cpu_a_policy_is_sampled_by_plain_torch(make_policy: Any, go: Any) -> None:
    policy = make_policy()
    assert isinstance(sampler_for(policy, rows=4, max_new_tokens=8, max_positions=64), TorchSampler)
    result, _, _ = go(steps=1)
    assert "micro_tokens" not in result.facts


def test_a_copy_for_the_engine_follows_masters_biases_and_noise(make_policy: Any) -> None:
    policy = make_policy(training="full", compute_dtype="float32")
    config = EngineConfig(slots=2, max_positions=64, max_new_tokens=8)
    sampler = CopySampler(policy, lambda copied: Engine(copied, config))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.2).add_(0.01)
    sampling = SamplingConfig(max_new_tokens=8)

    def logprobs(source: Any) -> Any:
        batch = source.sample([[5, 6, 7]], sampling, group_size=2, seeds=[1, 2])
        return [c.token_ids for c in batch.completions], torch.tensor(
            [v for c in batch.completions for v in c.sampled_logprobs]
        )

    before = logprobs(sampler)
    sampler.refresh()
    tokens, values = logprobs(sampler)
    expected_tokens, expected = logprobs(TorchSampler(policy))
    assert tokens == expected_tokens
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-4)
    assert before[0] != tokens or not torch.allclose(before[1], values, atol=1e-3)
    for norm in block_norms(policy.decoder).values():
        norm.noise = torch.full(norm.weight.shape, 0.5)
    _, noisy = logprobs(sampler)
    _, expected = logprobs(TorchSampler(policy))
    torch.testing.assert_close(noisy, expected, rtol=0, atol=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("weight_format", "training"), [("nvfp4", "lora"), ("bf16", "lora"), ("bf16", "full")]
)
def test_the_tiny_policy_trains_on_a_gpu_with_the_engine_and_both_agree(
    make_run: Any, problems: Any, tmp_path: Path,
    weight_format: Any, training: Any,
) -> None:  # fmt: skip
    run = make_run(
        weight_format=weight_format, training=training, compute_dtype="bfloat16",
        updates_per_rollout=2, lora_rank=16, max_prompt_tokens=256,
    )  # fmt: skip
    policy = load_policy(
        "tiny", weight_format=weight_format, training=training, lora_rank=16, lora_alpha=32.0,
        compute_dtype="bfloat16", seed=0, device="cuda",
    )  # fmt: skip
    sampler = sampler_for(policy, rows=12, max_new_tokens=6, max_positions=300)
    assert isinstance(sampler, CopySampler if training == "full" else Engine)
    result = train_alone(run, policy, sampler, problems, score_by_text, folder=tmp_path)
    assert result.finished
    assert result.step == 6
    # bfloat16 activations round; a stale adapter or a wrong position is off by far more.
    assert max(result.series["sampler_trainer_abs_diff_mean"]) < 0.05
    assert all(value > 0 for value in result.series["grad_norm"])
