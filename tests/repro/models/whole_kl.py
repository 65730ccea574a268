"""The KL between policies from whole distributions, one row at a time by the model's own head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from repro.models.policy import Policy


@torch.no_grad()
def distributions(of: Policy, rows: Sequence[Sequence[int]], places: slice = slice(None)) -> Tensor:
    """Return log-probabilities at the places of each row, (tokens, V) float64."""
    return torch.cat([
        of.model(input_ids=torch.tensor([list(row)])).logits[0, places].double().log_softmax(-1)
        for row in rows
    ])  # fmt: skip


def mean_kl(p: Tensor, q: Tensor) -> float:
    """Return the mean KL(p || q) over tokens, in nats."""
    return float((p.exp() * (p - q)).sum(-1).mean())
