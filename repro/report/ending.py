"""The last line of `check` and `reproduce`: what came out, in sentences for a person.

Faults come first, then what is worse than before, what is missing, and the verdicts in plain words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from repro.evidence.verdicts.verdict import EXPLORATORY, Status, Verdict
from repro.judge.check import Checked
from repro.report.verdict_words import (
    DOES_NOT,
    HOLDS,
    PLAIN,
    SAID_OF_BARS,
    SAID_OF_CLAIMS,
    Kind,
    Sayings,
    of_kind,
    said_counts,
)
from repro.spec.tier import REAL_CHECKPOINTS, Tier

_CHECKS: Sayings = {**SAID_OF_CLAIMS, HOLDS: ("passed", "passed"), DOES_NOT: ("failed", "failed")}
# How a bar that is missed stood before.
_BEFORE: Mapping[Status | None, str] = {
    "contradicted": "missed as before",
    "reproduced": "missed, but met before",
    "inconclusive": "missed, but undecided before",
    None: "missed, without an earlier verdict",
}
_BARS: Sayings = {
    HOLDS: SAID_OF_BARS[HOLDS],
    **{text: (f"is {text}", f"are {text}") for text in _BEFORE.values()},
    **{name: said for name, said in SAID_OF_BARS.items() if name not in (HOLDS, DOES_NOT)},
}


def ending(checks: Sequence[Checked]) -> str:
    """Return the result of checks as one line."""
    recorded = [one for one in checks if one.lacking is None]
    lacking = [one for one in checks if one.lacking is not None]
    larger = [one for one in recorded if one.selection.tier is not Tier.SMOKE]
    sentences = [
        *_faults(recorded),
        *_absent(lacking, recorded),
        _machinery(recorded),
        *_of_paper(recorded),
        _counted(_all(recorded, Kind.OPEN), "claim{} beyond the paper", SAID_OF_CLAIMS),
        _counted(_all(larger, Kind.BAR), "performance target{} of this suite", _BARS, bar_word),
    ]
    return " ".join(filter(None, sentences))


def bar_word(verdict: Verdict) -> str:
    """Return the word for a bar: that it is met, or how it was before where it is missed."""
    word = PLAIN[verdict.status]
    return _BEFORE[verdict.before] if word == DOES_NOT else word


def _faults(checks: Sequence[Checked]) -> list[str]:
    """Return the sentences of an exit status 1."""
    refused = [one for one in checks for _ in one.evidence.refused]
    failed = [one for one in checks for verdict in one.verdicts if verdict.own_fault]
    worse = [(one, isinstance(item, Verdict)) for one in checks for item in one.worse]
    bars = sum(is_bar for _, is_bar in worse)
    counts = {"value": len(worse) - bars, "performance target": bars}
    lost = " and ".join(_count(number, noun) for noun, number in counts.items() if number)
    found = {
        f"Fault: {_count(len(refused), 'record')} refused": refused,
        f"Fault: {_count(len(failed), 'check{} of the machinery')} failed": failed,
        f"Worse than before: {lost}": [one for one, _ in worse],
    }
    return [f"{what} ({_names(places)})." for what, places in found.items() if places]


def _absent(lacking: Sequence[Checked], recorded: Sequence[Checked]) -> list[str]:
    """Return the sentences on records that are not there, and on runs that failed."""
    missing = [
        one
        for one in recorded
        for arm in one.selection.target.arms
        # At the systems tier a machine may lack the library of an arm.
        if one.selection.tier is not Tier.SYSTEMS or arm.name in one.evidence.records
        for _ in one.evidence.without_record(arm.name)
    ]
    failed = [one for one in recorded for _ in one.evidence.failed]
    sentences = [f"There are no records of {_names(lacking)}."] * bool(lacking)
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        sentences.append(f"{_count(len(missing), 'planned run')} {verb} no record.")
    return sentences + [f"{_count(len(failed), 'run')} failed."] * bool(failed)


def _machinery(checks: Sequence[Checked]) -> str:
    # At the smoke tier bars say whether the machinery works at all.
    smoke = [one for one in checks if one.selection.tier is Tier.SMOKE]
    verdicts = _all(checks, Kind.MACHINERY) + _all(smoke, Kind.BAR)
    if verdicts and all(v.status == "reproduced" and EXPLORATORY not in v.marks for v in verdicts):
        return "All checks of the machinery passed."
    return _counted(verdicts, "check{} of the machinery", _CHECKS)


def _of_paper(checks: Sequence[Checked]) -> list[str]:
    """Return the sentences on the paper's claims."""
    verdicts = _all(checks, Kind.PAPER)
    judged = [verdict for verdict in verdicts if verdict.status != "not addressed"]
    sentences = [_counted(judged, "claim{} of the paper", SAID_OF_CLAIMS)]
    if larger := len(verdicts) - len(judged):
        scales = {tier for one in checks for tier in one.selection.source.scales}
        flags = [f"--tier {tier.value}" for tier in REAL_CHECKPOINTS if tier in scales]
        where = f" ({' or '.join(flags)})" if flags else ""
        need = "needs" if larger == 1 else "need"
        what = _count(larger, "claim{} of the paper")
        sentences.append(f"{what} {need} a larger model{where}.")
    return sentences if verdicts or not checks else ["No claim of the paper is tested here."]


def _all(checks: Iterable[Checked], kind: Kind) -> list[Verdict]:
    return [verdict for one in checks for verdict in of_kind(one, kind)]


def _counted(
    verdicts: Sequence[Verdict],
    noun: str,
    sayings: Sayings,
    word: Callable[[Verdict], str] = lambda verdict: PLAIN[verdict.status],
) -> str:
    """Return `Of 3 claims, 2 hold and 1 is undecided.`; `3 claims hold.` where all are alike."""
    said = said_counts(verdicts, sayings, word)
    if len(said) == 1:
        return f"{_count(len(verdicts), noun)} {next(iter(said))}."
    *most, last = [f"{count} {what}" for what, count in said.items()] or [""]
    return f"Of {_count(len(verdicts), noun)}, {', '.join(most)} and {last}." if most else ""


def _count(number: int, noun: str) -> str:
    """Return `1 claim` or `2 claims`; `{}` in the noun is where the plural's s is."""
    noun = noun if "{}" in noun else f"{noun}{{}}"
    return f"{number} {noun.replace('{}', '' if number == 1 else 's')}"


def _names(checks: Iterable[Checked]) -> str:
    return ", ".join(dict.fromkeys(one.selection.target.name for one in checks))
