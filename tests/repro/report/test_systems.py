"""The systems page: ratios as verdicts have them, the paper's cells, and what is not blessed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from repro.check import Checked
from repro.evidence.paper import paper_cells
from repro.places import PACKAGE, expected_folder
from repro.report.systems import BLOCKS, systems_writers
from repro.report.systems_rates import against, comparisons
from repro.report.systems_tables import rate_table, step_table, update_table
from repro.report.tables import Group
from repro.spec.tier import Tier
from repro.targets import find

EXPECTED = expected_folder(None)
PAGE = PACKAGE.parent / "docs" / "systems.md"


Of = Callable[..., Checked]


def alone(checked: Checked) -> Group:
    return {"nvidia_h200": checked}


@pytest.fixture(scope="module")
def table6(blessed_of: Of) -> Checked:
    return blessed_of("table6")


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
    assert (found[1].verdict, found[1].required, found[1].paper) == (None, None, None)


def test_each_verdict_stands_in_its_row(table6: Checked) -> None:
    lines = [line for line in rate_table(alone(table6), EXPECTED) if line.startswith("| 7B")]
    statuses = {item.name.rsplit("_", 1)[1]: item.status for item in table6.verdicts
                if item.about == "claim"}  # fmt: skip
    rows = {cells[2].strip(): cells for cells in (line.split("|") for line in lines)}
    assert set(statuses) == {"2", "8"}
    assert all(rows[batch][-2].strip() == status for batch, status in statuses.items())
    assert rows["1"][-2].strip() == ""


def test_qlora_by_two_products_is_two_groups_beside_one_cell_of_the_paper(
    blessed_of: Of,
) -> None:
    groups = against(comparisons(blessed_of("figure11"), EXPECTED))
    assert set(groups) == {"nf4_lora", "nf4_lora_bitsandbytes"}
    first, second = (
        [(item.model, item.place, item.slow.paper) for item in items] for items in groups.values()
    )
    assert first == second
    assert ("14b", 16, 45.1) in first


def test_steps_stand_beside_the_papers_ratio_with_their_bars(blessed_of: Of) -> None:
    checked = blessed_of("table3")
    lines = step_table(alone(checked), EXPECTED)
    (row,) = [line.split("|") for line in lines if line.startswith("| 7B, batch 8")]
    cells = [cell.strip() for cell in row]
    assert "1.2 x" in cells
    assert "at least 1.5 x" in cells
    (speedup,) = checked.evidence.values("speedup_7b_b8")["nvfp4_lora"].values()
    assert f"{speedup:.2f} x" in cells


def test_updates_show_their_spread_and_a_bar_that_one_repeat_missed_all_of_them(
    blessed_of: Of,
) -> None:
    checked = blessed_of("table3_updates")
    lines = update_table(alone(checked), EXPECTED)
    (record,) = checked.evidence.records["nvfp4_lora"].values()
    repeats = sorted(record.repeats("update_ratio_3b_b2_update"))
    assert len(repeats) == 3
    low, middle, high = repeats
    (row,) = [line for line in lines if line.startswith("| 3B, batch 2, update |")]
    assert f"| {middle:.3f} x ({low:.3f} to {high:.3f}) |" in row
    assert "| at least 0.95 x |" in row
    missed = [verdict for verdict in checked.verdicts if verdict.status == "contradicted"]
    rows = lines[lines.index("| what | bar | measured | off by | verdict |") + 2 :][: len(missed)]
    assert len(rows) == len(missed) > 0
    for verdict, line in zip(missed, rows, strict=True):
        assert verdict.effect is not None
        assert (verdict.sentence in line) == (verdict.effect >= 0.95)


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


def test_a_question_without_ratios_is_answered_by_its_targets_first_numbers(
    tmp_path: Path, blessed_of: Of
) -> None:
    checked = blessed_of("memory")
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
    assert written == {f"systems_{name}" for name in (*BLOCKS, "short", "answer")}


def test_every_picture_of_the_tier_is_on_the_page_and_exists() -> None:
    if not PAGE.is_file():
        pytest.skip("docs/ is not part of an installed package")
    linked = set(re.findall(r"\]\((figures/[^)]+)\)", PAGE.read_text(encoding="utf-8")))
    drawn = {f"figures/{path.name}" for path in (PAGE.parent / "figures").glob("systems_*.svg")}
    assert linked == drawn


def test_each_block_has_both_devices_side_by_side(
    tmp_path: Path, blessed: list[Checked], on_other_device: Of
) -> None:
    systems = [item for item in blessed if item.selection.tier is Tier.SYSTEMS]
    both = [*systems, *(on_other_device(item, lambda value: 2 * value) for item in systems)]
    page = tmp_path / "systems.md"
    one, two = (systems_writers(lambda c=checks: c, EXPECTED, page) for checks in (systems, both))
    for name in (*BLOCKS, "short"):
        text = "\n".join(two[f"systems_{name}"]())
        heads = [line for line in text.splitlines() if ", NVIDIA H100 |" in line]
        assert heads, name
        assert all(line.count("NVIDIA H100") == line.count("NVIDIA H200") for line in heads), name
        rows = [
            sum(line.startswith("|") for line in writers[f"systems_{name}"]())
            for writers in (one, two)
        ]
        assert rows[0] == rows[1] > 0, name
    sentences = two["systems_answer"]()
    devices = [line.split(":")[0].removeprefix("**On one ") for line in sentences]
    assert devices == ["NVIDIA H200", "NVIDIA H100"]


def test_a_picture_of_each_device_is_shown(
    tmp_path: Path, blessed_of: Of, on_other_device: Of
) -> None:
    checked = blessed_of("memory")
    (tmp_path / "figures").mkdir()
    for device in ("nvidia_h100", "nvidia_h200"):
        (tmp_path / f"figures/systems_{device}_memory.svg").write_text("<svg/>")
    checks = [checked, on_other_device(checked)]
    lines = systems_writers(lambda: checks, EXPECTED, tmp_path / "page.md")["systems_memory"]()
    assert [line.split("](")[1] for line in lines if line.startswith("![")] == [
        "figures/systems_nvidia_h100_memory.svg)", "figures/systems_nvidia_h200_memory.svg)",
    ]  # fmt: skip
