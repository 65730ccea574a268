"""The vocabulary of verdicts: what is judged, in which words, and how often each occurs.

`repro.evidence.verdicts.verdict` says what leads to each status. The word for a status depends on
what was judged; only this module has the words:

* a claim (of the paper, about the machinery, or a question that the paper leaves open): reproduced,
  reproduced below a tenth of the paper's size, contradicted, excluded at the paper's size, no
  difference within x, inconclusive, not judged, not testable here, not addressed at this tier, not
  run;
* a bar of this suite: met, missed, undecided, not run;
* a value blessed earlier: unchanged, changed, unclear, not run.

A blessed value's interval has two sides, so `changed` may be better or worse; only
`repro.regression` says *regressed*, of values shown to be worse. A verdict's marks follow its word
everywhere, and q if over the study a target's result may be luck. What is exploratory is counted
apart, whatever its status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from repro.evidence.verdicts.expectation import Expectation, load_bars
from repro.evidence.verdicts.verdict import MARKS, SHOWN, Mark, Status, Verdict
from repro.judge.check import Checked, device_name
from repro.spec.effect import ALPHA
from repro.spec.tier import Tier

# The source of claims that are bars of this suite rather than the paper's.
OWN_BAR = "this suite's bar"
NO_DIFFERENCE = "no difference within"
BY_CHANCE = f"q >= {100 * ALPHA:g} %"
EXPLORATORY: Mark = "exploratory"


class Kind(Enum):
    """What a verdict is about; the value names several of them."""

    PAPER = "claims of the paper"
    OPEN = "questions that the paper leaves open"
    MACHINERY = "claims about the machinery"
    BAR = "bars of this suite"
    BLESSED = "values blessed earlier"


_ONE = {Kind.MACHINERY: "about the machinery", Kind.BAR: "bar", Kind.BLESSED: "blessed value"}
CLAIMS = (Kind.PAPER, Kind.OPEN, Kind.MACHINERY)
# In the order in which pages list them. Of *no difference* a single verdict says within what.
CLAIM_WORDS: Mapping[Status, str] = {
    "reproduced": "reproduced",
    "below a tenth": "reproduced below a tenth of the paper's size",
    "contradicted": "contradicted",
    "excluded": "excluded at the paper's size",
    "no difference": f"{NO_DIFFERENCE} x",
    "inconclusive": "inconclusive",
    "not judged": "not judged: too wide",
    "not testable": "not testable here",
    "not addressed": "not addressed at this tier",
    "not run": "not run",
}
BAR_WORDS: Mapping[Status, str] = {
    "reproduced": "met",
    "contradicted": "missed",
    "inconclusive": "undecided",
    "not run": "not run",
}
BLESSED_WORDS: Mapping[Status, str] = {
    "reproduced": "unchanged",
    "contradicted": "changed",
    "inconclusive": "unclear",
    "not run": "not run",
}
_WORDS = dict.fromkeys(CLAIMS, CLAIM_WORDS) | {Kind.BAR: BAR_WORDS, Kind.BLESSED: BLESSED_WORDS}


def kind_of(verdict: Verdict) -> Kind:
    """Return what a verdict is about."""
    if verdict.source.startswith("measured"):
        return Kind.BLESSED
    if verdict.about == "expectation" or verdict.source == OWN_BAR:
        return Kind.BAR
    if verdict.about == "mechanism":
        return Kind.MACHINERY
    return Kind.OPEN if verdict.source.startswith("not in the paper") else Kind.PAPER


def word(verdict: Verdict) -> str:
    """Return the verdict in the word of its kind: `no difference within 1.2 points`."""
    if verdict.status == "no difference":
        return f"{NO_DIFFERENCE} {verdict.matters:.2g} {verdict.unit}"
    return _group(verdict)


def labelled(verdict: Verdict) -> str:
    """Return the verdict's word, its marks, and a q at which it is not shown."""
    notes: list[str] = [mark for mark in MARKS if mark in verdict.marks]
    if _is_by_chance(verdict):
        notes.append(f"q = {verdict.q:.2g}")
    return ", ".join([word(verdict), *notes])


def _is_by_chance(verdict: Verdict) -> bool:
    """Whether a direction is shown by its target alone, not at the study's discovery rate."""
    return verdict.status in SHOWN and verdict.q is not None and verdict.q >= ALPHA


