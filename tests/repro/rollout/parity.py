"""How far the engine's log-probabilities lie from the trainer's, and both from exact ones.

How large rounding may be follows from the policy: each of the two passes rounds at every operation,
and on random weights, whose logits are all but flat, rounding moves them far. So both are held
against one float32 pass (adapter merged in float32, plain products): an engine as good as the
trainer lies no farther from it than the trainer does, whatever their distance from one another.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernels import dispatch
from repro.models.files.merged_files import merged_tensor
from repro.models.loading import build_on_meta
from repro.models.norms import block_norms, final_norm
from repro.models.policy import Policy
from repro.rollout.sampler import RolloutBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Of the differences d of sampled and trainer's log-probabilities, in nats.

    `first_half` and `second_half` are the mean of abs(d) over halves of the positions: equal
    without drift. `mean_exp_abs` is 1 where both agree.
    """

    tokens: int
    max_abs: float
    mean_exp_abs: float
    first_half: float
    second_half: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Mean distances of engine and trainer from a float32 pass, nats, over all tokens."""

    engine: float
    trainer: float


@torch.no_grad()
def trainer_logprobs(policy: Policy, batch: RolloutBatch, temperature: float) -> list[Tensor]:
    """Return the trainer's log-probabilities of each completion's tokens, (T,), float32.

    The policy is in the state in which it was sampled from, at this temperature without filters.
    """
    decoder: Any = policy.decoder
    by_row = []
    for row in range(len(batch.completions)):
        tokens, prompt = _sequence(batch, row, policy.device)
        hidden = decoder.model(input_ids=tokens[:-1].unsqueeze(0), use_cache=False)[0][0]
        logprobs, _ = dispatch.token_logprobs(
            hidden[prompt - 1 :], decoder.lm_head.weight, tokens[prompt:], temperature
        )
        by_row.append(logprobs)
    return by_row


def float32_logprobs(policy: Policy, batch: RolloutBatch, temperature: float) -> list[Tensor]:
    """Return the same in float32 throughout: 4 bytes per parameter and more while it runs."""
    exact = dataclasses.replace(policy, model=_merged(policy))
    return trainer_logprobs(exact, batch, temperature)


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


def exactness(batch: RolloutBatch, trainer: list[Tensor], exact: list[Tensor]) -> Exactness:
    """Compare what the engine and the trainer gave with a float32 pass."""
    reference = torch.cat(exact).double()
    engine = (_sampled(batch, reference.device) - reference).abs()
    other = (torch.cat(trainer).double() - reference).abs()
    return Exactness(engine=float(engine.mean()), trainer=float(other.mean()))


def parity(batch: RolloutBatch, trainer: list[Tensor]) -> Parity:
    """Compare what the engine gave with the trainer's log-probabilities."""
    every = _sampled(batch, trainer[0].device) - torch.cat(trainer).double()
    rows = every.abs().split([len(row) for row in trainer])
    first = torch.cat([row[: len(row) // 2] for row in rows])
    second = torch.cat([row[len(row) // 2 :] for row in rows])
    return Parity(
        tokens=len(every),
        max_abs=float(every.abs().max()),
        mean_exp_abs=float(every.abs().exp().mean()),
        first_half=float(first.mean()),
        second_half=float(second.mean()),
    )


def _sequence(batch: RolloutBatch, row: int, device: torch.device) -> tuple[Tensor, int]:
    """Return prompt and completion of a row as one (S,) tensor, and the prompt's length."""
    prompt = batch.prompt_ids[row // batch.group_size]
    tokens = [*prompt, *batch.completions[row].token_ids]
    return torch.tensor(tokens, device=device), len(prompt)


def _sampled(batch: RolloutBatch, device: torch.device) -> Tensor:
    drawn = [value for c in batch.completions for value in c.sampled_logprobs]
    return torch.tensor(drawn, dtype=torch.float64, device=device)
