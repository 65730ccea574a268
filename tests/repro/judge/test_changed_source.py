"""Records whose commit does not say what ran are marked wherever a verdict on them stands."""

import dataclasses
import json
import shutil

import pytest

from repro.__main__ import main
from repro.evidence.origins import CHANGED
from repro.report.one_page import page_text, reported_rows, reports
from repro.run.places import expected_folder
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import at_commit, honest_record, source_of

EXPECTED = expected_folder(None)
LINE = ["table1", "--tier", "smoke"]


def began_on_changes(record):
    return at_commit(record, dirty=True)


def finished_at_another(record):
    other = {"commit": "1" * 40, "dirty": False, "sha256": source_of("1" * 40)}
    return dataclasses.replace(record, sources=[*record.sources, other])


def of_no_commit(record):
    (state,) = record.sources
    return dataclasses.replace(record, sources=[state | {"sha256": source_of("another tree")}])


def recorded(runs, change):
    """Write two seeds of two arms, the second seed of one of them changed."""
    for run in plan(find("table1"), Tier.SMOKE, 2, ["bf16_lora", "nvfp4_lora"]):
        record = honest_record(run)
        changed = run.seed == 1 and run.arm.name == "nvfp4_lora"
        (change(record) if changed else record).write(runs)


@pytest.mark.parametrize("change", [began_on_changes, finished_at_another])
def test_a_changed_source_is_said_with_the_records_and_their_verdicts(tmp_path, capsys, change):
    recorded(tmp_path / "runs", change)
    place = ["--runs", str(tmp_path / "runs")]
    main(["check", *LINE, *place])
    assert f"4 records (1 of {CHANGED})" in capsys.readouterr().out
    main(["check", *LINE, *place, "--json"])
    (checked,) = json.loads(capsys.readouterr().out)
    assert [checked[name] for name in ("target", "tier", "records")] == [*LINE[::2], 4]
    decided = [item for item in checked["verdicts"] if item["status"] != "not run"]
    marked = [item for item in decided if CHANGED in item["marks"]]
    assert 0 < len(marked) < len(decided)
    assert all("nvfp4_lora" in item["name"] for item in marked if item["about"] == "expectation")
    assert all("records (seed 1)" in item["sentence"] for item in marked)
    assert main(["report", *LINE, *place]) == 0
    report = (tmp_path / "runs" / "report.md").read_text()
    assert f"4 records (1 of {CHANGED})" in report
    assert f"`{'0' * 40}`, {CHANGED}" in report
    page = tmp_path / "page.html"
    assert main(["report", *LINE, *place, "--html", str(page)]) == 0
    assert page.read_text().count(f", {CHANGED}</span>") >= len(
        [item for item in marked if not item["source"].startswith("measured")]
    )


@pytest.mark.parametrize("change", [began_on_changes, finished_at_another, of_no_commit])
def test_others_records_of_a_changed_or_unknown_source_are_shown_as_such(tmp_path, capsys, change):
    recorded(tmp_path / "runs", change)
    file = tmp_path / "reported" / "somebody" / "table1.jsonl.xz"
    assert main(["bundle", str(file), *LINE, "--runs", str(tmp_path / "runs")]) == 0
    shutil.rmtree(tmp_path / "runs")
    main(["bundle", "--verify", str(file)])
    assert f"4 records (1 of {CHANGED})" in capsys.readouterr().out
    assert f"000000000000 ({CHANGED}): 4 records" in reported_rows(file.parents[1], EXPECTED)[2]
    page = page_text([], EXPECTED, reports(file.parents[1], EXPECTED))
    assert f"000000000000 ({CHANGED}): 4 records" in page
    assert f", {CHANGED}</span>" in page
