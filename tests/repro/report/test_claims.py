"""The page of claims: counts by kind, accuracies beside the paper's, each claim's reason."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from repro.__main__ import main
from repro.judge.blessed import blessed_checks
from repro.judge.check import Checked
from repro.report.claims import accuracy_rows, claims_rows, count_rows, target_rows
from repro.report.verdicts import Kind, counted, labelled, of_kind
from repro.run.places import expected_folder
from repro.spec.tier import Tier

EXPECTED = expected_folder(None)
Writer = Callable[..., None]
Of = Callable[..., Checked]


def row_of(lines: list[str], label: str) -> list[str]:
    line = next(line for line in lines if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_papers_columns_stand_beside_blessed_records(
    table1_records: Writer, tmp_path: Path
) -> None:
    expected = tmp_path / "expected"
    shutil.copytree(EXPECTED / "paper", expected / "paper")
    table1_records(tmp_path / "runs")
    line = ["--tier", "smoke", "--runs", str(tmp_path / "runs"), "--expected", str(expected)]
    assert main(["bless", "table1", *line]) == 0
    rows = accuracy_rows(blessed_checks(expected, "table1"), expected)
    cells = row_of(rows, "NF4, LoRA (QLoRA)")
    assert cells[1:3] == ["76.1", "85"]
    assert cells[3].endswith("(n = 5)")


def test_kinds_are_counted_apart_and_every_claim_once(blessed: list[Checked]) -> None:
    smoke = [item for item in blessed if item.selection.tier is Tier.SMOKE]
    rows = count_rows(smoke, EXPECTED)
    for kind in (Kind.PAPER, Kind.MACHINERY):
        verdicts = [verdict for checked in smoke for verdict in of_kind(checked, kind)]
        assert row_of(rows, kind.value)[1] == counted(verdicts)
    listed = Counter(
        line.split("|")[3].strip() for line in claims_rows(smoke) if line.startswith("|")
    )
    claims = [v for c in smoke for v in c.verdicts if v.about in ("claim", "mechanism")]
    words = Counter(labelled(claim) for claim in claims)
    assert {word: listed[word] for word in words} == words


def test_each_targets_claims_are_folded_below_its_counts(blessed_of: Of) -> None:
    checks = [blessed_of("table1", Tier.SMOKE), blessed_of("table6")]
    lines = claims_rows(checks)
    assert [lines.count(tag) for tag in ("<details>", "</details>")] == [2, 2]
    summaries = [line for line in lines if line.startswith("<summary>")]
    for summary, checked in zip(summaries, checks, strict=True):
        assert checked.selection.target.title in summary
        assert counted(verdict for _, verdict in checked.statements()) in summary
    assert "(smoke, CPU): " in summaries[0]
    assert "(systems, NVIDIA H200): " in summaries[1]
    # A table in HTML is read as Markdown only after an empty line.
    heads = [number for number, line in enumerate(lines) if line.startswith("| claim |")]
    assert len(heads) == 2
    assert all(lines[number - 1] == "" for number in heads)


def test_a_bar_stated_as_a_claim_is_counted_among_the_bars(blessed_of: Of) -> None:
    checked = blessed_of("rollout_ranks")
    (row,) = [line for line in target_rows([checked], EXPECTED) if "LoRA ranks 16 to 128" in line]
    assert row.split("|")[2].strip() == counted(of_kind(checked, Kind.BAR))
    assert of_kind(checked, Kind.PAPER) == []


def test_two_devices_stand_side_by_side(blessed_of: Of, on_other_device: Of) -> None:
    checked = blessed_of("table6")
    checks = [checked, on_other_device(checked, lambda value: 2 * value)]
    assert count_rows(checks, EXPECTED)[0].count("systems, H") == 2
    for lines in (claims_rows(checks), target_rows(checks, EXPECTED)):
        (heads,) = [line for line in lines if ", H100 |" in line]
        assert heads.count("H100") == heads.count("H200") > 0
    assert len(claims_rows(checks)) == len(claims_rows([checked]))
    (summary,) = [line for line in claims_rows(checks) if line.startswith("<summary>")]
    assert counted(verdict for _, verdict in checked.statements()) in summary
    assert "(systems, NVIDIA H200): " in summary
    assert "; (systems, NVIDIA H100): " in summary


def test_accuracies_of_two_devices_are_columns(blessed_of: Of, on_other_device: Of) -> None:
    smoke = blessed_of("table1", Tier.SMOKE)
    selection = dataclasses.replace(smoke.selection, tier=Tier.PAPER)
    checked = dataclasses.replace(smoke, selection=selection)
    one, other = (on_other_device(checked, values) for values in (float, lambda v: v / 2))
    rows = accuracy_rows([one, other], EXPECTED)
    heads = next(line for line in rows if line.startswith("| arm"))
    assert heads.endswith("| paper, NVIDIA H100 | paper, NVIDIA H100 |")
    first, second = (float(cell.split()[0]) for cell in row_of(rows, "BF16, LoRA")[-2:])
    assert abs(first - 2 * second) < 0.2


def test_pages_without_records_say_so() -> None:
    nothing = ["No records are blessed yet."]
    assert count_rows([], EXPECTED) == accuracy_rows([], EXPECTED) == nothing
    assert target_rows([], EXPECTED) == claims_rows([]) == nothing
