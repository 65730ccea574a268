"""What a plan says of runs that are recorded already."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from repro.evidence.record import Estimate, Record
from repro.models.memory_plan import CONTEXT_BYTES
from repro.run import plan as plans
from repro.run import preflight as preflights
from repro.run import select as selecting
from repro.run.disk import size
from repro.run.places import expected_folder
from repro.run.plan import plan_text
from repro.run.preflight import memory_of
from repro.run.select import Selection, select
from repro.spec.tier import CudaDevice, Tier
from tests.repro.made_up import honest_record

H100 = CudaDevice(name="NVIDIA H100", capability=(9, 0), memory_bytes=85_000_000_000)


def having_taken(record: Record, seconds: float, peak_bytes: float) -> Record:
    begun = datetime.fromisoformat(record.started)
    peak = Estimate(value=peak_bytes, unit="bytes")
    return dataclasses.replace(
        record,
        finished=(begun + timedelta(seconds=seconds)).isoformat(),
        metrics={**record.metrics, "peak_bytes": peak},
    )


def planned_memory(selection: Selection, runs: Path) -> str:
    text = plan_text(selection, selection.plan(1, ["nvfp4_lora"]), runs, expected_folder(None))
    (line,) = [line for line in text.splitlines() if line.startswith("  memory ")]
    return line


def measured_lines(selection: Selection, runs: Path) -> list[str]:
    text = plan_text(selection, selection.plan(1, ["nvfp4_lora"]), runs, expected_folder(None))
    return [line for line in text.splitlines() if line.startswith("  measured")]


def test_a_recorded_run_on_a_published_checkpoint_stands_beside_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (selection,) = select(["table1"], tier="paper")
    assert measured_lines(selection, tmp_path) == []
    for module in (plans, preflights, selecting):
        monkeypatch.setattr(module, "cuda_devices", lambda: (H100,))
    (run,) = selection.plan(1, ["nvfp4_lora"])
    (selection,) = select(["table1"], tier="paper")
    seconds = selection.source.costs[Tier.PAPER].seconds_of_arm["nvfp4_lora"]
    room = memory_of(run.arm, run.scale)[0] - CONTEXT_BYTES
    to_do = planned_memory(selection, tmp_path)
    assert to_do.endswith(size(memory_of(run.arm, run.scale)[0]))
    having_taken(honest_record(run), 1.1 * seconds, 1.02 * room).write(tmp_path)
    (line,) = measured_lines(selection, tmp_path)
    assert line.startswith(f"  measured  nvfp4_lora seed 0: {1.1 * seconds:.0f} s (+10.0 % ")
    assert line.endswith("GB (+2.0 % against the plan)")
    assert planned_memory(selection, tmp_path) == to_do
    # Without a device the planned peak would be another one.
    for module in (plans, preflights, selecting):
        monkeypatch.setattr(module, "cuda_devices", tuple)
    (line,) = measured_lines(selection, tmp_path)
    assert line.endswith(" s (+10.0 % against the plan)")
