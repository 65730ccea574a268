"""Captions: how many seeds each arm has, and where learning rates differ."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest

from figures.__main__ import main
from figures.captions import ArmRow, caption, rates_text, seeds_text

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURES = ROOT / "docs" / "figures"


def row(arm: str, n: int, rate: float | None = None) -> ArmRow:
    return ArmRow(arm=arm, n=n, rate=rate)


def test_numbers_of_seeds_are_said_once_and_arms_with_others_named() -> None:
    assert seeds_text([row("bf16_lora", 1)]) == "1 seed per arm"
    rows = [row("bf16_lora", 5), row("nf4_lora", 5), row("nvfp4_lora", 4), row("nvfp4_lora", 3)]
    assert seeds_text(rows) == "5 seeds per arm (NVFP4 LoRA 3 to 4)"


def test_learning_rates_are_named_where_they_differ() -> None:
    rows = [row("bf16_lora", 5, 1e-3), row("nf4_lora", 5, 1e-3), row("nvfp4", 5)]
    assert rates_text(rows) == ""
    rows += [row("mxfp4_lora", 5, 3e-3)]
    other = "0.003 for MXFP4 LoRA"
    assert rates_text(rows) == f"learning rates differ: 0.001 for BF16 LoRA, NF4 LoRA; {other}"
    rows += [row("nvfp4_lora", 5, 1e-3)]
    assert rates_text(rows) == f"learning rates differ: 0.001 for most arms; {other}"
    assert caption(rows, "means").count("\n") == 1


@pytest.mark.parametrize("tier", ["systems", "mini"])
def test_the_pictures_in_docs_are_those_of_the_blessed_records(tier: str, tmp_path: Path) -> None:
    if not PICTURES.is_dir():
        pytest.skip("docs/ is not part of an installed package")
    committed = {path.name: path.read_bytes() for path in PICTURES.glob(f"{tier}_*.svg")}
    made_by = f"Matplotlib v{matplotlib.__version__}".encode()
    line = ["--blessed", "--tier", tier, "--kinds", "svg", "--out", str(tmp_path)]
    assert main([*line, "--expected", str(ROOT / "expected")]) == 0
    drawn = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    stale = f"stale: python -m figures --blessed --tier {tier} --kinds svg --out docs/figures"
    assert committed
    assert committed.keys() <= drawn.keys(), stale
    if not all(made_by in text for text in committed.values()):
        pytest.skip("the pictures were drawn with another matplotlib than this one")
    assert not [name for name in committed if drawn[name] != committed[name]], stale
