"""Tables: whole, told apart by device, choices by steps first; an entry says its way."""

import json

import pytest

from kernels import tune, tuning
from kernels.cuda.fused_adapter import Joining
from kernels.cuda.hopper import Choice

H100 = 132  # its multiprocessors, and an H200's
TABLES = sorted(tuning.FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", TABLES, ids=[path.stem for path in TABLES])
def test_a_table_has_one_entry_for_every_layer_and_row_count(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert tuning.device_slug(content["device"]) == path.stem
    expected = [(entry.part, entry.N, entry.K, entry.M) for entry in tune.all_entries()]
    listed = [
        (part, entry["N"], entry["K"], entry["M"])
        for part in ("entries", "adapted")
        for entry in content[part]
    ]
    assert sorted(listed) == sorted(expected)


def test_an_entry_says_the_way_it_was_made_from():
    for layer_entry in tune.all_entries():
        for choice, joining in layer_entry.ways(H100):
            entry = tune.entry_of(layer_entry, (choice, joining))
            made = tuning.way_of(entry)
            assert made == (choice, joining or made[1])


SMALL, LARGE = (
    (Choice(path="narrow", warps=warps), Joining(join="extra", parts=4)) for warps in (5, 14)
)


@pytest.fixture
def stored(monkeypatch):
    """Give the H200's table some entries chosen in steps, and let every device read it."""
    table = json.loads((tuning.FOLDER / "nvidia-h200.json").read_text(encoding="utf-8"))
    table["in_steps"] = [
        {"N": 4608, "K": 3584, "M": rows, "warps": warps, "join": "extra", "parts": 4, "rank": 32}
        for rows, warps in ((1, 5), (8, 14))
    ]
    monkeypatch.setattr(tuning, "stored_table", lambda device: table)
    caches = (tuning.part_of, tuning.choose_adapted)
    for cache in caches:
        cache.cache_clear()
    yield table
    for cache in caches:
        cache.cache_clear()


def test_choices_by_steps_are_for_their_own_sizes_and_ranks(stored):
    adapted = {M: tuning.way_of(e) for M, e in tuning.part_of(0, "adapted")[4608, 3584].items()}
    by_step = {rows: tuning.choose_adapted(0, 4608, 3584, rows, 32) for rows in (1, 4, 8, 16)}
    assert by_step == {1: SMALL, 4: LARGE, 8: LARGE, 16: adapted[16]}
    assert tuning.choose_adapted(0, 4608, 3584, 1, 16) == SMALL
    alone = adapted[1]
    assert alone not in (SMALL, LARGE)
    assert tuning.choose_adapted(0, 4608, 3584, 1, 64) == alone
    assert tuning.choose_adapted(0, 4608, 3584, 1, 32, steps=False) == alone
    assert tuning.choose_adapted(0, 4600, 3584, 1, 32) == alone
