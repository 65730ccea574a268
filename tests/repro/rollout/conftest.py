"""Tiny random policies of every architecture and weight format."""

import functools
from tempfile import TemporaryDirectory

import pytest
import torch

from repro.models.fused_weights import fuse, share
from repro.models.lora import adapter_layers, base_linear
from repro.models.policy import load_policy
from repro.rollout.engine_config import EngineConfig
from tests.repro.architectures import CLASSES, SIZES


def random_policy(architecture="qwen2", weight_format="bf16", rank=4, seed=7, hidden_size=128):
    """Return a float32 policy of 2 layers with weights large enough to give sharp logits."""
    config_class, model_class = CLASSES[architecture]
    values = SIZES | dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    values |= {"hidden_size": hidden_size, "intermediate_size": 128}
    values |= {"max_position_embeddings": 512, "tie_word_embeddings": architecture == "qwen3"}
    if architecture == "qwen3":
        values["head_dim"] = 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**values)).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.7, 1.3)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.3)
                else:
                    parameter.normal_(0, 0.15)
    with TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        policy = load_policy(
            folder, weight_format=weight_format, training="lora" if rank else "none",
            lora_rank=rank, lora_alpha=2 * rank, seed=seed,
        )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for _, layer in adapter_layers(policy.model):
        B = layer.adapter()[1]
        with torch.no_grad():
            B.copy_(torch.randn(B.shape, generator=generator) * 0.1)
    return policy


def small(**changes):
    """Return the configuration of an engine of four slots."""
    values = {
        "slots": 4, "max_positions": 256, "max_new_tokens": 64, "block_size": 4,
        "prefill_tokens": 16, "round_steps": 4,
    }  # fmt: skip
    return EngineConfig(**(values | changes))


def prompts_of(lengths, seed=0):
    """Return a random prompt of each length, token 0 in none."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (n,), generator=generator).tolist() for n in lengths]


def modules_of(policy, *names):
    """Return modules of a policy's first block."""
    block = policy.decoder.get_submodule("model.layers.0")
    return [block.get_submodule(name) for name in names]


def fused(modules, arrange=lambda weight: weight):
    """Return 4-bit projections, fused and arranged as loading does it for a card's kernels."""
    layers = [base_linear(module) for module in modules]
    share(layers, arrange(fuse([layer.codes() for layer in layers])))
    return modules


def interrupt_after(engine, steps, monkeypatch):
    """Let an engine be interrupted once it has run so many decode steps."""
    run, left = engine.steps, iter(range(steps))

    def step(width, sampling):
        if next(left, None) is None:
            raise KeyboardInterrupt
        run(width, sampling)

    monkeypatch.setattr(engine, "steps", step)


def tokens_of(completions):
    """Return the tokens of completions."""
    return [completion.token_ids for completion in completions]


def require_alike(actual, expected):
    """Check for the same tokens, and log-probabilities up to rounding."""
    assert tokens_of(actual) == tokens_of(expected)
    for ours, other in zip(actual, expected, strict=True):
        assert ours.sampled_logprobs == pytest.approx(other.sampled_logprobs, abs=2e-4)


@pytest.fixture(scope="session")
def make_policy():
    """Return the builder, which keeps what it has built."""
    return functools.cache(random_policy)
