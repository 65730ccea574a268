"""A tiny random policy, and runs that train it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from repro.data.problem import Problem
from repro.data.tiny_tokenizer import build_tokenizer
from repro.rollout.sampler import Completion
from repro.rollout.torch_sampler import TorchSampler
from repro.spec.arm import Arm
from repro.spec.config import (
    DataConfig,
    LearningRates,
    OptimizerConfig,
    SamplingConfig,
    TrainScale,
    derive_seed,
)
from tests.repro.rl.uneven_rows import uneven_rows
from tests.repro.small_runs import fresh_policy, rewards_of, small_run, train_alone


@pytest.fixture(scope="session")
def make_run():
    """Return a function from changes (of arm, scale or seed, by field name) to a small run."""

    def make(**changes):
        scale = TrainScale(
            checkpoint="unused",
            data=DataConfig(development_problems=6),
            steps=6,
            prompts_per_rollout=3,
            group_size=4,
            max_prompt_tokens=64,
            rollout=SamplingConfig(max_new_tokens=6),
            optimizer=OptimizerConfig(
                learning_rates=LearningRates(lora_16bit=1e-2, lora_4bit=1e-2, full=1e-3),
                warmup_steps=min(2, changes.get("steps", 6)),
            ),
            prompt_template="tiny",
            checkpoint_every=100,
        )
        fields = {f.name for f in dataclasses.fields(Arm)}
        arm = {k: v for k, v in changes.items() if k in fields}
        rest = {k: v for k, v in changes.items() if k not in fields and k != "seed"}
        scale = dataclasses.replace(scale, **rest)
        return small_run(scale, seed=changes.get("seed", 0), **arm)

    return make


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory):
    """Write a random 2-layer Qwen2 with the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("random-qwen2")
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
                if "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_policy(checkpoint_folder):
    """Return a function that loads a fresh copy of the random policy."""

    def make(**changes):
        settings = {"weight_format": "bf16", "training": "lora", "lora_rank": 4, "lora_alpha": 8.0}
        return fresh_policy(checkpoint_folder, **(settings | {"seed": 0} | changes))

    return make


def nudge(policy, size=0.1):
    """Move all trainable tensors off their start, B included."""
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                moved = torch.randn(parameter.shape, generator=generator) * size
                parameter.add_(moved.to(parameter.device))


class WatchedSampler(TorchSampler):
    """The plain sampler, which remembers its seeds and calls `before` each rollout."""

    def __init__(self, policy):
        super().__init__(policy)
        self.calls, self.seeds, self.before = 0, list[int](), lambda: None

    def sample(self, *asked, seeds, **more):
        """Remember and sample."""
        self.calls += 1
        self.seeds += seeds
        self.before()
        return super().sample(*asked, seeds=seeds, **more)


@pytest.fixture
def rows():
    """Return six rows of three prompts, of unequal lengths."""
    return uneven_rows()


@pytest.fixture
def policy(make_policy):
    """Return the tiny policy with its adapter off zero."""
    policy = make_policy()
    nudge(policy, 0.1)
    return policy


def make_completion(tokens, reason="stop", logprob=-1.0):
    """Return a completion of these tokens."""
    return Completion(
        token_ids=tuple(tokens), sampled_logprobs=(logprob,) * len(tokens), finish_reason=reason
    )


@pytest.fixture(scope="session")
def problems():
    """Return eight problems of unequal prompt lengths."""
    return [
        Problem(id=f"p{i}", question="Tom has " + "3 apples " * (i % 3 + 1) + "?", answer=str(i))
        for i in range(8)
    ]


def score_by_text(requests):
    """Reward about a third as right, by the text alone."""
    accuracy = [float(derive_seed(own.text, "right") % 3 == 0) for own in requests]
    return rewards_of(requests, accuracy)


@pytest.fixture
def go(make_policy, make_run, problems, tmp_path):
    """Return a function that trains a fresh policy and returns the result and the policy."""

    def start(
        *, folder = "a", prepare = None, training = "lora",
        score = None, weight_format = "bf16", call = None,
        **changes
    ):  # fmt: skip
        run = make_run(training=training, weight_format=weight_format, **changes)
        alpha = {name: changes[name] for name in ("lora_alpha",) if name in changes}
        policy = make_policy(training=training, weight_format=weight_format, **alpha)
        source = WatchedSampler(policy)
        if prepare is not None:
            prepare(policy, source)
        result = train_alone(run, policy, source, problems, score or score_by_text,
                       folder=tmp_path / folder, **(call or {}))  # fmt: skip
        return result, policy, source

    return start
