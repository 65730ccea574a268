"""How far the engine's log-probabilities lie from the trainer's, and both from exact ones.

Both round at every operation, so both are held against one float32 pass (adapter merged in float32,
plain products): an engine as good as the trainer lies no farther from it than the trainer does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernels import dispatch
from repro.models.files.merged_files import merged_tensor
from repro.models.loading import build_on_meta
from repro.models.norms import block_norms, final_norm
from repro.models.policy import Policy
from repro.rollout.sampler import Completion

Prompts = Sequence[Sequence[int]]


@torch.no_grad()
def trainer_logprobs(
    policy: Policy, prompts: Prompts, completions: Sequence[Completion], temperature: float
) -> list[Tensor]:
    """Return the trainer's log-probabilities of each completion's tokens, (T,), float32.

    The policy is in the state in which it was sampled from, at this temperature without filters.
    """
    decoder: Any = policy.decoder
    by_row = []
    for row, completion in enumerate(completions):
        prompt = prompts[row * len(prompts) // len(completions)]
        tokens = torch.tensor([*prompt, *completion.token_ids], device=policy.device)
        hidden = decoder.model(input_ids=tokens[:-1].unsqueeze(0), use_cache=False)[0][0]
        end = hidden[len(prompt) - 1 :], decoder.lm_head.weight, tokens[len(prompt) :]
        logprobs, _ = dispatch.token_logprobs(*end, temperature)
        by_row.append(logprobs)
    return by_row


def float32_logprobs(
    policy: Policy, prompts: Prompts, completions: Sequence[Completion], temperature: float
) -> list[Tensor]:
    """Return the same in float32 throughout: 4 bytes per parameter and more while it runs."""
    exact = dataclasses.replace(policy, model=_merged(policy))
    return trainer_logprobs(exact, prompts, completions, temperature)


@torch.no_grad()
def _merged(policy: Policy) -> nn.Module:
    """Return transformers' own model of a policy's merged weights and norms, float32."""
    decoder: Any = policy.decoder
    norms = block_norms(decoder) | {"model.norm": final_norm(decoder)}
    exact: Any = build_on_meta(decoder.config)
    # A tied head is no parameter of its own here.
    for name, _ in list(exact.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        value = (
            norms[owner].gain() if owner in norms else merged_tensor(policy, name, torch.float32)
        )
        exact.get_submodule(owner).register_parameter(leaf, nn.Parameter(value, False))
    exact.tie_weights()
    exact.model.rotary_emb.to(policy.device)
    return cast(nn.Module, exact)


def distances(completions: Sequence[Completion], passed: list[Tensor]) -> list[Tensor]:
    """Return how far each completion's sampled log-probabilities lie from a pass's, (T,) nats."""
    return [
        (torch.tensor(c.sampled_logprobs, dtype=torch.float64, device=row.device) - row).abs()
        for c, row in zip(completions, passed, strict=True)
    ]


def errors(
    completions: Sequence[Completion], trainer: list[Tensor], exact: list[Tensor]
) -> tuple[float, float]:
    """Return the mean distances of sampler and trainer from a float32 pass, nats."""
    own = torch.cat(distances(completions, exact)).mean()
    return float(own), float((torch.cat(trainer).double() - torch.cat(exact)).abs().mean())
