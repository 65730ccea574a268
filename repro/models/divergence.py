"""How far a changed policy is from another, token by token: the KL between their distributions.

Of distributions over the vocabulary a slice of tokens is held at a time; of every token its last
hidden state.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from repro.models.policy import Policy

# Tokens that reach the vocabulary at once: 150,000 entries each.
SLICE = 2048


def logprobs(policy: Policy, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities over the vocabulary, (tokens, V) float32, of (tokens, H)."""
    output = cast(Any, policy.decoder).get_output_embeddings()
    logits = functional.linear(hidden, output.weight, getattr(output, "bias", None))
    return (logits.float() / temperature).log_softmax(-1)


def compared(
    clean: Policy,
    first: Tensor,
    changed: Policy,
    second: Tensor,
    temperatures: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    """Return KL(clean || changed) and the changed policy's entropy, (tokens,) nats each.

    `first` and `second` are the policies' last hidden states of the same tokens, (tokens, H).
    """
    parts = []
    for a, b in zip(first.split(SLICE), second.split(SLICE), strict=True):
        p, q = logprobs(clean, a, temperatures[0]), logprobs(changed, b, temperatures[1])
        parts.append(torch.stack([(p.exp() * (p - q)).sum(-1), -(q.exp() * q).sum(-1)]))
    kl, entropy = torch.cat(parts, dim=1)
    return kl, entropy
