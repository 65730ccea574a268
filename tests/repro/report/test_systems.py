"""The systems page: ratios as verdicts have them, the paper's cells, and what is not blessed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from repro.blessed import blessed_checks
from repro.check import Checked
from repro.evidence.paper import paper_cells
from repro.places import PACKAGE, expected_folder
from repro.report.systems import BLOCKS, systems_writers
from repro.report.systems_rates import against, comparisons, span
from repro.report.systems_tables import bar_table, rate_table, step_table, table, update_table
from repro.targets import find

EXPECTED = expected_folder(None)
PAGE = PACKAGE.parent / "docs" / "systems.md"


def checked_of(name: str) -> Checked:
    (checked,) = blessed_checks(EXPECTED, name)
    return checked


@pytest.fixture(scope="module")
def table6() -> Checked:
    return checked_of("table6")


def test_a_ratio_is_that_of_the_verdict_and_the_papers_is_of_its_two_cells(
    table6: Checked,
) -> None:
    found = {item.place: item for item in comparisons(table6, EXPECTED)}
    assert sorted(found) == [1, 2, 4, 8]
    eight = found[8]
    assert eight.verdict is not None
    assert eight.ratio.value == pytest.approx(eight.verdict.effect)
    assert eight.ratio.low == pytest.approx(eight.verdict.low)
    assert eight.ratio.high == pytest.approx(eight.verdict.high)
    cells = {cell.id: cell.value for cell in paper_cells(EXPECTED, "table6")}
    theirs = [cells[f"{row}/7B batch 8/rollout"] for row in ("NVFP4 QeRL", "BF16 LoRA")]
    assert eight.paper == pytest.approx(theirs[0] / theirs[1])
    assert (found[1].verdict, found[1].asked, found[1].paper) == (None, None, None)


def test_each_verdict_stands_in_its_row(table6: Checked) -> None:
    lines = [line for line in rate_table(table6, EXPECTED) if line.startswith("| 7B")]
    said = {item.name.rsplit("_", 1)[1]: item.status for item in table6.verdicts
            if item.about == "claim"}  # fmt: skip
    rows = {cells[2].strip(): cells for cells in (line.split("|") for line in lines)}
    assert set(said) == {"2", "8"}
    assert all(rows[batch][-2].strip() == status for batch, status in said.items())
    assert rows["1"][-2].strip() == ""


def test_qlora_by_two_products_is_two_groups_beside_one_cell_of_the_paper() -> None:
    groups = against(comparisons(checked_of("figure11"), EXPECTED))
    assert set(groups) == {"nf4_lora", "nf4_lora_bitsandbytes"}
    first, second = (
        [(item.model, item.place, item.slow.paper) for item in items] for items in groups.values()
    )
    assert first == second
    assert ("14b", 16, 45.1) in first


def test_steps_stand_beside_the_papers_ratio_with_their_bars() -> None:
    checked = checked_of("table3")
    lines = step_table(checked, EXPECTED)
    (row,) = [line.split("|") for line in lines if line.startswith("| 7B, batch 8")]
    cells = [cell.strip() for cell in row]
    assert "1.2 x" in cells
    assert "at least 1.5 x" in cells
    (speedup,) = checked.evidence.values("speedup_7b_b8")["nvfp4_lora"].values()
    assert f"{speedup:.2f} x" in cells


def test_updates_show_their_spread_and_a_bar_that_one_repeat_missed_all_of_them() -> None:
    checked = checked_of("table3_updates")
    lines = update_table(checked, EXPECTED)
    (record,) = checked.evidence.records["nvfp4_lora"].values()
    repeats = sorted(record.repeats("update_ratio_3b_b2_update"))
    assert len(repeats) == 3
    low, middle, high = repeats
    (row,) = [line for line in lines if line.startswith("| 3B, batch 2, update |")]
    assert f"| {middle:.3f} x ({low:.3f} to {high:.3f}) | at least 0.95 x |" in row
    told = [verdict for verdict in checked.verdicts if verdict.status == "contradicted"]
    rows = lines[lines.index("| missed | bar | measured |") + 2 :][: len(told)]
    assert len(rows) == len(told) > 0
    for verdict, line in zip(told, rows, strict=True):
        assert verdict.effect is not None
        assert (verdict.sentence in line) == (verdict.effect >= 0.95)


def test_every_bar_has_a_row_and_its_verdict() -> None:
    checked = checked_of("rollout_scheduling")
    rows = bar_table(checked, EXPECTED)[2:-1]
    stated = [item for item in checked.verdicts if item.source.startswith("derived")]
    assert len(rows) == len(stated)
    assert sorted(row.split("|")[-2].strip() for row in rows) == sorted(
        item.status for item in stated
    )


def test_a_table_leaves_out_empty_columns_and_keeps_bars_of_text() -> None:
    lines = table(["a", "b", "c"], [["1", "", "|x|"], ["2", "", ""]])
    assert lines == ["| a | c |", "|---|---|", "| 1 | \\|x\\| |", "| 2 |  |", ""]


def test_a_span_names_one_number_once() -> None:
    assert span([1.204, None, 1.396]) == "1.20 to 1.40 x"
    assert span([2.0, 2.0]) == "2.00 x"
    assert span([None]) == ""


def test_a_block_links_what_was_drawn_and_names_what_is_not_blessed(tmp_path: Path) -> None:
    page = tmp_path / "systems.md"
    (tmp_path / "paper").mkdir()
    write = systems_writers(list, tmp_path, page)["systems_memory"]
    names = "`memory`, `memory_dense`, `memory_formats`, `memory_budgets`"
    assert write() == [f"No records are blessed yet of {names}."]
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "systems_memory.svg").write_text("<svg/>")
    assert write()[-1] == "![memory](figures/systems_memory.svg)"
    assert systems_writers(list, tmp_path, page)["systems_short"]() == [
        "No records are blessed yet."
    ]


def test_a_question_without_ratios_is_answered_by_its_targets_first_numbers(tmp_path: Path) -> None:
    checked = checked_of("memory")
    write = systems_writers(lambda: [checked], EXPECTED, tmp_path / "systems.md")["systems_short"]
    (row,) = [line for line in write() if line.startswith("| memory of a GRPO step")]
    (peak,) = checked.evidence.values("peak_bytes_32b_b8")["nvfp4_lora"].values()
    assert f"peak memory, 32b_b8 {peak / 2**30:.1f} GiB" in row


def test_blocks_and_page_name_the_same() -> None:
    targets = [name for block in BLOCKS.values() for name in block.targets]
    assert [find(name).name for name in targets] == targets
    assert len(set(targets)) == len(targets)
    if not PAGE.is_file():
        pytest.skip("docs/ is not part of an installed package")
    text = PAGE.read_text(encoding="utf-8")
    written = set(re.findall(r"<!-- (\w+):begin", text))
    assert written == {f"systems_{name}" for name in (*BLOCKS, "short")}


def test_every_picture_of_the_tier_is_on_the_page_and_exists() -> None:
    if not PAGE.is_file():
        pytest.skip("docs/ is not part of an installed package")
    linked = set(re.findall(r"\]\((figures/[^)]+)\)", PAGE.read_text(encoding="utf-8")))
    drawn = {f"figures/{path.name}" for path in (PAGE.parent / "figures").glob("systems_*.svg")}
    assert linked == drawn
