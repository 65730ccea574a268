"""`bless --device`: a new card's baseline in one command, from whatever has complete records."""

import shutil

import pytest

from repro.__main__ import main
from repro.judge import blessing as bless_command
from repro.run.places import expected_folder
from tests.repro.made_up import on_device
from tests.repro.recorded_steps import write_steps

CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def line(tmp_path, monkeypatch):
    """Return the command on a folder with records of one new card, on a machine without a GPU."""
    monkeypatch.setattr(bless_command, "capture_environment", lambda: {"gpu": []})
    shutil.copytree(expected_folder(None) / "paper", tmp_path / "expected" / "paper")
    write_steps(tmp_path / "runs", spoil=lambda record: on_device(record, CARD))
    where = ["--runs", str(tmp_path / "runs"), "--expected", str(tmp_path / "expected")]
    return ["bless", "--device", *where]


def test_what_is_recorded_is_blessed_under_the_cards_name(tmp_path, line, capsys):
    assert main([*line, "--tier", "systems"]) == 0
    said = capsys.readouterr().out.splitlines()
    folder = tmp_path / "expected" / "records" / "systems" / "nvidia_h100_80gb_hbm3"
    assert f"blessed: table3 ({folder})" in said
    assert any(text.startswith("left out: memory at the systems tier") for text in said)
    assert said[-1].startswith("1 of ")
    where = ["--expected", str(tmp_path / "expected")]
    assert main(["compare", "blessed", str(tmp_path / "runs"), *where]) == 0


def test_records_of_another_card_are_left_out(tmp_path, line, capsys, monkeypatch):
    gpu = {"gpu": [{"name": "NVIDIA H200"}]}
    monkeypatch.setattr(bless_command, "capture_environment", lambda: gpu)
    assert main([*line, "table3"]) == 2
    said = capsys.readouterr().out
    assert "table3: records of nvidia_h100_80gb_hbm3" in said
    assert not (tmp_path / "expected" / "records").exists()
