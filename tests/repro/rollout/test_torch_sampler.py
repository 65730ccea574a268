"""The plain sampler against transformers' own forward pass."""

import pytest
import torch

from repro.data.load import load_problems
from repro.data.prompts import render
from repro.models.policy import end_token_ids
from repro.rl.noise import perturbed
from repro.rollout.draw import draw, uniforms
from repro.rollout.torch_sampler import Decoder, TorchSampler
from repro.spec.arm import NoiseConfig
from repro.spec.config import DataConfig, SamplingConfig
from tests.repro.rollout.conftest import prompts_of, random_policy, tokens_of
from tests.repro.small_runs import fresh_policy

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=64)
SAMPLED = SamplingConfig(temperature=0.7, max_new_tokens=40)
PROMPTS = prompts_of([5, 1, 17])
NOISE = NoiseConfig(sigma_start=0.2, sigma_end=0.1, num_stages=3)


def tiny(weight_format="nvfp4", **how):
    """Return the packaged policy with an adapter, and prompts of three problems."""
    policy = fresh_policy(
        "tiny", weight_format=weight_format, training="lora", lora_rank=4, lora_alpha=8.0, **how
    )
    problems = load_problems(DataConfig(source="generated", levels=(1,), train_problems=3), "train")
    return policy, [render(problem, "tiny", policy.tokenizer) for problem in problems]


def require_drawn(policy, prompts, completions, sampling):
    """Check that transformers draws the tokens of rows whose seeds are 0, 1 and so on."""
    numbers = uniforms(range(len(completions)), sampling.max_new_tokens)
    ends = end_token_ids(policy)
    for row, (completion, uniform) in enumerate(zip(completions, numbers, strict=True)):
        prompt, tokens = prompts[row * len(prompts) // len(completions)], list(completion.token_ids)
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0]
        drawn, logprobs = draw(logits[len(prompt) - 1 :], uniform[: len(tokens)], sampling)
        assert tokens == drawn.tolist()
        assert completion.sampled_logprobs == pytest.approx(logprobs.tolist(), abs=2e-4)
        assert not ends & set(tokens[:-1])
        stopped = tokens[-1] in ends
        assert stopped or len(tokens) == sampling.max_new_tokens
        assert completion.finish_reason == ("stop" if stopped else "length")


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_tokens_of_every_architecture_under_noise_are_those_of_transformers(architecture):
    policy = random_policy(architecture, "nvfp4")
    with perturbed(policy, NOISE, seed=1, step=2, total_steps=3):
        batch = TorchSampler(policy).sample(PROMPTS, SAMPLED, group_size=3, seeds=range(9))
        require_drawn(policy, PROMPTS, batch, SAMPLED)


def test_logits_that_are_not_finite_name_the_layer():
    policy = random_policy(rank=0)
    with torch.no_grad():
        policy.decoder.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 5] = torch.nan
    with pytest.raises(FloatingPointError, match=r"after prompt 0 .* model\.layers\.1's"):
        TorchSampler(policy).sample(PROMPTS, SAMPLED, group_size=2, seeds=range(6))


def test_a_fault_that_comes_with_a_token_names_its_place():
    policy = random_policy(rank=0)
    sampler = TorchSampler(policy)
    (tokens,) = tokens_of(sampler.sample([[3, 4]], GREEDY, group_size=1, seeds=[0]))
    # The first token that is not in the prompt, once it is fed back.
    place = next(i for i, token in enumerate(tokens) if token not in (3, 4))
    with torch.no_grad():
        policy.decoder.get_parameter("model.embed_tokens.weight")[tokens[place]] = torch.inf
    sampler.refresh()
    with pytest.raises(FloatingPointError, match=rf"token {place} .*embedding"):
        sampler.sample([[3, 4]], GREEDY, group_size=1, seeds=[0])


@pytest.mark.parametrize(
    ("weight_format", "how"),
    [
        *((weight_format, {}) for weight_format in ("bf16", "nvfp4", "nf4", "mxfp4")),
        ("nvfp4", {"temperature": 0.0}),
        ("nvfp4", {"temperature": 0.6, "top_p": 0.95}),
    ],
    ids=str,
)
def test_tokens_of_every_format_under_noise_are_those_of_transformers(weight_format, how):
    policy, prompts = tiny(weight_format)
    sampling = SamplingConfig(max_new_tokens=40, **how)
    asked, sampler = {"group_size": 4, "seeds": range(12)}, TorchSampler(policy)
    clean = sampler.sample(prompts, sampling, **asked)
    with perturbed(policy, NOISE, seed=1, step=2, total_steps=3):
        drawn = sampler.sample(prompts, sampling, **asked)
        require_drawn(policy, prompts, drawn, sampling)
    # Noise goes away with its block.
    assert sampler.sample(prompts, sampling, **asked) == clean
    assert clean != drawn or sampling.temperature == 0
    assert "stop" in [completion.finish_reason for completion in drawn]


def test_rows_that_have_ended_are_left_out_of_further_steps_and_change_nothing(monkeypatch):
    policy, prompts = tiny()
    rows = []
    draw_step = Decoder.draw

    def counted(self, buffers, number, sampling):
        rows.append(len(buffers.done))
        return draw_step(self, buffers, number, sampling)

    monkeypatch.setattr(Decoder, "draw", counted)
    hot = SamplingConfig(temperature=1.5, max_new_tokens=60)
    batch = TorchSampler(policy).sample(prompts, hot, group_size=8, seeds=range(24))
    require_drawn(policy, prompts, batch, hot)
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0] == 24


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none")
def test_float32_on_a_device_is_float32_on_the_host():
    (host, prompts), (device, _) = tiny(device="cpu"), tiny(device="cuda")
    on_host, on_device = (
        TorchSampler(policy).sample(prompts, SAMPLED, group_size=4, seeds=range(12))
        for policy in (host, device)
    )
    assert tokens_of(on_device) == tokens_of(on_host)
    for ours, other in zip(on_device, on_host, strict=True):
        assert ours.sampled_logprobs == pytest.approx(other.sampled_logprobs, abs=1e-3)
