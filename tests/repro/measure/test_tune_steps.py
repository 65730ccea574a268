"""Launches chosen by whole steps: products that disturb one another, refusals, a real table."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import tune, tune_candidates, tuning
from kernels.fused_adapter import Joining
from kernels.hopper import Choice
from repro.__main__ import main
from repro.measure.tune_steps import Key, Way, choose_by_steps, left_to_choose, main_tune_steps

FIRST, SECOND = (4608, 3584, 1), (3584, 3584, 1)
SMALL, LARGE, BROKEN = (
    (Choice(path="narrow", warps=warps), Joining(join="extra", parts=4)) for warps in (5, 14, 7)
)
TABLE = tuning.FOLDER / "nvidia-h100-80gb-hbm3.json"


def clock(ways: Mapping[Key, Way]) -> float:
    """Alone each is fastest when it is large; two that are large leave no room for each other."""
    if BROKEN in ways.values():
        raise RuntimeError("too many resources requested for launch")
    alone = sum(3.0 if way == SMALL else 2.0 for way in ways.values())
    return alone + 4.0 * (ways[FIRST] == LARGE and ways[SECOND] == LARGE)


@pytest.mark.parametrize("present", [LARGE, SMALL])
def test_products_are_chosen_for_the_step_that_they_stand_in(present: Way) -> None:
    candidates = {FIRST: [BROKEN, SMALL, LARGE], SECOND: [LARGE, SMALL]}
    chosen = choose_by_steps({FIRST: present, SECOND: present}, candidates, clock)
    assert sorted(chosen.values(), key=str) == sorted([SMALL, LARGE], key=str)
    assert clock(chosen) == 5.0


def test_what_the_table_has_stays_where_nothing_is_faster() -> None:
    present = {FIRST: SMALL, SECOND: SMALL}
    candidates = {key: [BROKEN, LARGE, SMALL] for key in present}
    assert choose_by_steps(present, candidates, lambda ways: 1.0) == present
    assert candidates[FIRST] == [BROKEN, LARGE, SMALL]


def test_entries_that_a_step_has_chosen_are_not_chosen_again() -> None:
    table = {
        "adapted": [{"N": 4608, "K": 3584, "M": 1, "step_us": 415.0}, {"N": 1, "K": 1, "M": 1}]
    }
    left = left_to_choose(table, "7b", 1)
    assert {(e.N, e.K) for e in left} == set(tune.LAYERS["7b"].values()) - {(4608, 3584)}
    assert all(e.adapted and e.M == 1 for e in left)
    assert len(left_to_choose(table, "7b", 8)) == 4


def test_a_way_that_is_tried_comes_before_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    caches = (tuning.stored_table, tuning.adapted_table, tuning.choose_adapted)
    for cache in caches:
        cache.cache_clear()
    try:
        stored = tuning.choose_adapted(0, *FIRST)
        assert stored not in (SMALL, LARGE)
        with tuning.trying({FIRST: SMALL}):
            assert tuning.choose_adapted(0, *FIRST) == SMALL
            assert tuning.choose_adapted(0, *SECOND) != SMALL
        assert tuning.choose_adapted(0, *FIRST) == stored
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.json"], "missing.json is no file"),
        ([str(TABLE), "--models", "7b,9b"], "names 9b; it takes 7b, 32b"),
        ([str(TABLE), "--rows", "2"], "names 2; it takes 1, 8, 16"),
        ([str(TABLE), "--rows", ","], "names nothing"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune-steps", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_without_a_hopper_gpu_there_is_nothing_to_tune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune-steps", str(TABLE)]) == 2
    assert "needs a CUDA device of compute capability 9.0" in capsys.readouterr().err


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.gpu
@pytest.mark.skipif(not _hopper(), reason="needs a Hopper GPU, whose launches the table holds")
def test_a_real_table_is_chosen_once_and_refused_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = list(tune_candidates.with_adapter(1))

    def few(M: int) -> Iterator[Way]:
        yield from every[:: len(every) // 3]

    monkeypatch.setattr(tune_candidates, "with_adapter", few)
    path = tmp_path / "table.json"
    stored = tuning.FOLDER / f"{tuning.device_slug(torch.cuda.get_device_name())}.json"
    if not stored.is_file():
        pytest.skip(f"there is no tuned table of {torch.cuda.get_device_name()} to start from")
    shutil.copy(stored, path)
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for entry in table["adapted"]:
        entry.pop("step_us", None)
    path.write_text(json.dumps(table), encoding="utf-8")
    asked = argparse.Namespace(table=str(path), models="7b", rows="1")
    import triton

    if (table["torch"], table["triton"]) != (torch.__version__, triton.__version__):
        with pytest.raises(ValueError, match="make one here first"):
            main_tune_steps(asked)
        return
    assert main_tune_steps(asked) == 0
    after = json.loads(path.read_text(encoding="utf-8"))
    assert after["entries"] == table["entries"]
    chosen = [entry for entry in after["adapted"] if "step_us" in entry]
    assert {(e["N"], e["K"], e["M"]) for e in chosen} == {
        (N, K, 1) for N, K in tune.LAYERS["7b"].values()
    }
    assert all(0 < entry["step_us"] < 10_000 for entry in chosen)
    assert main_tune_steps(asked) == 0
    assert "chosen before" in capsys.readouterr().out
    assert json.loads(path.read_text(encoding="utf-8")) == after
    path.write_text(json.dumps(after | {"device": "NVIDIA A100"}), encoding="utf-8")
    with pytest.raises(ValueError, match="make one here first"):
        main_tune_steps(asked)
