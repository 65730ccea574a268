"""One vocabulary: each kind of verdict has its own words, on every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from repro.evidence.verdict import Status, Verdict
from repro.judge.check import Checked
from repro.report.verdicts import (
    EXCLUDED,
    OWN_BAR,
    Kind,
    beside,
    counted,
    kind_of,
    no_difference_within,
    of_kind,
    stated_bars,
    to_show,
    word,
)
from repro.run.places import PACKAGE, expected_folder

ROOT = PACKAGE.parent
EXPECTED = expected_folder(None)
WORDS = {
    "reproduced", "contradicted", "inconclusive", "not run", "met", "missed", "undecided",
    "unchanged", "changed", "unclear",
}  # fmt: skip


def verdict(
    status: Status = "inconclusive",
    *,
    about: str = "claim",
    source: str = "Table 1",
    interval: tuple[float | None, float | None] = (None, None),
) -> Verdict:
    low, high = interval
    return Verdict(
        name="name", statement="statement", source=source, about=about, status=status,
        sentence="because", low=low, high=high,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("about", "source", "kind", "words"),
    [
        ("claim", "Table 1", Kind.PAPER, "reproduced contradicted inconclusive"),
        ("claim", "not in the paper; a control", Kind.OPEN, "reproduced contradicted inconclusive"),
        ("mechanism", "Table 1", Kind.MACHINERY, "reproduced contradicted inconclusive"),
        ("paper value", "paper: Table 1", Kind.PAPER, "reproduced contradicted inconclusive"),
        ("claim", OWN_BAR, Kind.BAR, "met missed undecided"),
        ("expectation", "derived: the suite's own bar", Kind.BAR, "met missed undecided"),
        ("expectation", "measured: 5 seeds", Kind.BLESSED, "unchanged changed unclear"),
    ],
)
def test_each_kind_has_its_own_words(about: str, source: str, kind: Kind, words: str) -> None:
    statuses: tuple[Status, ...] = ("reproduced", "contradicted", "inconclusive")
    made = [verdict(status, about=about, source=source) for status in statuses]
    assert {kind_of(item) for item in made} == {kind}
    assert [word(item) for item in made] == words.split()
    assert word(verdict("not run", about=about, source=source)) == "not run"


def test_verdicts_of_two_kinds_are_counted_in_the_words_of_each() -> None:
    bars = [verdict(status, source=OWN_BAR) for status in ("contradicted", "reproduced")]
    assert counted([*bars, verdict(), verdict()]) == "2 inconclusive, 1 met, 1 missed"
    assert counted([]) == ""


def test_an_effect_is_excluded_only_where_its_interval_ends_below_the_papers() -> None:
    assert beside(verdict(interval=(-0.4, 0.2)), 2.7) == EXCLUDED
    assert beside(verdict(interval=(-0.4, 2.8)), 2.7) == ""
    assert beside(verdict(interval=(3.0, 4.0)), 2.7) == ""
    assert beside(verdict(interval=(-0.4, 0.2)), -0.5) == ""
    assert beside(verdict(), 2.7) == ""


def test_no_difference_within_a_limit_needs_both_ends_of_the_interval_inside() -> None:
    inside, low, high = (verdict(interval=i) for i in ((-2.6, 2.6), (-2.8, 1.0), (-1.0, 2.7)))
    assert no_difference_within([inside, low, high, verdict()], 2.7) == [inside]


def test_stated_bars_are_not_the_blessed_values_of_the_same_name(blessed: list[Checked]) -> None:
    for checked in blessed:
        bars = [bar.verdict for bar in stated_bars(checked, EXPECTED)]
        assert {kind_of(bar) for bar in bars} <= {Kind.BAR}
    assert sum(len(stated_bars(checked, EXPECTED)) for checked in blessed) > 100


def test_unchanged_values_are_left_out_and_changed_ones_shown(blessed: list[Checked]) -> None:
    checked = blessed[0]
    values = of_kind(checked, Kind.BLESSED)
    assert len(values) > 0
    shown = [item for item in to_show(checked) if kind_of(item) is Kind.BLESSED]
    assert shown == [item for item in values if item.status != "reproduced"]


def verdict_cells(text: str) -> list[str]:
    """Return the cells of every column of a Markdown page that is headed as a verdict."""
    cells: list[str] = []
    heads: list[str] = []
    for line in text.splitlines():
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not row:
            heads = []
        elif not heads:
            heads = row
        elif set(line) - set("|-"):
            pairs = zip(heads, row, strict=True)
            cells += [cell for head, cell in pairs if head.split(",")[0] == "verdict" and cell]
    return cells


@pytest.mark.parametrize(
    "name", ["docs/claims.md", "docs/findings.md", "docs/systems.md", "kernels/README.md"]
)
def test_a_verdict_on_any_page_is_one_of_the_words(name: str) -> None:
    page = Path(ROOT / name)
    if not page.is_file():
        pytest.skip(f"{name} is not part of an installed package")
    cells = verdict_cells(page.read_text(encoding="utf-8"))
    assert len(cells) > 5
    assert set(cells) <= WORDS
