"""One vocabulary: each kind of verdict has its own words, on every page."""

import dataclasses
from typing import get_args

import pytest

from repro.evidence.verdicts.verdict import Status, Verdict, marked
from repro.report.readme import short_word
from repro.report.verdict_words import (
    CLAIM_WORDS,
    OWN_BAR,
    PLAIN,
    PLAIN_WORDS,
    Kind,
    counted,
    kind_of,
    labelled,
    marks_of,
    stated_bars,
    word,
)
from repro.run.places import expected_folder

CLAIMED = "holds; does not hold: the opposite is shown; undecided"
MET = "met; missed; undecided"


def verdict(
    status="inconclusive", *, about="claim", source="Table 1", matters=None, marks=None, q=None
):
    return Verdict(
        name="name", statement="statement", source=source, about=about, status=status,
        sentence="because", matters=matters, unit="points", marks=marks or {}, q=q,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("about", "source", "kind", "words"),
    [
        ("claim", "Table 1", Kind.PAPER, CLAIMED),
        ("claim", "not in the paper; a control", Kind.OPEN, CLAIMED),
        ("mechanism", "Table 1", Kind.MACHINERY, CLAIMED),
        ("paper value", "paper: Table 1", Kind.PAPER, CLAIMED),
        ("claim", OWN_BAR, Kind.BAR, MET),
        ("expectation", "derived: the suite's own bar", Kind.BAR, MET),
    ],
)
def test_each_kind_has_its_own_words(about, source, kind, words):
    statuses: tuple[Status, ...] = ("reproduced", "contradicted", "inconclusive")
    made = [verdict(status, about=about, source=source) for status in statuses]
    assert {kind_of(item) for item in made} == {kind}
    assert [word(item) for item in made] == words.split("; ")
    assert word(verdict("not run", about=about, source=source)) == "not tested"


def test_verdicts_of_two_kinds_are_counted_in_the_words_of_each():
    bars = [verdict(status, source=OWN_BAR) for status in ("contradicted", "reproduced")]
    assert counted([*bars, verdict(), verdict()]) == "1 is met, 1 is missed, 2 are undecided"
    assert counted([]) == ""


def test_no_difference_says_within_what_and_is_counted_without():
    near, far = (verdict("no difference", matters=size) for size in (1.234, 5.0))
    assert word(near) == "does not hold: no difference within 1.2 points"
    assert counted([near, far, verdict("excluded")]) == "3 do not hold"


def test_notes_stand_wherever_a_verdict_does_and_are_counted():
    lucky = verdict("reproduced", q=0.14, marks={"post hoc": "other rules"})
    assert labelled(lucky) == "holds, post hoc, q = 0.14"
    assert word(lucky) == "holds"
    assert labelled(verdict("reproduced", q=0.01)) == "holds"
    assert labelled(verdict("inconclusive", q=0.9)) == "undecided"
    assert counted([lucky]) == "1 holds (post hoc, q >= 5 %)"
    late = verdict("inconclusive", marks={"post hoc": "other rules"})
    assert counted([lucky, verdict("reproduced"), late, late]) == (
        "2 hold (1 post hoc, 1 q >= 5 %), 2 are undecided (post hoc)"
    )


def test_each_mark_travels_to_the_words_the_counts_and_the_sentence():
    twice = marked(verdict("reproduced"), {"first": "Why", "second": "And why"})
    assert twice.marks == {"first": "Why", "second": "And why"}
    assert twice.sentence == "because. Why. And why"
    assert labelled(twice) == "holds, first, second"
    assert counted([twice, verdict("reproduced")]) == "2 hold (1 first, 1 second)"
    assert short_word([twice]) == "holds, first, second"
    assert marked(verdict(), {"first": ""}) == verdict()
    assert marked(verdict("not run"), {"first": "Why"}).marks == {}


def test_exploratory_verdicts_are_counted_as_nothing_else():
    mark = {"exploratory": "why"}
    tried = [verdict(status, marks=mark) for status in ("reproduced", "contradicted")]
    assert labelled(tried[0]) == "holds, exploratory"
    assert counted(tried) == "2 are exploratory"
    stated = [verdict("reproduced"), verdict("inconclusive")]
    assert counted([*tried, *stated]) == "1 holds, 1 is undecided, 2 are exploratory"
    late = verdict("reproduced", marks={"post hoc": "why", **mark})
    assert counted([*tried, late]) == "3 are exploratory (1 post hoc)"
    assert [*marks_of([*stated, late])] == ["post hoc", "exploratory"]


def test_every_status_has_words_of_its_own_that_begin_with_a_plain_one():
    assert set(CLAIM_WORDS) == set(get_args(Status))
    assert len(set(CLAIM_WORDS.values())) == len(CLAIM_WORDS)
    assert {words.split(":")[0] for words in CLAIM_WORDS.values()} == set(PLAIN_WORDS)
    assert set(PLAIN) == set(get_args(Status))
    assert set(PLAIN.values()) == set(PLAIN_WORDS)


def test_stated_bars_are_verdicts_on_bars_whatever_else_has_their_names(blessed_of):
    checked = blessed_of("memory")
    bars = [verdict for _, verdict in stated_bars(checked, expected_folder(None))]
    others = [dataclasses.replace(bar, source="paper: Table 1", effect=0.0) for bar in bars]
    both = dataclasses.replace(checked, verdicts=[*checked.verdicts, *others])
    assert [verdict for _, verdict in stated_bars(both, expected_folder(None))] == bars
    assert {kind_of(bar) for bar in bars} == {Kind.BAR}
