"""The page of findings: drawn from records alone, each verdict under its heading."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from repro import findings
from repro.__main__ import main
from repro.evidence.record import Record
from repro.selection import select
from repro.targets.chosen_rates import read_choice

Maker = Callable[..., Record]


def page(runs: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", "--findings", str(out), "--runs", str(runs)]) == 0
    assert "wrote" in capsys.readouterr().out
    return out.read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    return text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_each_claim_stands_under_its_verdict(
    tmp_path: Path, proxy_record: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    (selection,) = select(["figure9"], tier="proxy")
    shifts = {"nvfp4_lora_aqn": 10.0, "aqn_linear": 20.0, "aqn_cosine": 0.0}
    for run in selection.plan():
        if run.arm.name != "aqn_logarithmic":
            proxy_record(run, shifts[run.arm.name]).write(tmp_path / "runs")
    text = page(tmp_path / "runs", tmp_path / "findings.md", capsys)
    assert "more accurate than the cosine one" in section(text, "Holds here")
    assert "more accurate than the linear one" in section(text, "Does not hold here")
    assert "more accurate than the logarithmic one" in section(text, "Not run")
    row = next(line for line in text.splitlines() if "than the linear one" in line)
    effect = float(row.split("|")[3].split()[0])
    assert -14 < effect < -6
    assert "15 different runs" in text
    assert ("Chosen on tuning seeds" in text) == (read_choice() is not None)


def test_rates_that_no_sweep_chose_are_said_to_be_the_middle_of_the_grid(
    tmp_path: Path,
    proxy_record: Maker,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (selection,) = select(["figure9"], tier="proxy")
    proxy_record(selection.plan()[0], 0.0).write(tmp_path / "runs")
    monkeypatch.setattr(findings, "read_choice", lambda: None)
    text = page(tmp_path / "runs", tmp_path / "findings.md", capsys)
    assert "No sweep has been made" in text


def test_an_undecided_claim_says_how_many_pairs_would_decide(
    tmp_path: Path, proxy_record: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    (selection,) = select(["figure9"], tier="proxy")
    for run in selection.plan():
        proxy_record(run).write(tmp_path / "runs")
    text = page(tmp_path / "runs", tmp_path / "findings.md", capsys)
    undecided = section(text, "Cannot be told with these seeds")
    row = next(line for line in undecided.splitlines() if "figure9" in line)
    needed = row.split("|")[-2].strip()
    assert needed == "more than 1000" or int(needed) > 5


def test_without_records_nothing_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    text = page(tmp_path / "runs", tmp_path / "findings.md", capsys)
    assert "0 hold, 0 do not, 0 cannot be told" in text
    assert "Holds here" not in text
    shutil.rmtree(tmp_path / "runs")