def _group(verdict: Verdict) -> str:
    return _WORDS[kind_of(verdict)][verdict.status]


def about(verdict: Verdict) -> str:
    """Return the kind of a verdict that is not about the paper: `bar`; else empty."""
    return _ONE.get(kind_of(verdict), "")


def counted(verdicts: Iterable[Verdict]) -> str:
    """Return how many verdicts have each word: `12 reproduced, 3 inconclusive (2 post hoc)`.

    Exploratory ones, whatever their words, are counted together, last.
    """
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        name = EXPLORATORY if EXPLORATORY in verdict.marks else _group(verdict)
        groups.setdefault(name, []).append(verdict)
    ordered = dict.fromkeys(name for words in _WORDS.values() for name in words.values())
    return ", ".join(
        f"{len(groups[name])} {name}{_notes(groups[name])}"
        for name in (*ordered, EXPLORATORY)
        if name in groups
    )


def _notes(verdicts: Sequence[Verdict]) -> str:
    """Return in brackets how many verdicts are so marked, without a number where all are."""
    notes = ", ".join(
        mark if len(marked) == len(verdicts) else f"{len(marked)} {mark}"
        for mark, marked in _marked(verdicts).items()
        if mark != EXPLORATORY
    )
    return f" ({notes})" if notes else ""


def marks_of(verdicts: Iterable[Verdict]) -> list[str]:
    """Return the marks that must follow a word for several verdicts."""
    return list(_marked(list(verdicts)))


def _marked(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """Return the verdicts that carry each mark, of marks that any of them carries."""
    marked: dict[str, list[Verdict]] = {
        mark: [item for item in verdicts if mark in item.marks] for mark in MARKS
    }
    by_chance = [item for item in verdicts if _is_by_chance(item)]
    return {mark: items for mark, items in {**marked, BY_CHANCE: by_chance}.items() if items}


def of_kind(checked: Checked, *kinds: Kind) -> list[Verdict]:
    """Return the verdicts of a check that are about one of these."""
    return [verdict for verdict in checked.verdicts if kind_of(verdict) in kinds]


def to_show(checked: Checked) -> list[Verdict]:
    """Return the verdicts that a table lists: of blessed values those changed or unclear."""
    counted_alone = ("reproduced", "not run")
    return [
        verdict
        for verdict in checked.verdicts
        if kind_of(verdict) is not Kind.BLESSED or verdict.status not in counted_alone
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stated bar with its verdict.

    Attributes
    ----------
    title
        The metric in words, the arm before it where the target has several.
    """

    expectation: Expectation
    verdict: Verdict
    title: str
    unit: str

    @property
    def key(self) -> tuple[str, str]:
        """Arm and metric."""
        return self.expectation.arm, self.expectation.metric


def stated_bars(checked: Checked, expected: Path) -> list[Bar]:
    """Return the stated bars of a check that were measured.

    Stated are expectations with a reason of their own (`derived`), as against those that were
    blessed from earlier records and may be of the same arm and metric. The smoke tier's are about
    its machinery and are left out.
    """
    target, tier = checked.selection.target, checked.selection.tier
    if tier is Tier.SMOKE:
        return []
    # A verdict's source tells a stated bar from a blessed value of the same name.
    verdicts = {(item.name, item.source): item for item in checked.verdicts}
    bars = []
    for item in load_bars(expected, tier.value, target.name, device_name(checked.evidence)):
        verdict = verdicts.get((f"{item.arm}.{item.metric}", f"{item.source}: {item.because}"))
        if verdict is not None and verdict.effect is not None:
            metric, label = target.metric(item.metric), target.arm(item.arm).label
            title = f"{label}: {metric.title}" if len(target.arms) > 1 else metric.title
            bars.append(Bar(expectation=item, verdict=verdict, title=title, unit=metric.unit))
    return bars


def all_bars(checked: Checked, expected: Path) -> list[Verdict]:
    """Return the verdicts on bars of a check: stated ones, and claims that are this suite's."""
    own = [item for item in of_kind(checked, Kind.BAR) if item.source == OWN_BAR]
    return own + [bar.verdict for bar in stated_bars(checked, expected)]
