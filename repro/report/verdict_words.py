"""The vocabulary of verdicts: what is judged, in which words, and how often each occurs.

`repro.evidence.verdicts.verdict` says what leads to each status. Tables and JSON print the status
itself; a person reads words:

* a claim (of the paper, about the machinery, or a question that the paper leaves open) holds, does
  not hold, is mixed, is undecided or was not tested; the reason follows where there are several;
* a performance target of this suite is met, missed, undecided or not tested.

Values compared with earlier ones have the words of `repro.judge.as_before`. A verdict's marks
follow its word, such as *post hoc* if its rule was chosen after the runs; q follows if a direction
is shown for its target, but not over the whole study. What is exploratory is counted apart,
whatever its status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path

from repro.evidence.origins import grouped_by
from repro.evidence.verdicts.expectation import Expectation, load_bars
from repro.evidence.verdicts.verdict import EXPLORATORY, SHOWN, Status, Verdict
from repro.judge.as_before import Comparison, MetricRow
from repro.judge.check import Checked
from repro.report.numbers import device_heads, quantity
from repro.report.tables import NOTHING, table
from repro.spec.claim import ALPHA, OWN_BAR
from repro.spec.tier import Tier

BY_CHANCE = f"q >= {100 * ALPHA:g} %"


class Kind(Enum):
    """What a verdict is about; the value names several of them."""

    PAPER = "claims of the paper"
    OPEN = "questions that the paper leaves open"
    MACHINERY = "claims about the machinery"
    BAR = "performance targets of this suite"


_ONE = {Kind.MACHINERY: "about the machinery", Kind.BAR: "performance target"}
CLAIMS = (Kind.PAPER, Kind.OPEN, Kind.MACHINERY)
HOLDS, DOES_NOT, MIXED, UNDECIDED, NOT_TESTED = PLAIN_WORDS = (
    "holds",
    "does not hold",
    "mixed",
    "undecided",
    "not tested",
)
# The plain word, the reason that follows it where several statuses share it, a terminal's colour.
_BY_STATUS: Mapping[Status, tuple[str, str, str]] = {
    "reproduced": (HOLDS, "", "green"),
    "below a tenth": (MIXED, "less than a tenth of the paper's effect", "green"),
    "contradicted": (DOES_NOT, "the opposite is shown", "red"),
    "excluded": (DOES_NOT, "the paper's effect is ruled out", "cyan"),
    "no difference": (DOES_NOT, "no difference that matters", "cyan"),
    "inconclusive": (UNDECIDED, "", "yellow"),
    "not judged": (UNDECIDED, "the interval is too wide", "yellow"),
    "not testable": (UNDECIDED, "not testable here", "dim"),
    "not addressed": (NOT_TESTED, "needs a larger model", "dim"),
    "not run": (NOT_TESTED, "", "dim"),
}
PLAIN = {status: plain for status, (plain, _, _) in _BY_STATUS.items()}
CLAIM_WORDS = {
    status: ": ".join(filter(None, (plain, why))) for status, (plain, why, _) in _BY_STATUS.items()
}
COLOUR = {status: colour for status, (_, _, colour) in _BY_STATUS.items()}
_BAR_WORDS = {HOLDS: "met", DOES_NOT: "missed", UNDECIDED: UNDECIDED, NOT_TESTED: NOT_TESTED}
# By a verdict's word, what is said of one statement and of several, in the order of a sentence.
Sayings = Mapping[str, tuple[str, str]]
_OPEN: Sayings = {
    MIXED: ("is mixed", "are mixed"),
    UNDECIDED: ("is undecided", "are undecided"),
    NOT_TESTED: ("was not tested", "were not tested"),
    EXPLORATORY: ("is exploratory", "are exploratory"),
}
SAID_OF_CLAIMS: Sayings = {
    HOLDS: ("holds", "hold"),
    DOES_NOT: ("does not hold", "do not hold"),
    **_OPEN,
}
SAID_OF_BARS: Sayings = {
    HOLDS: ("is met", "are met"),
    DOES_NOT: ("is missed", "are missed"),
    **_OPEN,
}


def kind_of(verdict: Verdict) -> Kind:
    """Return what a verdict is about."""
    if verdict.is_bar:
        return Kind.BAR
    if verdict.about == "mechanism":
        return Kind.MACHINERY
    return Kind.OPEN if verdict.source.startswith("not in the paper") else Kind.PAPER


def word(verdict: Verdict) -> str:
    """Return the verdict in the words of its kind: `does not hold: the opposite is shown`."""
    if kind_of(verdict) is Kind.BAR:
        return _BAR_WORDS[PLAIN[verdict.status]]
    if verdict.status == "no difference":
        unit = "x" if verdict.unit in ("x", "ratio") else f" {verdict.unit}"
        return f"{DOES_NOT}: no difference within {verdict.matters:.2g}{unit}"
    return CLAIM_WORDS[verdict.status]


def labelled(verdict: Verdict) -> str:
    """Return the verdict's word, its marks, and a q at which it is not shown."""
    notes = [*verdict.marks]
    if _is_by_chance(verdict):
        notes.append(f"q = {verdict.q:.2g}")
    return ", ".join([word(verdict), *notes])


def _is_by_chance(verdict: Verdict) -> bool:
    """Whether a direction is shown by its target alone, not at the study's discovery rate."""
    return verdict.status in SHOWN and verdict.q is not None and verdict.q >= ALPHA


def about(verdict: Verdict) -> str:
    """Return the kind of a verdict that is not about the paper: `bar`; else empty."""
    return _ONE.get(kind_of(verdict), "")


