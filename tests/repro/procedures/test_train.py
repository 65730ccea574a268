"""How a run's policy is made ready to train: its micro-batches by the device's memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro.models.training_memory import training_memory
from repro.procedures import train
from repro.procedures.loaded_runs import LoadedRuns
from repro.rl.single_run.ranks import ALONE
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find

H100_BYTES = 85_000_000_000


def loaded_runs_of(tier: Tier, device: str) -> LoadedRuns:
    (run,) = plan(find("table1"), tier, 1, ["nvfp4_lora"])
    policy: Any = SimpleNamespace(device=torch.device(device))
    unused: Any = None
    return LoadedRuns(
        runs=[run],
        loaded=policy,
        sampler=unused,
        problems=unused,
        evaluation=unused,
        tallies=unused,
        effects=[{}],
    )


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=H100_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.usefixtures("h100")
def test_a_published_model_trains_in_the_micro_batches_that_its_plan_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded_runs = loaded_runs_of(Tier.PAPER, "cuda")
    (run,) = loaded_runs.runs
    memory = training_memory(run.arm, run.scale)
    assert memory is not None
    taken: dict[str, Any] = {}
    monkeypatch.setattr(train, "single_policy", lambda *given, **named: taken.update(named))
    train.policies_of(loaded_runs)
    fitting = memory.fitting(H100_BYTES)
    assert taken == {
        "micro_tokens": fitting.micro_tokens,
        "kept_blocks": fitting.kept_blocks,
        "ranks": ALONE,
    }
    assert fitting.micro_tokens > run.scale.micro_batch_rows


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize(("tier", "device"), [(Tier.PAPER, "cpu"), (Tier.SMOKE, "cuda")])
def test_other_policies_keep_the_rows_of_their_scale(tier: Tier, device: str) -> None:
    loaded_runs = loaded_runs_of(tier, device)
    assert train.fitting_update(loaded_runs.runs[0], loaded_runs.loaded.device) is None
