"""Gaussian noise on 16-bit weights, as strong as a format's rounding.

Every projection W becomes

    W' = W + sigma * rms(W) * N(0, I)

rounded to W's own dtype, once and for good. One sigma serves the whole model; `matched_sigma` finds
it so that the mean over tokens of KL(policy || W') equals that of KL(policy || quantised policy) on
the same tokens. Rounding is not independent of W and not Gaussian: what remains different between
the two policies at equal KL is what is peculiar to rounding.

The noise of one projection depends on (seed, its name) and nothing else. The matching scales the
very draw that is planted: on a small model KL at one sigma differs several times over from draw to
draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from repro.models.decoder import is_projection
from repro.models.lora import AdapterLinear, base_linear
from repro.models.policy import Policy, load_policy
from repro.spec.arm import WeightFormat
from repro.spec.config import derive_seed

_TOLERANCE = 0.01
_BISECTIONS = 40
_PROMPTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedNoise:
    """A strength of noise and the receipt of its matching; KL in nats per token."""

    matched_to: WeightFormat
    sigma: float
    kl_format: float
    kl_noise: float


def base_projections(policy: Policy) -> dict[str, nn.Linear]:
    """Return the dense projections of a policy by name, adapters taken off.

    Raises
    ------
    TypeError
        If one is quantised: noise stands in for rounding and does not go on top of it.
    """
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


def noise_of(weight: Tensor, sigma: float, *, seed: int, name: str) -> Tensor:
    """Return sigma * rms(weight) * N(0, I), (N, K) float32 on the weight's device."""
    return _scaled(_drawn(weight, seed=seed, name=name), weight, sigma)


def _drawn(weight: Tensor, *, seed: int, name: str) -> Tensor:
    """Return N(0, I), (N, K) float32 on the weight's device."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "planted", name))
    return torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight.device)


def _scaled(drawn: Tensor, weight: Tensor, sigma: float) -> Tensor:
    rms = weight.detach().float().square().mean().sqrt()
    return drawn * (sigma * rms)


@torch.no_grad()
def plant_noise(policy: Policy, sigma: float, *, seed: int) -> list[str]:
    """Add the noise to the policy's projections for good; return the names of those changed.

    Raises
    ------
    ValueError
        If a projection came out as it went in.
    """
    changed = []
    for name, linear in base_projections(policy).items():
        before = linear.weight.detach().clone()
        noise = noise_of(before, sigma, seed=seed, name=name)
        linear.weight.copy_((before.float() + noise).to(before.dtype))
        if torch.equal(before, linear.weight):
            raise ValueError(f"noise of sigma {sigma} left {name} as it was")
        changed.append(name)
    return changed


def matched_sigma(
    checkpoint: str | Path,
    weight_format: WeightFormat,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    compute_dtype: str,
    device: str | torch.device,
    order: int | None = None,
    counted: Sequence[slice] = (),
) -> MatchedNoise:
    """Return the sigma at which the noise of `seed` has the KL of `weight_format`'s rounding.

    Parameters
    ----------
    prompts
        Token ids of calibration prompts, with or without a completion behind each.
    seed
        Of the noise, as `plant_noise` will draw it.
    order
        Order of channels in which it will be planted; see `load_policy`.
    counted
        Positions that count, a slice per row; none given counts every position.

    Raises
    ------
    ValueError
        If the format changes nothing, or no sigma up to 10 reaches its KL.
    """

    def load(which: WeightFormat) -> Policy:
        return load_policy(
            checkpoint,
            weight_format=which,
            compute_dtype=compute_dtype,
            device=device,
            order=order,
        )

    def logprobs(of: Policy) -> list[Tensor]:
        rows = token_logprobs(of, prompts)
        return [row[part] for row, part in zip(rows, counted, strict=True)] if counted else rows

    policy = load("bf16")
    clean = logprobs(policy)
    target_kl = mean_kl(clean, logprobs(load(weight_format)))
    if not target_kl > 0:
        raise ValueError(f"{weight_format} left the policy as it was; there is no KL to match")

    # Drawn once: only the strength changes from one try to the next.
    drawn = {
        name: _drawn(linear.weight, seed=seed, name=name)
        for name, linear in base_projections(policy).items()
    }

    def kl_at(sigma: float) -> float:
        with _planted(policy, drawn, sigma):
            return mean_kl(clean, logprobs(policy))

    sigma, noise_kl = _solve(kl_at, target_kl)
    return MatchedNoise(
        matched_to=weight_format, sigma=sigma, kl_format=target_kl, kl_noise=noise_kl
    )


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


@contextmanager
def _planted(policy: Policy, drawn: Mapping[str, Tensor], sigma: float) -> Iterator[None]:
    """Let a policy's projections carry what `plant_noise` adds, for a while."""
    linears = base_projections(policy)
    before = {name: linear.weight.detach().clone() for name, linear in linears.items()}
    try:
        with torch.no_grad():
            for name, linear in linears.items():
                noise = _scaled(drawn[name], before[name], sigma)
                linear.weight.copy_((before[name].float() + noise).to(before[name].dtype))
        yield
    finally:
        with torch.no_grad():
            for name, linear in linears.items():
                linear.weight.copy_(before[name])


@torch.no_grad()
def token_logprobs(policy: Policy, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return log-probabilities over the vocabulary at every position, (S, V) float32 per prompt.

    On the policy's device. Prompts go forward together, padded on the right, where causal attention
    never looks.
    """
    by_row = []
    for begin in range(0, len(prompts), _PROMPTS_AT_ONCE):
        part = prompts[begin : begin + _PROMPTS_AT_ONCE]
        ids = torch.zeros(len(part), max(map(len, part)), dtype=torch.long)
        for row, prompt in enumerate(part):
            ids[row, : len(prompt)] = torch.tensor(list(prompt))
        logits = policy.model(input_ids=ids.to(policy.device)).logits
        by_row += [
            logits[row, : len(prompt)].float().log_softmax(-1) for row, prompt in enumerate(part)
        ]
    return by_row


def mean_kl(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the mean over positions of KL(first || second), in nats."""
    total, positions = 0.0, 0
    for a, b in zip(first, second, strict=True):
        total += float((a.exp() * (a - b)).sum(-1).double().sum())
        positions += len(a)
    return total / positions
