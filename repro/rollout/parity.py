"""How far the engine's log-probabilities lie from the trainer's, token by token.

An importance ratio divides the trainer's log-probability by the sampler's; where the two compute
the same policy differently, the ratio is not 1 before a single update. The trainer's forward pass
is transformers' own modules over the same weights; the engine's goes through other kernels, in
another order, with keys and values rounded into the cache. In bfloat16 the difference is noise;
what it must not do is grow with the position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels import dispatch
from repro.models.policy import Policy
from repro.rollout.sampler import RolloutBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Differences d of sampled and trainer's log-probabilities over all tokens.

    Attributes
    ----------
    tokens
        How many were compared.
    mean_abs, max_abs
        Of d, nats.
    mean_exp_abs
        Mean of exp(abs(d)): 1 where both agree.
    first_half, second_half
        Mean of abs(d) over the first and the second half of the positions: equal without drift.
    mean
        Of d with its sign: 0 without bias.
    """

    tokens: int
    mean_abs: float
    max_abs: float
    mean_exp_abs: float
    first_half: float
    second_half: float
    mean: float


@torch.no_grad()
def sampler_trainer_parity(policy: Policy, batch: RolloutBatch, temperature: float) -> Parity:
    """Run the trainer's forward pass over a rollout's tokens and compare.

    Parameters
    ----------
    policy
        In the state in which it was sampled from.
    temperature
        Of the sampling, without filters; positive.
    """
    decoder: Any = policy.decoder
    differences, halves = [], []
    for row, completion in enumerate(batch.completions):
        prompt = batch.prompt_ids[row // batch.group_size]
        tokens = torch.tensor([*prompt, *completion.token_ids], device=policy.device)
        hidden = decoder.model(input_ids=tokens[:-1].unsqueeze(0), use_cache=False)[0][0]
        hidden = hidden[len(prompt) - 1 :]
        ours, _ = dispatch.token_logprobs(
            hidden, decoder.lm_head.weight, tokens[len(prompt) :], temperature
        )
        sampled = torch.tensor(completion.sampled_logprobs, device=policy.device)
        difference = (sampled - ours).double()
        differences.append(difference)
        middle = len(difference) // 2
        halves.append((difference[:middle].abs(), difference[middle:].abs()))
    every = torch.cat(differences)
    return Parity(
        tokens=len(every),
        mean_abs=float(every.abs().mean()),
        max_abs=float(every.abs().max()),
        mean_exp_abs=float(every.abs().exp().mean()),
        first_half=float(torch.cat([first for first, _ in halves]).mean()),
        second_half=float(torch.cat([second for _, second in halves]).mean()),
        mean=float(every.mean()),
    )
