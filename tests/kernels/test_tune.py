"""Tables of choices: whole, told apart by device; an entry says what it was made from."""

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
            assert tuning._made(Choice, {"path": "narrow"} | entry) == choice
            if joining is not None:
                assert tuning._made(Joining, entry) == joining
