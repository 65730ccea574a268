"""Bundles: judged elsewhere they say the same; what is no record or plan never reaches a disk."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.judge import bundle
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import honest_record

SEED = "smoke/table1/bf16_lora/seed-7.json"
LINK = 0o120777 << 16


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Return a bundle of Table 1's two arms with two seeds each, whose runs lie beside it."""
    for run in plan(find("table1"), Tier.SMOKE, 2, ["bf16_lora", "nvfp4_lora_aqn"]):
        honest_record(run).write(tmp_path / "runs")
    file = tmp_path / "table1.zip"
    line = ["bundle", str(file), "table1", "--tier", "smoke", "--runs", str(tmp_path / "runs")]
    assert main(line) == 0
    assert main(line) == 2, "a bundle is never overwritten"
    return file


def test_a_bundle_is_judged_as_the_runs_are(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    status = main(["check", "table1", "--tier", "smoke", "--runs", str(packed.parent / "runs")])
    said = capsys.readouterr().out
    assert main(["bundle", "--verify", str(packed)]) == status
    assert capsys.readouterr().out == said
    assert "4 records" in said


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../seed-7.json", "no name of a record"),
        ("/smoke/table1/bf16_lora/seed-7.json", "no name of a record"),
        ("smoke/table1/../seed-7.json", "no name of a record"),
        ("smoke\\..\\bf16_lora\\seed-7.json", "no name of a record"),
        ("smoke/table1/bf16_lora/conftest.py", "no name of a record"),
        ("smoke/table1/bf16_lora/", "no name of a record"),
        (SEED.replace("7", "0"), "twice"),
        (SEED, "deflate"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_what_has_no_place_in_a_bundle_is_refused(packed: Path, name: str, reason: str) -> None:
    scratch = packed.parent / "scratch" / "inner"
    scratch.mkdir(parents=True)
    method = zipfile.ZIP_BZIP2 if reason == "deflate" else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr(name, "{}", compress_type=method)
    with pytest.raises(ValueError, match=reason):
        bundle.unpack(packed, scratch)
    left = {path.name for path in packed.parent.rglob("*") if path.is_file()}
    assert left == {"table1.zip", "seed-0.json", "seed-1.json"}


@pytest.mark.parametrize(("limit", "most"), [("MOST_FILES", 3), ("MOST_BYTES", 99)])
def test_large_bundles_are_refused_while_they_are_read(
    packed: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(bundle, limit, most)
    assert main(["bundle", "--verify", str(packed)]) == 2


def test_links_and_edited_records_are_refused_by_the_check(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = zipfile.ZipInfo(SEED)
    link.external_attr, link.compress_type = LINK, zipfile.ZIP_DEFLATED
    edited = (packed.parent / "runs" / SEED).with_name("seed-1.json").read_text(encoding="utf-8")
    with zipfile.ZipFile(packed, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(link, str(packed.parent / "runs" / SEED.replace("7", "0")))
        archive.writestr(SEED.replace("7", "8"), edited.replace("bf16_lora", "bf16_full"))
    assert main(["bundle", "--verify", str(packed)]) == 1
    assert capsys.readouterr().out.count("\nrefused ") == 2


def test_damaged_files_and_other_targets_are_a_sentence(packed: Path) -> None:
    whole = packed.read_bytes()
    for damaged in (b"", whole[:-9], whole.replace(b"table1 smoke", b"tableX smoke"), whole[2000:]):
        packed.write_bytes(damaged)
        assert main(["bundle", "--verify", str(packed)]) == 2
