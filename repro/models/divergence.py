"""How far a changed policy is from another: distributions along rows, and the KL between them.

Of distributions over the vocabulary a slice of tokens is held at a time; of every token its last
hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from repro.models.policy import Policy

# Padded tokens that go forward at once, and tokens that reach the vocabulary at once.
_FORWARD, _SLICE = 8192, 1024


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
