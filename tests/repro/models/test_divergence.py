"""The KL between two policies over rows: in blocks what it is row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from repro.models import divergence
from repro.models.divergence import last_hidden, mean_kl
from repro.models.policy import Policy, load_policy
from repro.spec.arm import WeightFormat

ROWS = [[5, 9, 40, 7, 21, 3], [8, 8, 30, 2], [11, 50, 60, 17, 4, 33, 12]]
PROMPT_TOKENS = 3


def policy(weight_format: WeightFormat = "bf16", order: int | None = None) -> Policy:
    return load_policy(
        "tiny",
        weight_format=weight_format,
        training="lora",
        lora_rank=4,
        lora_alpha=4.0,
        seed=1,
        order=order,
    )


@torch.no_grad()
def distributions(of: Policy) -> Tensor:
    """Return those that predict the completions' tokens, one row at a time by the model's head."""
    return torch.cat([
        of.model(input_ids=torch.tensor([row])).logits[0, PROMPT_TOKENS - 1 : -1]
        .double().log_softmax(-1)
        for row in ROWS
    ])  # fmt: skip


def predictions(of: Policy) -> list[Tensor]:
    return [row[PROMPT_TOKENS - 1 : -1] for row in last_hidden(of, ROWS)]


@pytest.mark.parametrize("order", [None, 7])
def test_the_kl_in_blocks_is_that_of_whole_distributions_row_by_row(
    order: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks as a real model needs them: two rows go forward at once, three tokens to the head.
    monkeypatch.setattr(divergence, "_FORWARD", 14)
    monkeypatch.setattr(divergence, "_SLICE", 3)
    clean = policy(order=order)
    p = distributions(clean)
    assert mean_kl(clean, predictions(clean), clean, predictions(clean)) == 0
    for changed in (policy("nvfp4", order), policy("mxfp4", order)):
        kl = mean_kl(clean, predictions(clean), changed, predictions(changed))
        q = distributions(changed)
        assert kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
        assert kl > 0
