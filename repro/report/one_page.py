"""`repro report --html FILE`: everything that checks say on one page that opens from disk.

The page is a template over the tidy table (`repro.report.tidy`): it has its styles and its script
within, asks no network, and without scripts shows every row.

What others measured has a section of its own: the bundles at `reported/<who>/<name>.jsonl.xz`,
judged by today's rules. The folder's README says how they get there; nothing that is blessed or
answered counts them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.evidence.origins import grouped_by, named_commits
from repro.evidence.paper import read_paper
from repro.evidence.printable import one_line, without_controls
from repro.judge.bundle import COMMIT, Judged, judge_folder, untrusted
from repro.judge.check import Checked
from repro.report.numbers import device_title, environment_lines
from repro.report.readme import answer_lines, answers
from repro.report.tables import by_device, plain, table
from repro.report.tidy import Row, statements, templates, values
from repro.report.verdict_words import CLAIM_WORDS, Kind, counted, of_kind
from repro.run.places import PACKAGE
from repro.spec.tier import Tier

# Values that are worth a picture.
_FEWEST = 3
# The page may be of a few targets, so that a claim without records may have some elsewhere.
ABSENT = "not tested here"
REPORTED = PACKAGE.parent / "reported"
_WHO = re.compile(r"[A-Za-z0-9-]{1,39}")
_MARKS = re.compile(r"([\\`*_\[\]])")
_SHORT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A bundle: who sent it, what it is, and its verdicts or the reason why it has none."""

    who: str
    title: str
    summary: str
    checked: Checked | None = None
    rows: tuple[Row, ...] = ()


def page_text(
    checks: Sequence[Checked],
    expected: Path,
    reports: Sequence[Report] | None = None,
    untested: Sequence[Checked] = (),
) -> str:
    """Return the page of these checks as HTML, without a section of reports where they are None.

    The paper's claims come first within each target. Of `untested`, targets without any record,
    the page has those alone.
    """
    kinds = [kind.value for kind in Kind]
    rows = [row for row in statements(checks, expected) if row.device]
    rows += [
        dataclasses.replace(row, because="no run is stored")
        for row in statements(untested, expected)
        if row.kind == Kind.PAPER.value
    ]
    rows.sort(key=lambda row: kinds.index(row.kind))
    shown = [*rows, *(row for one in reports or () for row in one.rows)]
    answered = answers(checks, expected)
    tiers = grouped_by(rows, lambda row: row.tier)
    measured = {row.tier for row in rows if row.device}
    # The largest first; those without any record last.
    largest = list(reversed(Tier))
    order = sorted(largest, key=lambda tier: tier.value not in measured)
    by_tier = {
        tier: grouped_by(tiers[tier.value], lambda row: row.title)
        for tier in order
        if tier.value in tiers
    }
    return without_controls(
        templates()
        .get_template("report.html")
        .render(
            answer=answer_lines(answered, ABSENT),
            tiers=by_tier,
            reports=reports,
            count=len(shown),
            kinds=list(dict.fromkeys(row.kind for row in shown)),
            words=sorted({row.status for row in shown}),
            devices={
                row.device: device_title(row.device.removeprefix("cpu")) if row.device else ""
                for row in shown
            },
            phrases=CLAIM_WORDS,
            seeds=_seeds(checks),
            seeds_of=lambda one: _seeds([one.checked]),
            scale=interval_marks,
            strips=seed_marks,
            contradictions=[  # (file, contradiction) of the paper's own numbers
                (path.stem, item)
                for path in sorted((expected / "paper").glob("*.json"))
                for item in read_paper(path)[0].get("contradictions", [])
            ],
            environments=_environments(checks),
        )
    )


def _seeds(checks: Sequence[Checked]) -> dict[tuple[str, ...], list[tuple[str, float]]]:
    """Return (seed, value) by target, tier, device, arm and metric."""
    by_place: dict[tuple[str, ...], list[tuple[str, float]]] = {}
    for row in values(checks):
        place = tuple(row[name] for name in ("target", "tier", "device", "arm", "metric"))
        name = ".".join(str(row[of]) for of in ("seed", "repeat") if row[of] is not None)
        by_place.setdefault(place, []).append((name, row["value"]))
    return by_place


