"""A checkpoint's way on a small shape: every stage, and what the record says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.measure import checkpoint_stage
from repro.measure.checkpoint_path import carry_through, run_stage
from repro.spec.checkpoint_path import CheckpointScale
from repro.targets.memory import CHECKPOINT_PATH
from tests.repro.measure import conftest as small

SHAPE = small.SHAPE | {"tie_word_embeddings": False}
SCALE = CheckpointScale(model="0.5b", group=2, prompt_tokens=16, completion_tokens=8)


def in_this_process(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    # As through a pipe, so that what a stage takes and gives is JSON.
    report = checkpoint_stage.STAGES[name](**json.loads(json.dumps(settings)))
    stored: dict[str, Any] = json.loads(json.dumps(report))
    return stored


@pytest.mark.usefixtures("host_clock")
def test_a_checkpoint_is_written_quantised_loaded_and_stepped(tmp_path: Path) -> None:
    result = carry_through(in_this_process, tmp_path, SHAPE, SCALE, 0, "cpu")
    named = {metric.name: metric.unit for metric in CHECKPOINT_PATH.metrics}
    assert {name: estimate.unit for name, estimate in result.metrics.items()} == named
    values = {name: estimate.value or 0.0 for name, estimate in result.metrics.items()}
    # Two blocks of 16-bit projections became 4.5 bits a weight; the embeddings stayed.
    saved = values["source_bytes"] - values["quantised_bytes"]
    assert saved == pytest.approx(2 * 36_864 * (16 - 4.5) / 8, rel=0.1)
    assert all(value > 0 for name, value in values.items() if "device" not in name)
    assert result.effects["linears"] == {"nvfp4": 14}
    assert result.effects["linears_quantised"] == 14
    assert result.effects["trained_change_l2"] > 0
    assert not (tmp_path / "source").exists()


def test_a_stage_runs_in_a_process_of_its_own_and_its_failure_is_told(tmp_path: Path) -> None:
    settings = {"source": str(tmp_path / "none"), "quantised": str(tmp_path / "out")}
    with pytest.raises(RuntimeError, match="stage quantise failed"):
        run_stage("quantise", settings | {"device": "cpu"})


def test_what_other_processes_hold_is_not_a_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(checkpoint_stage.STAGES, "load", lambda **_: {"device_bytes": 5000})
    assert checkpoint_stage.main(["load", "{}", "3000"]) == 0
    assert json.loads(capsys.readouterr().out) == {"device_bytes": 2000}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here, so it would measure")
def test_without_a_device_the_procedure_says_so(tmp_path: Path) -> None:
    from repro.run.carry_out import procedure_named
    from repro.spec.config import RunConfig

    run = RunConfig(
        target="checkpoint_path", target_version=1, tier="systems", procedure="checkpoint_path",
        arm=CHECKPOINT_PATH.arms[0], scale=SCALE, seed=0,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no CUDA device"):
        procedure_named("checkpoint_path")(
            run, folder=tmp_path, progress=lambda *a: None, should_stop=lambda: False, threads=1
        )
