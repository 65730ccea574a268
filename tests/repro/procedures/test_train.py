"""How a run's policy is made ready to train: its micro-batches by the device's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from repro.models.memory_plan import training_memory
from repro.procedures.train import fitting_update
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find

H100_BYTES = 85_000_000_000


@pytest.mark.parametrize(
    ("tier", "device"), [(Tier.PAPER, "cuda"), (Tier.PAPER, "cpu"), (Tier.SMOKE, "cuda")]
)
def test_a_published_model_trains_on_a_device_in_the_micro_batches_that_its_plan_chose(
    tier: Tier, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=H100_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    (run,) = plan(find("table1"), tier, 1, ["nvfp4_lora"])
    fitting = fitting_update(run, torch.device(device))
    if (tier, device) != (Tier.PAPER, "cuda"):
        assert fitting is None
        return
    memory = training_memory(run.arm, run.scale)
    assert memory is not None
    step = memory.fitting(H100_BYTES)
    assert fitting == (step.micro_tokens, step.kept_blocks)
    assert step.micro_tokens > run.scale.micro_batch_rows
