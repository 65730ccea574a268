"""The queue on a real device: an error that spoils a context."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from repro.run.execute import execute
from repro.run.several_ranks.room import Room
from repro.spec.tier import Tier
from tests.planted import planted
from tests.repro.procedures.conftest import SCALE
from tests.repro.small_runs import small_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none"),
]
# The first run's first attempt reads beside a tensor, which spoils its process's device context.
SPOILING = """
import os
from datetime import UTC, datetime
import torch
from repro.evidence.record import Measured, record_of

def carry_out(runs, records, context):
    spoilt = records / "spoilt"
    if runs[0].seed == 0 and not spoilt.exists():
        spoilt.write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")].sum().item()
    assert torch.ones(8, device="cuda").sum().item() == 8
    for run in runs:
        record_of(run, Measured(), environment={}, started=datetime.now(UTC)).write(records)
"""


@pytest.fixture
def spoiling(tmp_path, monkeypatch):
    return planted("spoiling", SPOILING, tmp_path, monkeypatch)


def runs_of(seeds):
    """Return small runs of a tier that trains on a device."""
    runs = [small_run(SCALE, seed=seed) for seed in range(seeds)]
    return [dataclasses.replace(run, tier=Tier.MINI.value) for run in runs]


def test_an_error_that_spoils_a_context_is_survived(tmp_path, spoiling):
    runs, folder, said = runs_of(4), tmp_path / "runs", io.StringIO()
    folder.mkdir()
    outcome = execute(
        runs,
        folder,
        room=Room(devices=("0",)),
        console=Console(file=said, width=200),
        carry_out=spoiling.carry_out,
    )
    text = said.getvalue()
    assert (outcome.finished, outcome.failed, outcome.left) == (4, 0, 0), text
    assert (folder / "spoilt").read_text(encoding="utf-8") == "0"
    assert "again" in text
    assert "CUDA error" in text
