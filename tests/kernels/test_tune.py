"""Tables of choices: whole, told apart by device, gone on with; what a candidate compiles from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import fused_adapter, hopper, tune, tuning
from kernels.fused_adapter import Joining
from kernels.hopper import Choice

H100 = 132  # its multiprocessors, and an H200's
HEAD = {"device": "NVIDIA H100", "torch": "2.11.0", "triton": "3.6.0", "command": "tune"}
TABLES = sorted(tuning.FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", TABLES, ids=[path.stem for path in TABLES])
def test_a_table_has_one_entry_for_every_layer_and_row_count(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert tuning.device_slug(content["device"]) == path.stem
    expected = [(entry.part, entry.N, entry.K, entry.M) for entry in tune.all_entries()]
    listed = [
        (part, entry["N"], entry["K"], entry["M"])
        for part in ("entries", "adapted")
        for entry in content[part]
    ]
    assert sorted(listed) == sorted(expected)


def test_an_entry_says_the_way_it_was_made_from() -> None:
    for layer_entry in tune.all_entries((1, 16, 512)):
        for choice, joining in layer_entry.ways(H100):
            entry = tune.entry_of(layer_entry, (choice, joining))
            assert tuning._made(Choice, {"path": "narrow"} | entry) == choice
            if joining is not None:
                assert tuning._made(Joining, entry) == joining


def test_a_table_goes_on_with_what_it_has_and_refuses_another_devices(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    first, second = tune.all_entries((1, 512))[:2]
    way = next(first.ways(H100))
    table = tune.Table(out, HEAD)
    table.add(first, way)
    again = tune.Table(out, HEAD)
    assert again.has(first)
    assert not again.has(second)
    again.add(second, next(second.ways(H100)))
    written = json.loads(out.read_text(encoding="utf-8"))
    rows = [entry["M"] for part in ("entries", "adapted") for entry in written[part]]
    assert sorted(rows) == sorted([first.M, second.M])
    with pytest.raises(ValueError, match="name another file"):
        tune.Table(out, HEAD | {"device": "NVIDIA H200"})
    assert json.loads(out.read_text(encoding="utf-8")) == written


def test_what_is_compiled_ahead_is_what_the_kernels_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of each candidate asks for sources and macros that were compiled before."""
    asked: list[tuple[Any, ...]] = []

    def load(files: Any, name: str, macros: Any, *rest: Any) -> None:
        asked.append((files, tuple(sorted(dict(macros).items()))))
        raise NotImplementedError

    monkeypatch.setattr(hopper.driver, "load", load)
    monkeypatch.setattr(fused_adapter.driver, "load", load)
    for layer_entry in tune.all_entries((1, 16, 512))[:6]:
        weight = tune.PackedWeight(
            format="nvfp4", shape=(layer_entry.N, layer_entry.K), gain=torch.ones(()), extras={},
            packs=torch.empty(layer_entry.N // 16, layer_entry.K // 256, 1, dtype=torch.uint8),
        )  # fmt: skip
        adapter = tune.Adapter(
            a=torch.zeros(tune.RANK, layer_entry.K), b=torch.zeros(layer_entry.N, tune.RANK)
        )
        x, out = (
            torch.zeros(layer_entry.M, layer_entry.K),
            torch.zeros(layer_entry.M, layer_entry.N),
        )
        ways = [way for way in layer_entry.ways(H100) if way[0].path != "dense"]
        ahead = [
            (files, tuple(sorted(macros.items())))
            for files, macros in tune.builds(layer_entry, H100)
        ]
        asked.clear()
        for way in itertools.islice(ways, 0, None, 7):
            with pytest.raises(NotImplementedError):
                tune._call(x, weight, adapter, out, way)()
        assert asked == ahead[::7]
