"""What a plan says of runs that are recorded already, here or among the blessed."""

from __future__ import annotations

import dataclasses
import shutil
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.evidence.record import Estimate, Record
from repro.evidence.store import stored_path, write_stored
from repro.models.checkpoint import TINY_FOLDER
from repro.models.memory_plan import CONTEXT_BYTES
from repro.run import plan as plans
from repro.run import preflight as preflights
from repro.run.disk import size
from repro.run.places import expected_folder
from repro.run.plan import plan_text
from repro.run.preflight import memory_of
from repro.run.select import Selection, select
from repro.spec.shapes import TINY
from repro.spec.target import plan
from repro.spec.tier import CudaDevice, Tier
from tests.repro.made_up import honest_record, planned_record
from tests.repro.planned import STUDY

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
    for module in (plans, preflights):
        monkeypatch.setattr(module, "cuda_devices", lambda: (H100,))
    (run,) = selection.plan(1, ["nvfp4_lora"])
    room = memory_of(run.arm, run.scale)[0] - CONTEXT_BYTES
    to_do = planned_memory(selection, tmp_path)
    assert to_do.endswith(size(memory_of(run.arm, run.scale)[0]))
    having_taken(honest_record(run), 130.0, 1.02 * room).write(tmp_path)
    (line,) = measured_lines(selection, tmp_path)
    assert line.startswith("  measured  nvfp4_lora seed 0: 130 s; peak ")
    assert line.endswith("GB (+2.0 % against the plan)")
    assert planned_memory(selection, tmp_path) == to_do
    # Without a device the planned peak would be another one.
    for module in (plans, preflights):
        monkeypatch.setattr(module, "cuda_devices", tuple)
    (line,) = measured_lines(selection, tmp_path)
    assert line == "  measured  nvfp4_lora seed 0: 130 s"


def arm_lines(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, str]:
    """Return what a plan says behind each first word."""
    assert main(["plan", *line]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    return {words[0]: words[1] for text in lines if len(words := text.split(maxsplit=1)) == 2}


@pytest.mark.usefixtures("planned_targets")
def test_a_plan_quotes_blessed_records_of_an_arm_or_says_that_it_is_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, records = tmp_path / "expected", []
    shutil.copytree(expected_folder(None) / "paper", expected / "paper")
    for seconds, run in enumerate(plan(STUDY, Tier.MINI, None, ["bf16", "nvfp4_lora_aqn"])):
        record = having_taken(planned_record(run), 40.0 + seconds, 1.0)
        effects = record.effects | {"together": {"runs": 20}}
        records.append(dataclasses.replace(record, effects=effects))
    metrics = [metric.name for metric in STUDY.metrics]
    write_stored(stored_path(expected, "mini", STUDY.name, "nvidia_h200"), metrics, records)
    folders = ["--tier", "mini", "--expected", str(expected), "--runs", str(tmp_path / "new")]
    said = arm_lines(capsys, "study", *folders)
    assert said["bf16"].endswith(" s for 20 at once")
    assert said["bf16_lora"].endswith(" not timed")
    commit = records[0].commit[:7]
    assert said["timed"] == f"median of 20 blessed records of nvidia_h200 at {commit}"
    said = arm_lines(capsys, "study_schedules", *folders)
    # Run and recorded as the study's.
    assert said["nvfp4_lora_aqn"].endswith(" at once")
    assert said["aqn_linear"].endswith(" not timed")
    said = arm_lines(capsys, "study_harm", *folders)
    assert said["bf16_harm"].endswith(" not timed")
    assert said["timed"] == "no blessed record of these arms"


def test_a_plan_on_a_folder_tells_its_sizes_or_why_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(TINY_FOLDER, folder)
    line = ["plan", "table1", "--tier", "smoke", "--arms", "nvfp4_lora", "--model", str(folder)]
    assert main(line) == 0
    words = f"own: {TINY.parameters() / 1e6:.4g} million parameters, 4 blocks of width 128"
    assert words in capsys.readouterr().out
    for text, sentence in (("{", "config.json cannot be read"), ("[]", "no decoder's sizes")):
        (folder / "config.json").write_text(text)
        assert main(line) == 2
        assert sentence in capsys.readouterr().err