def counted(verdicts: Iterable[Verdict]) -> str:
    """Return how many verdicts have each word: `12 hold, 3 are undecided (2 post hoc)`."""
    every = list(verdicts)
    of_bars = bool(every) and kind_of(every[0]) is Kind.BAR
    counts = said_counts(every, SAID_OF_BARS if of_bars else SAID_OF_CLAIMS)
    return ", ".join(f"{count} {said}" for said, count in counts.items())


def said_counts(
    verdicts: Iterable[Verdict],
    sayings: Sayings,
    word: Callable[[Verdict], str] = lambda verdict: PLAIN[verdict.status],
) -> dict[str, int]:
    """Return how many verdicts there are by what is said of them, their marks in brackets.

    Exploratory ones, whatever their words, are counted together.
    """
    groups: dict[str, list[Verdict]] = {name: [] for name in sayings}
    for verdict in verdicts:
        groups[EXPLORATORY if EXPLORATORY in verdict.marks else word(verdict)].append(verdict)
    return {
        f"{sayings[name][len(of) > 1]}{notes_on(of, but=name)}": len(of)
        for name, of in groups.items()
        if of
    }


def notes_on(verdicts: Sequence[Verdict], but: str = "") -> str:
    """Return in brackets how many verdicts are so marked, without a number where all are.

    The mark `but` is left out.
    """
    notes = ", ".join(
        mark if count == len(verdicts) else f"{count} {mark}"
        for mark, count in marks_of(verdicts).items()
        if mark != but
    )
    return f" ({notes})" if notes else ""


def marks_of(verdicts: Iterable[Verdict]) -> Counter[str]:
    """Return how many verdicts have each mark that must follow their word, by chance last."""
    every = list(verdicts)
    marks = Counter(mark for verdict in every for mark in verdict.marks)
    return marks + Counter({BY_CHANCE: sum(map(_is_by_chance, every))})


def of_kind(checked: Checked, *kinds: Kind) -> list[Verdict]:
    """Return the verdicts of a check that are about one of these."""
    return [verdict for verdict in checked.verdicts if kind_of(verdict) in kinds]


def stated_bars(checked: Checked, expected: Path) -> list[tuple[Expectation, Verdict]]:
    """Return the stated bars of a check that were measured, each with its verdict.

    The smoke tier's are about its machinery and are left out.
    """
    target, tier = checked.selection.target, checked.selection.tier
    if tier is Tier.SMOKE:
        return []
    # A verdict's source tells a bar from another one, or the paper's value, of the same name.
    verdicts = {(item.name, item.source): item for item in checked.verdicts}
    bars = []
    for bar in load_bars(expected, tier.value, target.name, checked.evidence.device):
        verdict = verdicts.get((f"{bar.arm}.{bar.metric}", f"{bar.source}: {bar.because}"))
        if verdict is not None and verdict.effect is not None:
            bars.append((bar, verdict))
    return bars


def all_bars(checked: Checked, expected: Path) -> list[Verdict]:
    """Return the verdicts on bars of a check: stated ones, and claims that are this suite's."""
    own = [item for item in of_kind(checked, Kind.BAR) if item.source == OWN_BAR]
    return own + [verdict for _, verdict in stated_bars(checked, expected)]


def counts_of(checks: Iterable[Checked], expected: Path) -> dict[str, str]:
    """Return the counts of the verdicts of checks, by what they are about."""
    every = list(checks)
    verdicts = {kind: [v for one in every for v in of_kind(one, kind)] for kind in CLAIMS}
    bars = {Kind.BAR: [verdict for one in every for verdict in all_bars(one, expected)]}
    return {kind.value: counted(of) for kind, of in (verdicts | bars).items()}


def count_rows(checks: Iterable[Checked], expected: Path) -> list[str]:
    """Return a table of how many verdicts of each kind there are, a column per tier and device."""
    recorded = [checked for checked in checks if checked.evidence.count]
    names = device_heads(dict.fromkeys(checked.evidence.device for checked in recorded))
    places = grouped_by(
        recorded, lambda one: f"{one.selection.tier.value}, {names[one.evidence.device]}"
    )
    counts = [counts_of(of_place, expected) for of_place in places.values()]
    rows = [[kind.value, *(of[kind.value] for of in counts)] for kind in Kind]
    return table(["", *places], rows) if counts else NOTHING


def as_before_lines(compared: Comparison | None) -> list[str]:
    """Return how many values are as they were blessed, then a line for each that is not.

    Unclear ones are only counted. Without values, the first reason why none was compared.
    """
    if compared is None:
        return []
    counts = [f"{count} {verdict}" for verdict, count in compared.counts().items()]
    n = "1 value" if len(compared.rows) == 1 else f"{len(compared.rows)} values"
    if not counts:
        return [f"no value is compared with blessed ones: {compared.problems[0]}"]
    if len(counts) == 1:
        return [f"{n} {compared.rows[0].verdict} since blessed"]
    shown = [row for row in compared.rows if row.verdict not in ("unclear", "unchanged")]
    return [f"{n} compared with blessed ones: {', '.join(counts)}", *map(row_text, shown)]


def row_text(row: MetricRow) -> str:
    """Return a row as a sentence."""
    unit = "%" if row.relative else "points" if row.unit == "percent" else row.unit
    old, new = (quantity(sum(of) / len(of), row.unit) for of in (row.old, row.new))

    def text(change: float) -> str:
        return f"{100 * change:+.1f}" if row.relative else f"{change:+.3g}"

    interval = "too few values for an interval"
    if row.low is not None and row.high is not None:
        interval = f"95 % interval {text(row.low)} to {text(row.high)}"
    return (
        f"{row.verdict}: {row.target} {row.arm} {row.metric} {old} -> {new}, {text(row.change)} "
        f"{unit} ({row.better} is better; {interval}, n = {len(row.old)} and {len(row.new)}; "
        f"threshold {text(row.threshold).lstrip('+')} {unit})"
    )
