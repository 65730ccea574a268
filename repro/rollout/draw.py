"""The choice of a token: temperature, a filter, and a draw by the inverse of the distribution.

For logits z the distribution is softmax(z / T), cut to the smallest set that holds `top_p` of its
mass (the token that crosses the bound included) and renormalised, in every sampler here (vLLM
too). A token is the first whose cumulated probability, in the order of token ids, exceeds a uniform
number.

Drawing by inversion from one uniform number per token makes arms comparable: two policies that
differ a little choose the same token for most uniforms. `torch.multinomial` has no such property,
and its draw for one row depends on the others.

`choose` is the end of an engine's decode step: a draw, and the rows' state moved on by it. It is
the plain form, for any device, with the filter; it neither waits for the device nor branches on
values, so it can be captured; `kernels.reference_step.choose`, which specifies the kernel, has no
filters and waits for the device to refuse bad logits. A row whose largest logit is not finite draws
nothing, in all three: NaN and infinity are such, a token ruled out by -inf is not. A filter takes
few rows at a time, since a capture keeps the memory that one draw needs.

Easy to get wrong: cumulating 150 000 probabilities in float32 (the sum misses 1 by up to 1e-3, and
the last tokens are never or wrongly drawn; `kernels.reference_step.invert` uses float64), and
reporting log-probabilities from before the filter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference_step import StepRows, advance, invert, uniforms_at
from repro.models.memory_plan import FILTERED_ROWS
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
    ordered, order = torch.log_softmax(logprobs, dim=-1).sort(dim=-1, descending=True, stable=True)
    mass = ordered.double().exp()
    before = mass.cumsum(dim=-1) - mass
    removed = torch.zeros_like(logprobs, dtype=torch.bool)
    # The first token stays whatever top_p is: nothing comes before it.
    outside = before >= sampling.top_p
    outside[..., 0] = False
    removed.scatter_(-1, order, outside)
    return torch.log_softmax(logprobs.masked_fill(removed, -torch.inf), dim=-1)


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


def choose(logits: Tensor, state: StepRows, sampling: SamplingConfig) -> None:
    """Draw for slots 0 to M - 1 and advance them.

    Parameters
    ----------
    logits : Tensor, (M, V), float32
    state
        Its `temperature` is used, so that one captured step serves every temperature above 0.
    sampling
        Its filter, and whether the temperature is 0.
    """
    M = logits.shape[0]
    numbers = uniforms_at(state.uniforms[:M], state.counts[:M])  # (M,)
    temperature = None
    if sampling.temperature > 0:
        temperature = state.temperature
        sampling = dataclasses.replace(sampling, temperature=1.0)
    rows = FILTERED_ROWS if sampling.filtered else M
    parts = [
        _drawn(some, uniform, temperature, sampling)
        for some, uniform in zip(logits.split(rows), numbers.split(rows), strict=True)
    ]
    ids, logprobs, faulty = (torch.cat(values) for values in zip(*parts, strict=True))
    advance(ids, logprobs, faulty, state)


def _drawn(
    logits: Tensor, uniform: Tensor, temperature: Tensor | None, sampling: SamplingConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, log-probabilities and which rows are faulty, of some rows."""
    faulty = ~torch.isfinite(logits.amax(dim=-1))  # (m,)
    sound = logits.masked_fill(faulty.unsqueeze(1), 0.0)
    if temperature is not None:
        sound = sound / temperature
    return (*draw(sound, uniform, sampling), faulty)
