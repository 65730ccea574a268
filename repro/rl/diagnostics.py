r"""Diagnostics of a training run besides its reward: mismatch, entropy, lengths.

The sampler's log-probabilities and the trainer's are of the same weights but not of the same
arithmetic, and under added noise not of the same weights either. With Delta = log pi_trainer - log
pi_sampler on sampled tokens::

    mean |Delta|, max |Delta|, mean exp|Delta|,    k3 = mean(e^Delta - 1 - Delta)

k3 estimates KL(sampler || trainer), is never negative, and needs no correction, since the tokens
were drawn from the sampler.

Entropy is the mean over counting tokens, in nats, over the whole vocabulary, at the sampling
temperature. A truncated completion is often a loop of near-certain tokens; truncated and finished
ones are kept apart, or a falling truncation rate looks like a change of entropy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Sampler against trainer over one set of rows; see the module docstring."""

    kl: float
    abs_mean: float
    abs_max: float
    exp_abs_mean: float


def sampler_mismatch(trainer: Tensor, sampled: Tensor, mask: Tensor) -> Mismatch:
    """Compare log-probabilities of the same tokens; (B, T) each, on the CPU, mask bool."""
    difference = (trainer.double() - sampled.double())[mask]
    size = difference.abs()
    return Mismatch(
        kl=float((torch.expm1(difference) - difference).mean()),
        abs_mean=float(size.mean()),
        abs_max=float(size.max()),
        exp_abs_mean=float(size.exp().mean()),
    )


def token_mean(values: Tensor, mask: Tensor) -> float | None:
    """Return the mean over True, or None where there is none."""
    return float(values[mask].double().mean()) if bool(mask.any()) else None


def entropies(entropy: Tensor, mask: Tensor, truncated: Tensor) -> dict[str, float | None]:
    """Return token-mean entropies of all, finished and truncated rows from (B, T) nats."""
    return {
        "entropy": token_mean(entropy, mask),
        "entropy_finished": token_mean(entropy, mask & ~truncated[:, None]),
        "entropy_truncated": token_mean(entropy, mask & truncated[:, None]),
    }


def mean_of(values: list[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None where there is none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
