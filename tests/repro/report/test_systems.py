"""The systems page: ratios as verdicts have them, the paper's cells, and what is not blessed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from repro.evidence.paper import paper_cells
from repro.judge.check import Checked, check_selection, device_name
from repro.report.systems import BLOCKS, systems_writers
from repro.report.systems_rates import comparisons, ratio_span
from repro.report.systems_tables import rate_table, step_table
from repro.run.places import PACKAGE, expected_folder
from repro.run.select import Selection
from repro.spec.claim import Metric
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.steps import TABLE3
from tests.repro.recorded_steps import Change, times, unchanged, write_steps

EXPECTED = expected_folder(None)
PAGE = PACKAGE.parent / "docs" / "systems.md"
Of = Callable[..., Checked]
H100 = "nvidia_h100_80gb_hbm3"


@pytest.fixture(scope="module")
def table6(blessed_of: Of) -> Checked:
    return blessed_of("table6")


def test_a_ratio_is_that_of_the_verdict_and_the_papers_is_of_its_two_cells(
    table6: Checked,
) -> None:
    by_place = {item.place: item for item in comparisons(table6, EXPECTED)}
    assert sorted(by_place) == [1, 2, 4, 8]
    eight = by_place[8]
    assert eight.verdict is not None
    assert eight.ratio is not None
    assert eight.ratio.value == pytest.approx(eight.verdict.effect)
    assert (eight.ratio.low, eight.ratio.high) == (eight.verdict.low, eight.verdict.high)
    cells = {cell.id: cell.value for cell in paper_cells(EXPECTED, "table6")}
    expected = [cells[f"{row}/7B batch 8/rollout"] for row in ("NVFP4 QeRL", "BF16 LoRA")]
    assert eight.paper == pytest.approx(expected[0] / expected[1])
    assert (by_place[1].verdict, by_place[1].required, by_place[1].paper) == (None, None, None)


def test_a_pair_of_which_one_was_not_run_has_a_row_with_the_reason(blessed_of: Of) -> None:
    checked = blessed_of("rollout", device=H100)
    (row,) = [r for r in rate_table(checked, EXPECTED) if r.startswith("| 32B | 256 |")]
    assert "| not run: " in row
    (pair,) = [p for p in comparisons(checked, EXPECTED) if (p.model, p.place) == ("32b", 256)]
    assert pair.ratio is None
    assert pair.fast.measured is not None
    assert pair.slow.absent in row


def made_up_steps(runs: Path, change: Change = unchanged) -> Checked:
    """Return the check of made-up records of Table 3, three repeats each."""
    selection = Selection(target=TABLE3, source=TABLE3, tier=Tier.SYSTEMS)
    return check_selection(selection, write_steps(runs, change), EXPECTED)


def test_steps_stand_beside_the_papers_ratio_with_their_bars(tmp_path: Path) -> None:
    checked = made_up_steps(tmp_path, times(0.7, "speedup_"))
    lines = step_table(checked, EXPECTED)
    rows = [line for line in lines if line.startswith("| 7B, batch 8 |")]
    cells = [cell.strip() for cell in rows[-1].split("|")]
    assert {"1.2 x", "at least 1.5 x", "1.40 x", "missed"} <= set(cells)


def test_a_bar_that_one_repeat_missed_shows_them_all(tmp_path: Path) -> None:
    def uneven(arm: str, metric: Metric, values: list[float]) -> list[float]:
        return [1.0, 0.93, 1.05] if metric.name == "update_ratio_7b_b8" else values

    checked = made_up_steps(tmp_path, uneven)
    lines = step_table(checked, EXPECTED)
    *_, row = [line for line in lines if line.startswith("| 7B, batch 8 |")]
    assert "| 1.000 x | missed |" in row
    assert "| at least 0.95 x |" in row
    (listed,) = [line for line in lines if "on average; 2 of 3 inside: 1, 0.93, 1.05" in line]
    assert listed.endswith("| missed |")


def test_a_block_links_what_was_drawn_and_names_what_is_not_blessed(tmp_path: Path) -> None:
    page = tmp_path / "systems.md"
    (tmp_path / "paper").mkdir()
    write = systems_writers(list, tmp_path, page)["systems_memory"]
    names = "`memory`, `memory_dense`, `memory_formats`, `memory_budgets`"
    assert write() == [f"No records are blessed yet of {names}."]
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "systems_nvidia_h200_memory.svg").write_text("<svg/>")
    assert write() == [f"No records are blessed yet of {names}."]
    assert systems_writers(list, tmp_path, page)["systems_short"]() == [
        "No records are blessed yet."
    ]


def test_a_folded_table_tells_its_ratios_and_its_card(tmp_path: Path, blessed_of: Of) -> None:
    vllm = blessed_of("rollout_vllm")
    page = systems_writers(lambda: [vllm], EXPECTED, tmp_path / "systems.md")
    (summary,) = [line for line in page["systems_vllm"]() if line.startswith("<summary>")]
    assert f"NVIDIA H200: {ratio_span(comparisons(vllm, EXPECTED))}; " in summary


def test_blocks_and_page_name_the_same() -> None:
    targets = [name for block in BLOCKS.values() for name in block.targets]
    assert [find(name).name for name in targets] == targets
    assert len(set(targets)) == len(targets)
    if not PAGE.is_file():
        pytest.skip("docs/ is not part of an installed package")
    text = PAGE.read_text(encoding="utf-8")
    written = set(re.findall(r"<!-- (\w+):begin", text))
    assert written == {f"systems_{name}" for name in (*BLOCKS, "kernels", "short", "answer")}


def test_every_picture_of_the_tier_is_on_the_page_and_exists() -> None:
    if not PAGE.is_file():
        pytest.skip("docs/ is not part of an installed package")
    linked = set(re.findall(r"\]\((figures/[^)]+)\)", PAGE.read_text(encoding="utf-8")))
    drawn = {f"figures/{path.name}" for path in (PAGE.parent / "figures").glob("systems_*.svg")}
    assert linked == drawn


def test_the_papers_card_is_shown_and_others_stand_in_the_answer(
    tmp_path: Path, every_blessed: list[Checked]
) -> None:
    (tmp_path / "figures").mkdir()
    for device in (H100, "nvidia_h200"):
        (tmp_path / f"figures/systems_{device}_rollout_throughput.svg").write_text("<svg/>")
    write = systems_writers(lambda: every_blessed, EXPECTED, tmp_path / "systems.md")
    assert f"systems_{H100}_rollout_throughput.svg" in write["systems_rollout"]()[-1]
    short = "\n".join(write["systems_short"]())
    assert short.index("| question") < short.index("<details>") < short.index("NVIDIA H200")
    blessed = {c.selection.target.name for c in every_blessed if device_name(c.evidence) == H100}
    for name, block in BLOCKS.items():
        text = "\n".join(write[f"systems_{name}"]())
        if not blessed.intersection(block.targets):
            continue
        assert "NVIDIA H100" in text, name
        assert "H200" not in text, name
        assert text.count("<details>") == text.count("</details>")
        assert text.count("<summary><b>") == len(blessed.intersection(block.targets))
    # What the paper's card has no records of stands with those of another.
    assert "scaling" in blessed or "NVIDIA H200" in "\n".join(write["systems_steps_ranks"]())
    sentences = write["systems_answer"]()
    devices = [line.split(":")[0].removeprefix("**On one ") for line in sentences if line]
    assert devices == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
