"""A judgement written down, in plain lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from repro.evidence.origins import devices_of, named_commits
from repro.evidence.printable import one_line
from repro.judge.as_before import VERDICTS, Side
from repro.regression.judgement import Judgement
from repro.report.verdict_words import row_text


def headline(judgement: Judgement) -> str:
    """Return the verdict in a line."""
    rows = len(judgement.rows)
    if judgement.status == "regressed":
        lost = sum(len(comparison.worse) for comparison in judgement.comparisons)
        return f"regressed: {lost} of {rows} values are worse by more than their threshold"
    if judgement.status == "could not judge":
        return f"could not judge: {rows} values compared, {len(judgement.every_problem)} not judged"
    return f"fine: none of {rows} values is shown to be worse by more than its threshold"


def judgement_text(judgement: Judgement, files: str = "") -> str:
    """Return plain lines: verdict, counts, reasons, the rows that are not unchanged, origins.

    Parameters
    ----------
    files
        Where the rest is, for the last line.
    """
    found = Counter(row.verdict for row in judgement.rows)
    lines = [
        headline(judgement),
        ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS),
        *judgement.every_problem,
        *(row_text(row) for row in judgement.rows if row.verdict != "unchanged"),
        *filter(None, (provenance_text(judgement), files)),
    ]
    return "".join(f"{one_line(line)}\n" for line in lines)


def provenance_text(judgement: Judgement) -> str:
    """Return where both sides are from, and what software differs; empty without records."""
    olds = [comparison.old for comparison in judgement.comparisons]
    news = [comparison.new for comparison in judgement.comparisons]
    old, new = _origin(olds), _origin(news)
    if not (old and new):
        return ""
    before, now = _software(olds), _software(news)
    moved = [
        f"{name} {before[name]} -> {now[name]}"
        for name in before
        if before[name] and now[name] and before[name] != now[name]
    ]
    return f"{old} -> {new}" + "".join(f"; {change}" for change in moved)


def _software(sides: Sequence[Side]) -> dict[str, str]:
    """Return the versions of the software that timings depend on, by name."""
    versions: dict[str, set[str]] = {name: set() for name in ("torch", "triton", "driver")}
    for record in (record for side in sides for record in side.every()):
        packages = record.environment.get("packages", {})
        gpus = record.environment.get("gpu")
        stated = {name: packages.get(name) for name in ("torch", "triton")}
        if isinstance(gpus, list) and gpus:
            stated["driver"] = gpus[0].get("driver_version")
        for name, value in stated.items():
            versions[name] |= {value} if value else set()
    return {name: ", ".join(sorted(values)) for name, values in versions.items()}


def _origin(sides: Sequence[Side]) -> str:
    records = [record for side in sides for record in side.every()]
    if not records:
        return ""
    names = ", ".join(dict.fromkeys(side.name for side in sides if side.every()))
    devices = ", ".join(sorted(str(device or "no GPU") for device in devices_of(records)))
    commits = ", ".join(named_commits(records, 12))
    return f"{names} ({devices}, commit {commits})"
