r"""The policy loss: GRPO, DAPO, Dr. GRPO and GSPO as values of one configuration.

For row i with advantage A_i and its counting tokens t (l = log-probability)::

    ratio_it  = exp(l_it - old_it)              token
                exp(mean_t (l_it - old_it))     sequence (GSPO)
    gain_it   = min(ratio_it A_i, clip(ratio_it, 1 - low, 1 + high) A_i)
    loss_it   = -w_it gain_it + beta (e^d - d - 1),  d = ref_it - l_it
    w_it      = min(exp(old_it - sampled_it), C), no gradient   (truncated importance sampling)

and the loss of one optimiser step is

    sequence_mean      (1/B)           sum_i (1/L_i) sum_t loss_it        GRPO, Eq. 3
    token_mean         (1/sum_i L_i)   sum_i         sum_t loss_it        DAPO
    token_mean_local   the same with each micro-batch's own count, averaged over micro-batches
    constant           1/(B L_max)     sum_i         sum_t loss_it        Dr. GRPO

Easy mistakes:

* The counts belong to the *optimiser step*, over all micro-batches and processes, and use the same
  mask as the numerator (`StepCounts`). Otherwise micro-batch size changes the gradient; that is
  what `token_mean_local` reproduces on purpose. Rows without a counting token are not in B.
* As a *loss*, a KL estimate's gradient is not that of its value: with samples from the policy,
  e^d - d - 1 estimates KL(policy || reference) and has the gradient of KL(reference || policy).
* With one update per rollout and the trainer's own log-probabilities as `old`, the ratio is 1
  exactly, and no clip bound can act, however it is set.
* A sequence ratio moves by thousandths: GSPO's clip range is of order 3e-4, not 0.2. Its importance
  weight is the product over the tokens.

Sources: arXiv 2510.11696 Eq. 3 and App. E; 2503.14476 (DAPO); 2503.20783 (Dr. GRPO); 2507.18071
(GSPO); 2510.01555, 2512.21852 (KL gradients).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from repro.spec.arm import Aggregation, LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The divisors of a loss: counts over the whole optimiser step.

    Attributes
    ----------
    rows, tokens
        Rows with a counting token, and counting tokens, of every micro-batch and process.
    length_limit
        Tokens; the constant of `constant` aggregation.
    micro_batches
        Micro-batches of the step, over which `token_mean_local` averages.
    local_tokens
        Counting tokens of the micro-batch, idle rows among them, for `token_mean_local`.
    """

    rows: int
    tokens: int
    length_limit: int
    micro_batches: int = 1
    local_tokens: int = 0


# A ratio's, and a KL term's: of tokens beyond it, e^20 times as likely, no gradient is taken.
MOST_LOGARITHM = 20.0
# Of `LossResult.sums`, in this order.
SUMS = ("tokens", "clipped_low", "clipped_high", "ratio", "kl", "weight")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossResult:
    """A micro-batch's share of the step's loss and its sums for the step's metrics.

    `loss` is () with gradient; shares of all micro-batches add up to the step's loss. `sums` are
    (6,) float64, by `SUMS`, on the loss's device, so that the host waits for none of them: counting
    tokens of this micro-batch; tokens whose gradient a bound removed (ratio below 1 - low with
    A < 0, above 1 + high with A > 0); and sums over counting tokens of the ratio, the KL estimate
    and the importance weight.
    """

    loss: Tensor
    sums: Tensor


def policy_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: LossConfig,
    counts: StepCounts,
    *,
    old_logprobs: Tensor | None = None,
    sampled_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> LossResult:
    """Return one micro-batch's share of the loss of an optimiser step.

    Parameters
    ----------
    logprobs
        (B, T) float, with gradient.
    advantages
        (B,) float.
    mask
        (B, T) bool; True where a token counts.
    old_logprobs
        (B, T), the ratio's denominator; None takes `logprobs` itself, so the ratio is exactly 1.
    sampled_logprobs
        (B, T), the behaviour policy's; needed by `importance_cap`.
    ref_logprobs
        (B, T), the reference policy's; needed by `beta`.
    """
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    advantage = advantages.to(logprobs.dtype)[:, None]  # (B, 1)
    by_sequence = config.ratio == "sequence"
    difference = torch.where(mask, logprobs - old, 0)
    if by_sequence:
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        difference = (difference.sum(1, keepdim=True) / lengths).expand_as(mask)
    ratio = _bounded(difference).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = torch.minimum(ratio * advantage, clipped * advantage)

    weight = torch.ones_like(logprobs)
    if config.importance_cap is not None:
        assert sampled_logprobs is not None
        off = torch.where(mask, old - sampled_logprobs, 0).detach()
        if by_sequence:
            off = off.sum(1, keepdim=True).expand_as(mask)
        weight = off.exp().clamp(max=config.importance_cap)
    per_token = -weight * gain
    kl = torch.zeros_like(logprobs)
    if config.beta > 0:
        assert ref_logprobs is not None
        distance = _bounded(torch.where(mask, ref_logprobs - logprobs, 0))
        kl = torch.expm1(distance) - distance
        per_token = per_token + config.beta * kl

    low = (ratio < 1 - config.clip_low) & (advantage < 0) & mask
    high = (ratio > 1 + config.clip_high) & (advantage > 0) & mask
    counted = (ratio, kl, weight)
    # Masked positions may hold anything, including NaN.
    sums = [torch.where(mask, values.detach(), 0).sum(dtype=torch.float64) for values in counted]
    counts_of = [part.sum(dtype=torch.float64) for part in (mask, low, high)]
    return LossResult(
        loss=aggregate(per_token, mask, config.aggregation, counts),
        sums=torch.stack([*counts_of, *sums]),
    )


def _bounded(logarithm: Tensor) -> Tensor:
    """Return a logarithm of which exp, and its product with an advantage, is finite in float32.

    Padding must be 0 in it before: 0 * inf in a masked position would still poison gradients.
    """
    return logarithm.clamp(-MOST_LOGARITHM, MOST_LOGARITHM)


def aggregate(
    per_token: Tensor, mask: Tensor, aggregation: Aggregation, counts: StepCounts
) -> Tensor:
    """Return the micro-batch's share of the step's average of `per_token`, (B, T) float.

    `mask` is (B, T) bool.
    """
    values = torch.where(mask, per_token, 0)  # (B, T)
    if aggregation == "sequence_mean":
        lengths = mask.sum(1).clamp(min=1)
        return (values.sum(1) / lengths).sum() / counts.rows
    if aggregation == "token_mean":
        return values.sum() / counts.tokens
    if aggregation == "token_mean_local":
        return values.sum() / max(counts.local_tokens, 1) / counts.micro_batches
    return values.sum() / (counts.rows * counts.length_limit)
