"""The KL between two policies: in slices of tokens what it is row by row."""

import pytest
import torch

from repro.models import divergence
from repro.models.divergence import compared
from repro.models.policy import load_policy
from tests.repro.models.whole_kl import distributions, mean_kl

ROWS = [[5, 9, 40, 7, 21, 3], [8, 8, 30, 2], [11, 50, 60, 17, 4, 33, 12]]
PREDICTING = slice(2, -1)  # behind prompts of three tokens


def hidden(of):
    """Return the last hidden states that predict the completions' tokens."""
    states = (of.decoder.model(input_ids=torch.tensor([row])).last_hidden_state for row in ROWS)
    return torch.cat([state[0, PREDICTING] for state in states])


@pytest.mark.parametrize("order", [None, 7])
@torch.no_grad()
def test_the_kl_in_slices_is_that_of_whole_distributions(order, monkeypatch):
    monkeypatch.setattr(divergence, "SLICE", 3)
    clean, *others = (
        load_policy("tiny", weight_format=weight_format, order=order)
        for weight_format in ("bf16", "nvfp4", "mxfp4")
    )
    p = distributions(clean, ROWS, PREDICTING)
    assert float(compared(clean, hidden(clean), clean, hidden(clean))[0].abs().max()) == 0
    for changed in others:
        q = distributions(changed, ROWS, PREDICTING)
        kl, entropy = compared(clean, hidden(clean), changed, hidden(changed))
        assert len(kl) == len(entropy) == len(q)
        assert float(kl.mean()) == pytest.approx(mean_kl(p, q), rel=1e-3)
        assert float(entropy.mean()) == pytest.approx(-float((q.exp() * q).sum(-1).mean()))
        assert float(kl.mean()) > 0
