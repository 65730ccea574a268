"""Gaussian noise on 16-bit weights, as strong as a format's rounding.

Every projection W becomes

    W' = W + sigma * rms(W) * N(0, I)

rounded to W's own dtype, once and for good. One sigma serves the whole model; it is found so that
the mean over tokens of KL(policy || W') equals that of KL(policy || quantised policy) on the same
tokens. Rounding is not independent of W and not Gaussian: what remains different between the two
policies at equal KL is what is peculiar to rounding.

The noise of one projection depends on (seed, its name) and nothing else. The matching scales the
very draw that stays: on a small model KL at one sigma differs several times over from draw to draw.

Of distributions over the vocabulary a slice of tokens is held at a time; of every token its last
hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from repro.models.decoder import is_projection
from repro.models.lora import AdapterLinear, base_linear
from repro.models.policy import Policy
from repro.spec.arm import WeightFormat
from repro.spec.config import derive_seed

_TOLERANCE = 0.01
_BISECTIONS = 40
# Padded tokens that go forward at once, and tokens that reach the vocabulary at once.
_FORWARD, _SLICE = 8192, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedNoise:
    """A strength of noise and the receipt of its matching; KL in nats per token."""

    matched_to: WeightFormat
    sigma: float
    kl_format: float
    kl_noise: float
    projections: int


def base_projections(policy: Policy) -> dict[str, nn.Linear]:
    """Return the dense projections by name, adapters off; `TypeError` if one is quantised."""
    projections = {}
    for name, module in policy.decoder.named_modules():
        if is_projection(name) and isinstance(module, nn.Linear | AdapterLinear):
            base = base_linear(module)
            if not isinstance(base, nn.Linear):
                raise TypeError(f"{name} is quantised; weight noise needs 16-bit weights")
            projections[name] = base
    if not projections:
        raise ValueError(f"{type(policy.model).__name__} has no dense projection to put noise on")
    return projections


@torch.no_grad()
def plant_matched_noise(
    policy: Policy,
    rounded: Policy,
    rows: Sequence[Sequence[int]],
    prompt_tokens: Sequence[int],
    *,
    matched_to: WeightFormat,
    seed: int,
) -> MatchedNoise:
    """Put noise of `seed` on a policy, for good, as strong as another's rounding; return it.

    Parameters
    ----------
    policy, rounded
        The 16-bit policy, and the same in the format `matched_to`.
    rows, prompt_tokens
        Token ids of prompts, each with a completion behind it, and how many are the prompt's: the
        positions that predict a token of the completion count.

    Raises `ValueError` if the format changes nothing, or no sigma up to 10 reaches its KL.
    """

    def predictions(of: Policy) -> list[Tensor]:
        return [
            row[length - 1 : -1]
            for row, length in zip(last_hidden(of, rows), prompt_tokens, strict=True)
        ]

    clean = predictions(policy)
    target_kl = mean_kl(policy, clean, rounded, predictions(rounded))
    if not target_kl > 0:
        raise ValueError(f"{matched_to} left the policy as it was; there is no KL to match")
    planted = PlantedNoise(policy, seed=seed)

    def kl_at(sigma: float) -> float:
        planted.scale(sigma)
        return mean_kl(policy, clean, policy, predictions(policy))

    sigma, noise_kl = _solve(kl_at, target_kl)
    return MatchedNoise(
        matched_to=matched_to,
        sigma=sigma,
        kl_format=target_kl,
        kl_noise=noise_kl,
        projections=len(planted.projections),
    )


class PlantedNoise:
    """The noise of one seed on a policy's projections, drawn once; only its strength changes."""

    def __init__(self, policy: Policy, *, seed: int) -> None:
        self.projections = base_projections(policy)
        self._clean = {name: one.weight.detach().clone() for name, one in self.projections.items()}
        self._unit = {
            name: _drawn(weight, seed=seed, name=name) for name, weight in self._clean.items()
        }

    @torch.no_grad()
    def scale(self, sigma: float) -> None:
        """Let every projection carry sigma * rms(W) * N(0, I); `ValueError` if it moves none."""
        for name, linear in self.projections.items():
            clean = self._clean[name]
            weight = clean.float()
            noise = self._unit[name] * (sigma * weight.square().mean().sqrt())
            linear.weight.copy_((weight + noise).to(clean.dtype))
            if torch.equal(clean, linear.weight):
                raise ValueError(f"noise of sigma {sigma} left {name} as it was")


def _drawn(weight: Tensor, *, seed: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(seed, "planted", name))
    return torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight.device)


def _solve(kl_at: Callable[[float], float], target_kl: float) -> tuple[float, float]:
    """Return (sigma, its KL) by bisection over log sigma."""
    low, high = 1e-4, 1e-2
    while (kl := kl_at(high)) < target_kl:
        low, high = high, 2 * high
        if high > 10:
            raise ValueError(f"sigma {low} gives a KL of {kl}; {target_kl} is out of reach")
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        kl = kl_at(middle)
        if abs(kl / target_kl - 1) <= _TOLERANCE:
            return middle, kl
        low, high = (middle, high) if kl < target_kl else (low, middle)
    raise ValueError(f"no sigma near {middle} gives a KL of {target_kl}; found {kl}")


@torch.no_grad()
def last_hidden(policy: Policy, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return what reaches the vocabulary at every position, (S, H) per row, on the device.

    Rows go forward together, padded on the right, where causal attention never looks.
    """
    at_once = max(1, _FORWARD // max(map(len, rows)))
    states = []
    for begin in range(0, len(rows), at_once):
        part = rows[begin : begin + at_once]
        ids = torch.zeros(len(part), max(map(len, part)), dtype=torch.long)
        for place, row in enumerate(part):
            ids[place, : len(row)] = torch.tensor(list(row))
        decoder: Any = policy.decoder
        hidden = decoder.model(input_ids=ids.to(policy.device), use_cache=False).last_hidden_state
        states += [hidden[place, : len(row)].clone() for place, row in enumerate(part)]
    return states


def logprobs(policy: Policy, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities over the vocabulary, (tokens, V) float32, of (tokens, H)."""
    output = cast(Any, policy.decoder).get_output_embeddings()
    logits = functional.linear(hidden, output.weight, getattr(output, "bias", None))
    return (logits.float() / temperature).log_softmax(-1)


def mean_kl(
    clean: Policy, first: Sequence[Tensor], changed: Policy, second: Sequence[Tensor]
) -> float:
    """Return the mean over positions of KL(clean || changed), in nats.

    Both are what `last_hidden` returns: (S, H) per row.
    """
    total, positions = 0.0, 0
    for a, b in zip(
        torch.cat(list(first)).split(_SLICE), torch.cat(list(second)).split(_SLICE), strict=True
    ):
        p, q = logprobs(clean, a), logprobs(changed, b)
        total += float((p.exp() * (p - q)).sum(-1).double().sum())
        positions += len(a)
    return total / positions
