"""Launches chosen by whole steps: products that disturb one another, refusals, a real table."""

import json
import shutil
from typing import Any

import pytest
import torch

from kernels import tune, tuning
from kernels.cuda.fused_adapter import Joining
from kernels.cuda.hopper import Choice
from repro.measure.tune_steps import MODELS, choose_by_steps, left_to_choose, main, tune_steps

FIRST, SECOND = (4608, 3584, 1), (3584, 3584, 1)
SMALL, LARGE, BROKEN = (
    (Choice(path="narrow", warps=warps), Joining(join="extra", parts=4)) for warps in (5, 14, 7)
)


def clock(ways):
    """Alone each is fastest when it is large; two that are large leave no room for each other."""
    if BROKEN in ways.values():
        raise RuntimeError("too many resources requested for launch")
    alone = sum(3.0 if way == SMALL else 2.0 for way in ways.values())
    return alone + 4.0 * (ways[FIRST] == LARGE and ways[SECOND] == LARGE)


@pytest.mark.parametrize("present", [LARGE, SMALL])
def test_products_are_chosen_for_the_step_that_they_stand_in(present):
    candidates = {FIRST: [BROKEN, SMALL, LARGE], SECOND: [LARGE, SMALL]}
    chosen = choose_by_steps({FIRST: present, SECOND: present}, candidates, clock)
    assert sorted(chosen.values(), key=str) == sorted([SMALL, LARGE], key=str)
    assert clock(chosen) == 5.0


@pytest.mark.parametrize("model", MODELS)
def test_entries_that_a_step_has_chosen_are_not_chosen_again(model):
    entries = left_to_choose({}, model, 1)
    assert len(entries) == 4
    assert all(entry.adapted and entry.M == 1 for entry in entries)
    if model in tune.LAYERS:
        assert {(e.N, e.K) for e in entries} == set(tune.LAYERS[model].values())
        assert set(entries) <= set(tune.all_entries())
    first, *rest = entries
    table = {"in_steps": [{"N": first.N, "K": first.K, "M": 1}, {"N": 1, "K": 1, "M": 1}]}
    assert left_to_choose(table, model, 1) == rest
    assert len(left_to_choose(table, model, 8)) == 4


@pytest.fixture
def stored(monkeypatch):
    """Give the H200's table some entries chosen in steps, and let every device read it."""
    table = json.loads((tuning.FOLDER / "nvidia-h200.json").read_text(encoding="utf-8"))
    table["in_steps"] = [
        {"N": 4608, "K": 3584, "M": rows, "warps": warps, "join": "extra", "parts": 4, "rank": 32}
        for rows, warps in ((1, 5), (8, 14))
    ]
    monkeypatch.setattr(tuning, "stored_table", lambda device: table)
    caches = (tuning.adapted_table, tuning.step_table, tuning.choose_adapted)
    for cache in caches:
        cache.cache_clear()
    yield table
    for cache in caches:
        cache.cache_clear()


def test_choices_by_steps_are_for_their_own_sizes_and_ranks(stored):
    by_step = {rows: tuning.choose_adapted(0, 4608, 3584, rows, 32) for rows in (1, 4, 8, 16)}
    assert by_step == {
        1: SMALL, 4: LARGE, 8: LARGE, 16: tuning.adapted_table(0)[4608, 3584][16]
    }  # fmt: skip
    assert tuning.choose_adapted(0, 4608, 3584, 1, 16) == SMALL
    alone = tuning.adapted_table(0)[4608, 3584][1]
    assert alone not in (SMALL, LARGE)
    assert tuning.choose_adapted(0, 4608, 3584, 1, 64) == alone
    assert tuning.choose_adapted(0, 4608, 3584, 1, 32, steps=False) == alone
    assert tuning.choose_adapted(0, 4600, 3584, 1, 32) == alone


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--models", "7b", "9b"], "invalid choice: '9b'"),
        (["--rows", "2"], "invalid choice: 2"),
        ([], "needs a CUDA device of compute capability 9.0"),
    ],
)
def test_what_cannot_be_tuned_is_refused_with_status_2(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert sentence in capsys.readouterr().err


def _hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.gpu
@pytest.mark.skipif(not _hopper(), reason="needs a Hopper GPU, whose launches the table holds")
def test_a_real_table_is_chosen_once_and_refused_elsewhere(tmp_path, monkeypatch, request, capsys):
    every = list(tune.with_adapter(1))

    def few(M):
        yield from every[:: len(every) // 3]

    monkeypatch.setattr(tune, "with_adapter", few)
    name = f"{tuning.device_slug(torch.cuda.get_device_name())}.json"
    if not (tuning.FOLDER / name).is_file():
        pytest.skip(f"there is no tuned table of {torch.cuda.get_device_name()} to start from")
    path = tmp_path / name
    shutil.copy(tuning.FOLDER / name, path)
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.forget()
    request.addfinalizer(tuning.forget)
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    table.pop("in_steps", None)
    path.write_text(json.dumps(table), encoding="utf-8")
    import triton

    if (table["torch"], table["triton"]) != (torch.__version__, triton.__version__):
        with pytest.raises(ValueError, match="make one here first"):
            tune_steps(["7b"], [1])
        return
    tune_steps(["7b"], [1])
    after = json.loads(path.read_text(encoding="utf-8"))
    assert (after["entries"], after["adapted"]) == (table["entries"], table["adapted"])
    chosen = after["in_steps"]
    assert {(e["N"], e["K"], e["M"]) for e in chosen} == {
        (N, K, 1) for N, K in tune.LAYERS["7b"].values()
    }
    assert all(0 < entry["step_us"] < 10_000 for entry in chosen)
    tune_steps(["7b"], [1])
    assert "chosen before" in capsys.readouterr().out
    assert json.loads(path.read_text(encoding="utf-8")) == after
    path.write_text(json.dumps(after | {"torch": "2.0.0"}), encoding="utf-8")
    with pytest.raises(ValueError, match="make one here first"):
        tune_steps(["7b"], [1])
