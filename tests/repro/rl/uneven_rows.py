"""For tests of passes: rows of unequal lengths, gradients by name, a head in any precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kernels import dispatch
from repro.models.policy import Policy
from repro.reward.score import Graded
from repro.rl.advantage import Advantages
from repro.rl.collect import Rollout
from repro.rl.rows import Rows, make_rows, spread
from repro.rl.step import StepInputs
from repro.rollout.sampler import Completion
from repro.spec.arm import LossConfig

LENGTHS = (7, 3, 12, 1, 9, 5)
PROMPTS = (4, 9, 6)
ADVANTAGES = (1.0, -0.5, 0.25, 2.0, -1.5, 0.75)
# What the released scripts call "equals to DAPO".
BNPO = LossConfig(name="bnpo", aggregation="token_mean_local", mask_truncated=True)


def uneven_rows() -> Rows:
    """Return six rows of three prompts."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 40, (count,), generator=generator).tolist())

    completions = [
        Completion(token_ids=tokens(n), sampled_logprobs=(-1.0,) * n, finish_reason="length")
        for n in LENGTHS
    ]
    return make_rows([tokens(n) for n in PROMPTS], completions, group_size=2)


def rollout_of(rows: Rows, advantages: Sequence[float] = ADVANTAGES) -> Rollout:
    """Return rows as a rollout with these advantages."""
    return Rollout(
        rows=rows,
        advantages=Advantages(
            values=torch.tensor(advantages, dtype=torch.float64),
            scored=torch.ones(len(rows), dtype=torch.bool),
            groups=len(rows.prompts),
            zero_variance_groups=0,
        ),
        graded=[Graded(accuracy=0.0, reward=value) for value in advantages],
        batches=1,
        tokens_sampled=int(rows.mask.sum()),
        informative=1.0,
    )


def step_on(rollout: Rollout, index: Tensor | None = None, **logprobs: Tensor | None) -> StepInputs:
    """Return a step on rows of a rollout, by default on all, with old or reference ones."""
    rows = torch.arange(len(rollout.rows)) if index is None else index
    return StepInputs(step=0, rollout=rollout, index=rows, **logprobs)


def plain_logprobs(policy: Policy, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
    """Return what `packed_logprobs` does, by the policy's own modules over rows padded behind."""
    tokens, predicting = [], []
    for row, length in enumerate(rows.lengths().tolist()):
        prompt = rows.prompts[int(rows.prompt_of_row[row])]
        tokens.append(torch.tensor([*prompt, *rows.token_ids[row, : length - 1].tolist()]))
        predicting.append(torch.arange(len(tokens[-1])) >= len(prompt) - 1)
    ids, predicts = (pad_sequence(of, batch_first=True) for of in (tokens, predicting))  # (B, S)
    decoder: Any = policy.decoder
    read = decoder.model(input_ids=ids.to(policy.device), use_cache=False).last_hidden_state
    hidden, weight = read[predicts.to(policy.device)], decoder.get_output_embeddings().weight
    mask = rows.mask.to(policy.device)
    chosen = rows.token_ids.to(policy.device)[mask]
    logprobs, entropy = dispatch.token_logprobs(hidden, weight, chosen, temperature)
    return spread(logprobs, mask), spread(entropy, mask)


def exact_norm(x: Tensor, gain: Tensor, eps: float, noise: Tensor | None = None) -> Tensor:
    """Return what `rms_norm` returns, in the input's own precision."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed * (gain if noise is None else gain + noise)


def exact_head(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return what `token_logprobs` returns, in the input's own precision."""
    logp = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    chosen = logp.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return chosen, -(logp.exp() * logp).sum(-1)


def trained_of_any_type(policy: Policy) -> dict[str, Any]:
    """Return what is trained by name, be it float64."""
    return {n: p for n, p in policy.model.named_parameters() if p.requires_grad}


def take_gradients(policy: Policy) -> dict[str, Tensor]:
    """Return every trained tensor's gradient and clear it."""
    taken = {}
    for name, parameter in trained_of_any_type(policy).items():
        assert parameter.grad is not None, name
        taken[name] = parameter.grad.clone()
        parameter.grad = None
    return taken


def largest_gap(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest difference, of the second's largest value."""
    assert first.keys() == second.keys()
    scale = max(float(value.abs().max()) for value in second.values())
    return max(float((first[n] - second[n]).abs().max()) for n in first) / scale
