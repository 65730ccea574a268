"""The choice of a token: temperature, a filter, and a draw by the inverse of the distribution.

For logits z the distribution is softmax(z / T), cut to the smallest set that holds `top_p` of its
mass (the token that crosses the bound included) and renormalised, in every sampler here (vLLM
too). A token is the first whose cumulated probability, in the order of token ids, exceeds a uniform
number.

Drawing by inversion from one uniform number per token makes arms comparable: two policies that
differ a little choose the same token for most uniforms. `torch.multinomial` has no such property,
and its draw for one row depends on the others.

Easy to get wrong: cumulating 150 000 probabilities in float32 (the sum misses 1 by up to 1e-3, and
the last tokens are never or wrongly drawn; `kernels.reference_step.invert` uses float64), and
reporting log-probabilities from before the filter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference_step import invert, keep_nucleus
from repro.spec.config import SamplingConfig


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Return uniform numbers in [0, 1), (len(seeds), count), float64; a row follows its seed."""
    rows = torch.empty(len(seeds), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed in zip(rows, seeds, strict=True):
        generator.manual_seed(seed)
        torch.rand(count, generator=generator, dtype=torch.float64, out=row)
    return rows


def sampling_logprobs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return the log-probabilities of the distribution that tokens are drawn from.

    Parameters
    ----------
    logits : Tensor, (B, V)
    sampling
        Temperature must be positive.

    Returns
    -------
    Tensor, (B, V), float32
        -inf where the filter removed the token.
    """
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    if not sampling.filtered:
        return logprobs
    keep_nucleus(logprobs, 1.0, sampling.top_p)
    return torch.log_softmax(logprobs, dim=-1)


def draw(logits: Tensor, uniform: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Choose one token per row.

    Parameters
    ----------
    logits : Tensor, (B, V)
    uniform : Tensor, (B,), float64, in [0, 1)
    sampling
        Temperature 0 is greedy; its log-probabilities are 0.

    Returns
    -------
    token_ids : Tensor, (B,), int64
    logprobs : Tensor, (B,), float32
    """
    if sampling.temperature == 0:
        token_ids = logits.argmax(dim=-1)
        return token_ids, torch.zeros(len(token_ids), dtype=torch.float32, device=logits.device)
    logprobs = sampling_logprobs(logits, sampling)
    token_ids = invert(logprobs, uniform)  # (B, 1)
    return token_ids.squeeze(-1), logprobs.gather(-1, token_ids).squeeze(-1)
