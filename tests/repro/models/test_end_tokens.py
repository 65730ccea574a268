"""End tokens that `generation_config.json` alone names reach samplers; broken ones are refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from repro.models.checkpoint import TINY_FOLDER
from repro.models.files.tensor_files import CheckpointError
from repro.models.policy import end_token_ids, load_policy
from repro.procedures.train import train_and_evaluate
from repro.rl.single_run.torch_sampler import TorchSampler
from tests.repro.models.conftest import random_model
from tests.repro.procedures.test_together import SCALE, make_run, silent


@pytest.fixture
def with_ends(tmp_path: Path) -> Callable[[Any], Path]:
    """Return a function that writes a checkpoint whose generation config names end tokens."""

    def write(ends: Any) -> Path:
        random_model("qwen2", eos_token_id=1).save_pretrained(tmp_path)
        path = tmp_path / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": ends, "do_sample": True}), encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("stored", "ends"),
    [(2, [1, 2]), ([2, 3], [1, 2, 3]), ([], [1]), (None, [1]), (1, [1]), ([96], [1, 96])],
)
def test_end_tokens_are_those_of_both_configs(with_ends: Any, stored: Any, ends: list[int]) -> None:
    policy = load_policy(with_ends(stored), weight_format="bf16")
    assert sorted(end_token_ids(policy)) == policy.effects["end_token_ids"] == ends
    assert TorchSampler(policy).end_token_ids == frozenset(ends)


@pytest.mark.parametrize("stored", ["2", [1, "2"], [1.0], -1, True, {"id": 2}])
def test_end_tokens_that_are_no_token_ids_are_refused(with_ends: Any, stored: Any) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is .*needed"):
        load_policy(with_ends(stored), weight_format="bf16")


def test_a_run_trains_on_rows_that_end_there(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(TINY_FOLDER, folder)
    ends = [1, *range(20, 333, 3)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    scale = dataclasses.replace(SCALE, checkpoint=str(folder), steps=1, test_sets=())
    measured = train_and_evaluate(
        dataclasses.replace(make_run(0), scale=scale),
        folder=tmp_path / "run",
        progress=silent,
        should_stop=lambda: False,
        threads=1,
    )
    assert measured.effects["end_token_ids"] == ends
    rows = measured.effects["rows"]
    assert rows["truncated"] < rows["trained_on"] / 2
