"""The sampler against transformers and the trainer's own forward pass, and row by row."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from repro.data.generator import generate_problems
from repro.data.tiny_corpus import tiny_prompt
from repro.models.norms import block_norms
from repro.models.policy import load_policy
from repro.rl.rows import make_rows
from repro.rl.single_run.torch_sampler import TorchSampler
from repro.spec.config import SamplingConfig
from tests.repro.rl.uneven_rows import plain_logprobs

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=72)
SAMPLED = SamplingConfig(temperature=1.0, max_new_tokens=40)


def generated(model, prompts, max_new_tokens):
    """Return transformers' own greedy tokens, prompt by prompt, end token included."""
    rows = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        rows.append(out[0, len(prompt) :].tolist())
    return rows


def tokens_of(batch):
    return [list(completion.token_ids) for completion in batch.completions]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_greedy_equals_transformers_generate_token_for_token(
    make_policy, random_folder, prompts, architecture
):
    # No adapter and transformers' own loading: nothing of ours is on the other side.
    policy = make_policy(architecture, training="none")
    stock = AutoModelForCausalLM.from_pretrained(random_folder(architecture), dtype=torch.float32)
    batch = TorchSampler(policy).sample(prompts, GREEDY, group_size=1, seeds=range(len(prompts)))
    expected = generated(stock.eval(), prompts, GREEDY.max_new_tokens)
    assert tokens_of(batch) == expected
    assert max(map(len, expected)) >= 64
    assert len({tuple(row) for row in expected}) == len(prompts)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("noisy", [False, True])
def test_sampled_logprobs_equal_the_trainer_s(
    make_policy, prompts, architecture, temperature, noisy
):
    policy = make_policy(architecture, "nvfp4")
    if noisy:
        for seed, norm in enumerate(block_norms(policy.model).values()):
            generator = torch.Generator().manual_seed(seed)
            norm.noise = 0.2 * torch.randn(norm.weight.shape, generator=generator)
    sampling = dataclasses.replace(SAMPLED, temperature=temperature)
    batch = TorchSampler(policy).sample(prompts, sampling, group_size=3, seeds=range(15))
    rows = make_rows(prompts, batch.completions, group_size=3, end_token_ids={100})
    with torch.no_grad():
        expected, _ = plain_logprobs(policy, rows, temperature)
    assert (rows.sampled_logprobs - expected).abs().max() < 1e-4
    assert expected[rows.mask].std() > 0.3


def test_refresh_takes_up_trained_weights_and_nothing_else_does(make_policy, prompts):
    policy = make_policy()
    sampler = TorchSampler(policy)
    before = tokens_of(sampler.sample(prompts, SAMPLED, group_size=1, seeds=range(5)))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-3.0)
    assert tokens_of(sampler.sample(prompts, SAMPLED, group_size=1, seeds=range(5))) == before
    sampler.refresh()
    after = tokens_of(sampler.sample(prompts, SAMPLED, group_size=1, seeds=range(5)))
    assert after != before
    assert after == tokens_of(
        TorchSampler(policy).sample(prompts, SAMPLED, group_size=1, seeds=range(5))
    )


def test_rows_stop_at_the_end_token_and_others_at_the_limit(make_policy, prompts):
    policy = make_policy(training="none")
    with torch.no_grad():
        policy.decoder.get_input_embeddings().weight[100].mul_(2.5)
    sampler = TorchSampler(policy)
    batch = sampler.sample(prompts, SAMPLED, group_size=8, seeds=range(40))
    reasons = [completion.finish_reason for completion in batch.completions]
    assert set(reasons) == {"stop", "length"}
    for completion in batch.completions:
        ended = completion.token_ids[-1] == 100
        assert ended == (completion.finish_reason == "stop")
        assert 100 not in completion.token_ids[:-1]
        assert ended or len(completion.token_ids) == SAMPLED.max_new_tokens
        assert len(completion.sampled_logprobs) == len(completion.token_ids)
    assert batch.group(2) == batch.completions[16:24]


def test_logits_that_are_not_finite_name_the_layer(make_policy, prompts):
    policy = make_policy(training="none")
    with torch.no_grad():
        policy.decoder.model.layers[1].mlp.down_proj.weight[3, 5] = torch.nan
    with pytest.raises(FloatingPointError, match=r"after prompt 0 .* model\.layers\.1's"):
        TorchSampler(policy).sample(prompts, SAMPLED, group_size=2, seeds=range(10))


def test_a_fault_that_comes_with_a_token_names_its_place(make_policy):
    policy = make_policy(training="none")
    sampler = TorchSampler(policy)
    tokens = tokens_of(sampler.sample([[3, 4]], GREEDY, group_size=1, seeds=[0]))[0]
    # The first token that is not in the prompt, once it is fed back.
    place = next(i for i, token in enumerate(tokens) if token not in (3, 4))
    with torch.no_grad():
        untied = policy.decoder.model.embed_tokens.weight.clone()
        untied[tokens[place]] = torch.inf
        policy.decoder.lm_head.weight = torch.nn.Parameter(policy.decoder.lm_head.weight.clone())
        policy.decoder.model.embed_tokens.weight = torch.nn.Parameter(untied)
    sampler.refresh()
    with pytest.raises(FloatingPointError, match=rf"new token {place} are not finite.*embedding"):
        sampler.sample([[3, 4]], GREEDY, group_size=1, seeds=[0])


def test_the_tiny_policy_in_the_package_answers_as_transformers_has_it():
    policy = load_policy("tiny", weight_format="bf16")
    asked = generate_problems("test", 20)
    prompts = [policy.tokenizer(tiny_prompt(p.question))["input_ids"] for p in asked]
    greedy = SamplingConfig(temperature=0.0, max_new_tokens=64)
    batch = TorchSampler(policy).sample(prompts, greedy, group_size=1, seeds=range(20))
    assert tokens_of(batch) == generated(policy.decoder, prompts, 64)
    assert all(completion.finish_reason == "stop" for completion in batch.completions)
