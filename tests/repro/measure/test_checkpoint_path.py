"""A checkpoint's way on a small shape: every stage, and what the record says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from repro.measure.checkpoint_path import carry_through, in_own_process, quantise
from repro.spec.step_scale import CheckpointScale
from repro.targets.memory import CHECKPOINT_PATH
from tests.repro.measure import conftest as small

H, I = 256, 512
SHAPE = small.SHAPE | {"hidden_size": H, "intermediate_size": I, "tie_word_embeddings": False}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(
            not torch.cuda.is_available(), reason="needs a CUDA device; found none"
        )),
    ],
)  # fmt: skip
def test_a_checkpoint_is_written_quantised_loaded_and_stepped(
    tmp_path: Path, device: str, request: pytest.FixtureRequest
) -> None:
    if device == "cpu":
        request.getfixturevalue("host_clock")
    scale = CheckpointScale(model="0.5b", group=4, prompt_tokens=20, completion_tokens=8)
    result = carry_through(in_this_process, tmp_path, SHAPE, scale, 0, device)
    named = {metric.name: metric.unit for metric in CHECKPOINT_PATH.metrics}
    assert {name: estimate.unit for name, estimate in result.metrics.items()} == named
    values = {name: estimate.value or 0.0 for name, estimate in result.metrics.items()}
    # Two blocks of 16-bit projections became 4.5 bits a weight; the embeddings stayed.
    saved = values["source_bytes"] - values["quantised_bytes"]
    projections = 2 * (2 * H * H + 2 * H * H // 2 + 3 * H * I)
    assert saved == pytest.approx(projections * (16 - 4.5) / 8, rel=0.1)
    assert all(value > 0 for name, value in values.items() if "device" not in name)
    assert result.facts["linears"] == {"nvfp4": 14}
    assert result.facts["linears_quantised"] == 14
    assert result.facts["trained_change_l2"] > 0
    assert not (tmp_path / "source").exists()


def in_this_process(work: Any, **settings: Any) -> dict[str, Any]:
    report: dict[str, Any] = work(**settings)
    return report


def test_a_stage_runs_in_a_process_of_its_own_and_its_failure_is_told(tmp_path: Path) -> None:
    source = tmp_path / "none"
    with pytest.raises(Exception, match=str(source)):
        in_own_process(quantise, source=str(source), quantised=str(tmp_path / "out"), device="cpu")
