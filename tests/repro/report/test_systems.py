"""The systems page: ratios as verdicts have them, the paper's cells, and what is not blessed."""

import re
from dataclasses import replace

import pytest

from repro.evidence.paper import paper_cells
from repro.report.systems import QUESTIONS, systems_writers
from repro.report.systems_rates import comparisons
from repro.report.verdict_words import Kind, of_kind
from repro.run.places import PACKAGE, expected_folder
from repro.targets import find
from repro.targets.speed import rate

EXPECTED = expected_folder(None)
PAGE = PACKAGE.parent / "docs" / "systems.md"


@pytest.fixture(scope="module")
def table6(blessed_of):
    return blessed_of("table6")


def rows(lines):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:2] == "| "]


def test_a_ratio_is_that_of_the_verdict_and_the_papers_is_of_its_two_cells(table6):
    by_place = {item.place: item for item in comparisons(table6, EXPECTED)}
    assert sorted(by_place) == [1, 2, 4, 8]
    eight = by_place[8]
    assert eight.ratio.value == pytest.approx(eight.verdict.effect)
    assert (eight.ratio.low, eight.ratio.high) == (eight.verdict.low, eight.verdict.high)
    cells = {cell.id: cell.value for cell in paper_cells(EXPECTED, "table6")}
    expected = [cells[f"{row}/7B batch 8/rollout"] for row in ("NVFP4 QeRL", "BF16 LoRA")]
    assert eight.paper == pytest.approx(expected[0] / expected[1])
    assert (by_place[1].verdict, by_place[1].paper) == (None, None)


def test_a_rate_of_a_model_below_a_billion_is_compared_and_on_the_page(table6, monkeypatch):
    cell, known = rate("0_5b", 8), table6.evidence.values("tokens_per_second_7b_8")
    target = replace(table6.selection.target, metrics=(cell,), claims=(), headline=None)
    half = replace(table6, selection=replace(table6.selection, target=target), verdicts=[])
    monkeypatch.setattr(type(half.evidence), "values", lambda _, name: {cell.name: known}[name])
    assert [(pair.model, pair.place) for pair in comparisons(half, EXPECTED)] == [("0.5b", 8)]
    assert rows(systems_writers(lambda: [half], EXPECTED)["systems_rates"]())[1][0] == "0.5B"


def test_without_records_each_block_says_so(tmp_path):
    (tmp_path / "paper").mkdir()
    for write in systems_writers(list, tmp_path).values():
        assert write() == ["No records are blessed yet."]


def test_the_first_sentences_count_the_papers_claims(every_blessed):
    lines = systems_writers(lambda: every_blessed, EXPECTED)["systems_answer"]()
    said = [line for line in lines if line]
    devices = [line.split(",")[0].removeprefix("**On one ") for line in said]
    assert devices == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    names = {name for targets in QUESTIONS.values() for name in targets}
    holding = [
        verdict
        for checked in every_blessed
        if checked.selection.target.name in names
        for verdict in of_kind(checked, Kind.PAPER)
        if verdict.status == "reproduced"
    ]
    counts = [int(number) for line in said for number in re.findall(r"(\d+) hold\b", line)]
    assert sum(counts) == len(holding)


def test_questions_name_targets_and_the_page_has_every_block():
    targets = [name for names in QUESTIONS.values() for name in names]
    assert [find(name).name for name in targets] == targets
    assert len(set(targets)) == len(targets)
    if not PAGE.is_file():
        pytest.skip("docs/ is not part of an installed package")
    written = set(re.findall(r"<!-- (\w+):begin", PAGE.read_text(encoding="utf-8")))
    assert written == {name for name in systems_writers(list, EXPECTED) if name != "kernels"}


def test_every_picture_of_the_tier_is_on_a_page_and_exists():
    if not PAGE.is_file():
        pytest.skip("docs/ is not part of an installed package")
    pages = [*PAGE.parent.glob("*.md"), PAGE.parent.parent / "README.md"]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    linked = {name for text in texts for name in re.findall(r"figures/([^)]+\.svg)\)", text)}
    assert linked == {path.name for path in (PAGE.parent / "figures").glob("*.svg")}
