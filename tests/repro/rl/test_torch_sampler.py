"""The plain sampler against transformers and the trainer's own forward pass."""

from __future__ import annotations

import pytest
import torch

from repro.models.norms import block_norms
from repro.rl.rows import make_rows
from repro.rl.single_run.torch_sampler import TorchSampler
from repro.spec.config import SamplingConfig
from tests.repro.rl.uneven_rows import plain_logprobs
from tests.repro.rollout.conftest import prompts_of, random_policy, tokens_of

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=64)
SAMPLED = SamplingConfig(temperature=0.7, max_new_tokens=40)
PROMPTS = prompts_of([5, 1, 17])


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("noisy", [False, True])
def test_sampled_logprobs_equal_the_trainers(architecture: str, noisy: bool) -> None:
    policy = random_policy(architecture, "nvfp4")
    if noisy:
        for seed, norm in enumerate(block_norms(policy.model).values()):
            generator = torch.Generator().manual_seed(seed)
            norm.noise = 0.2 * torch.randn(norm.weight.shape, generator=generator)
    batch = TorchSampler(policy).sample(PROMPTS, SAMPLED, group_size=3, seeds=range(9))
    rows = make_rows(PROMPTS, batch.completions, group_size=3)
    with torch.no_grad():
        expected, _ = plain_logprobs(policy, rows, SAMPLED.temperature)
    assert (rows.sampled_logprobs - expected).abs().max() < 2e-4
    assert expected[rows.mask].std() > 0.3


def test_refresh_takes_up_trained_weights_and_nothing_else_does() -> None:
    policy = random_policy()
    sampler = TorchSampler(policy)

    def sample(source: TorchSampler = sampler) -> list[tuple[int, ...]]:
        return tokens_of(source.sample(PROMPTS, SAMPLED, group_size=1, seeds=range(3)))

    before = sample()
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-3.0)
    assert sample() == before
    sampler.refresh()
    assert sample() == sample(TorchSampler(policy)) != before


def test_logits_that_are_not_finite_name_the_layer() -> None:
    policy = random_policy(rank=0)
    with torch.no_grad():
        policy.decoder.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 5] = torch.nan
    with pytest.raises(FloatingPointError, match=r"after prompt 0 .* model\.layers\.1's"):
        TorchSampler(policy).sample(PROMPTS, SAMPLED, group_size=2, seeds=range(6))


def test_a_fault_that_comes_with_a_token_names_its_place() -> None:
    policy = random_policy(rank=0)
    sampler = TorchSampler(policy)
    (tokens,) = tokens_of(sampler.sample([[3, 4]], GREEDY, group_size=1, seeds=[0]))
    # The first token that is not in the prompt, once it is fed back.
    place = next(i for i, token in enumerate(tokens) if token not in (3, 4))
    with torch.no_grad():
        policy.decoder.get_parameter("model.embed_tokens.weight")[tokens[place]] = torch.inf
    sampler.refresh()
    with pytest.raises(FloatingPointError, match=rf"new token {place} are not finite.*embedding"):
        sampler.sample([[3, 4]], GREEDY, group_size=1, seeds=[0])