def interval_marks(row: Row) -> dict[str, float]:
    """Return where an interval, its effect, no effect and the paper's value lie, in percent.

    `least` and `most` are the values at 3 and 97 %. Empty where there is no interval. No effect is
    1 for ratios, else 0.
    """
    if row.effect is None or row.low is None or row.high is None:
        return {}
    marks = {"low": row.low, "effect": row.effect, "high": row.high}
    marks["none"] = 1.0 if row.unit in ("ratio", "x") else 0.0
    if row.paper is not None:
        marks["paper"] = row.paper
    least, most = min(marks.values()), max(marks.values())
    room = (most - least) or 1.0
    places = {name: round(3 + 94 * (value - least) / room, 2) for name, value in marks.items()}
    return places | {"least": least, "most": most}


def seed_marks(
    row: Row, seeds: Mapping[tuple[str, ...], Any]
) -> tuple[list[list[float]], tuple[float, ...]]:
    """Return where the seeds of each arm (see `_seeds`) lie, in percent, and the outer two values.

    Both are empty where there are too few.
    """
    places = [(row.target, row.tier, row.device, arm, row.metric) for arm in row.arms.split()]
    arms = [[value for _, value in seeds[place]] for place in places if place in seeds]
    every = [value for arm in arms for value in arm]
    if len(every) < _FEWEST or min(every) == max(every):
        return [], ()
    least, room = min(every), max(every) - min(every)
    marks = [[round(3 + 94 * (value - least) / room, 2) for value in arm] for arm in arms]
    return marks, (least, max(every))


def _environments(checks: Sequence[Checked]) -> dict[str, list[tuple[str, str]]]:
    """Return title and text of what ran, by tier and device."""
    return {
        f"{tier.value}, {device_title(device)}": environment_lines(
            [record for one in of_place for record in one.evidence.every_record()]
        )
        for tier in Tier
        for device, of_place in by_device(c for c in checks if c.selection.tier is tier).items()
    }


def reports(folder: Path, expected: Path) -> list[Report]:
    """Return what the bundles in a folder report; empty without any."""
    return [_report(one, expected) for one in judge_folder(folder, expected)]


def _report(one: Judged, expected: Path) -> Report:
    name = one.path.parent.name
    who = name if _WHO.fullmatch(name) else "no account's name"
    if one.checked is None:
        return Report(who=who, title=one_line(one.path.name), summary=one.why)
    try:
        with untrusted(one.path):
            title, summary = _said_of(one.checked)
            rows = tuple(statements([one.checked], expected))
    except ValueError as error:
        return Report(who=who, title=one_line(one.path.name), summary=str(error))
    summary += f"; {one.elsewhere}" if one.elsewhere else ""
    return Report(who=who, title=title, summary=summary, checked=one.checked, rows=rows)


def _said_of(checked: Checked) -> tuple[str, str]:
    """Return what a bundle is, and its verdicts in short."""
    target, tier = checked.selection.target.name, checked.selection.tier.value
    records = checked.evidence.all_records()
    known = [record for record in records if COMMIT.fullmatch(record.commit)]
    commits = ", ".join(named_commits(known, _SHORT)) or "unknown"
    device = device_title(checked.evidence.device)
    summary = counted(of_kind(checked, Kind.PAPER)) or "no claim of the paper's"
    if refused := len(checked.evidence.refused):
        summary += f"; {refused} records refused"
    return f"{target}, {tier} tier, {device}, commit {commits}: {len(records)} records", summary


def reported_rows(folder: Path, expected: Path) -> list[str]:
    """Return a table of what others report, or a sentence where nobody has yet."""
    sent = reports(folder, expected)
    if not sent:
        return ["Nobody has sent one yet."]
    # A stranger's text, escaped so that Markdown shows it literally.
    rows = [
        [_MARKS.sub(r"\\\1", plain(cell)) for cell in (one.who, one.title, one.summary)]
        for one in sent
    ]
    return table(["reported by", "what", "verdicts"], rows)
