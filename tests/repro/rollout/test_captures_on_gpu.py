"""Captures after all captures were dropped: needs a GPU."""

import pytest
import torch

from repro.rollout.gpu.cuda_backend import Captures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none"),
]


def test_captures_are_made_anew_while_memory_of_dropped_ones_is_held():
    device = torch.device("cuda", 0)
    captures = Captures(device)
    x = torch.arange(1 << 20, device=device, dtype=torch.float32)
    outputs = []

    def work():
        outputs.append(x + 1)

    for made in (1, 2, 3):
        captures.run("work", work)
        x += 1
        captures.run("work", work)
        torch.cuda.synchronize()
        # The capture's own result, which lies in the captures' pool, is kept from here on.
        assert torch.equal(outputs[-1], x + 1)
        captures.clear()
        # Twice done and once replayed, for each capture.
        assert len(outputs) == 2 * made
