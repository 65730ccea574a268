"""A judgement written down: plain lines, Markdown, JSON, and JUnit for CI.

Every form has the same verdict first and the same rows in the same order: regressed, unclear,
improved, the largest losses first. JUnit's words are fewer: a regressed row is a failure, an
unclear one skipped, a target that could not be judged an error.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from repro.evidence.origins import commits_of, devices_of
from repro.evidence.printable import one_line, without_controls
from repro.evidence.verdicts.compare import VERDICTS, Comparison, Judgement, Row, Side
from repro.report.numbers import quantity
from repro.report.tables import plain
from repro.report.tables import table as markdown_table

LINES = 10
_PROBLEMS_SHOWN = 3
_ROWS_IN_MARKDOWN = 50


def headline(judgement: Judgement) -> str:
    """Return the verdict in a line."""
    rows = len(judgement.rows)
    if judgement.status == "regressed":
        lost = judgement.count("regressed")
        return f"regressed: {lost} of {rows} values are worse by more than their threshold"
    if judgement.status == "could not judge":
        return f"could not judge: {rows} values compared, {len(judgement.every_problem)} not judged"
    return f"fine: none of {rows} values is shown to be worse by more than its threshold"


def counts_text(judgement: Judgement) -> str:
    """Return how many rows have each verdict."""
    return ", ".join(f"{judgement.count(verdict)} {verdict}" for verdict in VERDICTS)


def plain_lines(judgement: Judgement, files: str = "", most: int | None = LINES) -> list[str]:
    """Return lines without markup: verdict, counts, reasons, the worst rows.

    Parameters
    ----------
    files
        Where the rest is, for the last line.
    most
        How many lines there may be; None for all rows and reasons.
    """
    first = [headline(judgement), counts_text(judgement)]
    last = [line for line in (provenance_text(judgement), files) if line]
    problems = judgement.every_problem
    if most is not None and len(problems) > _PROBLEMS_SHOWN:
        more = len(problems) - (_PROBLEMS_SHOWN - 1)
        problems = [*problems[: _PROBLEMS_SHOWN - 1], f"and {more} more reasons"]
    middle = [*problems, *(row_text(row) for row in _remarkable(judgement))]
    room = None if most is None else most - len(first) - len(last)
    return [one_line(line) for line in (*first, *middle[:room], *last)]


def _remarkable(judgement: Judgement) -> list[Row]:
    return [row for row in judgement.rows if row.verdict != "unchanged"]


def row_text(row: Row) -> str:
    """Return a row as a sentence."""
    return (
        f"{row.verdict}: {row.target} {row.arm} {row.metric} {_mean(row.old, row)} -> "
        f"{_mean(row.new, row)}, {change_text(row)} ({_because(row)})"
    )


def _mean(values: Sequence[float], row: Row) -> str:
    return quantity(sum(values) / len(values), row.unit)


def change_text(row: Row) -> str:
    """Return the change, in percent where it is relative."""
    return f"{_change(row.change, row)} {_change_unit(row)}"


def _because(row: Row) -> str:
    threshold = f"threshold {_change(row.threshold, row).lstrip('+')} {_change_unit(row)}"
    n = f"n = {len(row.old)} and {len(row.new)}"
    if row.low is None or row.high is None:
        return f"{row.better} is better; too few values for an interval, {n}; {threshold}"
    interval = f"95 % interval {_change(row.low, row)} to {_change(row.high, row)}"
    return f"{row.better} is better; {interval}, {n}; {threshold}"


def _change(value: float, row: Row) -> str:
    return f"{100 * value:+.1f}" if row.relative else f"{value:+.3g}"


def _change_unit(row: Row) -> str:
    if row.relative:
        return "%"
    return "points" if row.unit == "percent" else row.unit


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
    commits = ", ".join(commit[:12] for commit in commits_of(records))
    return f"{names} ({devices}, commit {commits})"


def print_judgement(judgement: Judgement, files: str = "") -> None:
    """Print ten plain lines at most; on a terminal, all rows that are not unchanged."""
    lines = plain_lines(judgement, files, LINES if not sys.stdout.isatty() else None)
    sys.stdout.write("".join(line + "\n" for line in lines))


def markdown(judgement: Judgement) -> str:
    """Return the judgement as the summary of a CI step."""
    lines = [f"## Regression: {judgement.status}", "", f"{headline(judgement)}.", ""]
    lines += [f"{counts_text(judgement)}.", ""]
    lines += [f"* not judged: {plain(one_line(problem))}" for problem in judgement.every_problem]
    rows = _remarkable(judgement)[:_ROWS_IN_MARKDOWN]
    heads = ("target", "arm", "value", "verdict", "old", "new", "change", "because")
    lines += ["", *markdown_table(heads, map(_markdown_cells, rows))]
    left = len(_remarkable(judgement)) - len(rows)
    lines += [f"{left} more rows are in the JSON.", ""] if left else []
    return "\n".join([*lines, provenance_text(judgement)]).rstrip() + "\n"


def _markdown_cells(row: Row) -> tuple[str, ...]:
    verdict = f"**{row.verdict}**" if row.verdict == "regressed" else row.verdict
    old, new = _mean(row.old, row), _mean(row.new, row)
    return (row.target, row.arm, row.title, verdict, old, new, change_text(row), _because(row))


def json_text(judgement: Judgement) -> str:
    """Return the whole judgement, raw values included."""
    value = {
        "status": judgement.status,
        "exit_status": judgement.exit_status,
        "counts": {verdict: judgement.count(verdict) for verdict in VERDICTS},
        "problems": judgement.every_problem,
        "targets": [_comparison_json(item) for item in judgement.comparisons],
    }
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "target": comparison.target,
        "tier": comparison.tier,
        "old": _side_json(comparison.old),
        "new": _side_json(comparison.new),
        "problems": list(comparison.problems),
        "without_baseline": list(comparison.without_baseline),
        "rows": [dataclasses.asdict(row) for row in comparison.rows],
    }


def _side_json(side: Side) -> dict[str, Any]:
    records = side.every()
    return {
        "name": side.name,
        "records": len(records),
        "devices": sorted(str(device) for device in devices_of(records)),
        "commits": commits_of(records),
    }


def junit_text(judgement: Judgement) -> str:
    """Return the judgement as JUnit's XML: a suite per target, a case per row."""
    root = ElementTree.Element("testsuites", name="repro regression")
    for comparison in judgement.comparisons:
        suite = _suite(root, f"{comparison.target} ({comparison.tier})")
        for row in comparison.rows:
            case = _case(suite, f"{row.target}.{row.arm}", row.metric)
            if row.verdict in ("regressed", "unclear"):
                kind = "failure" if row.verdict == "regressed" else "skipped"
                ElementTree.SubElement(
                    case, kind, message=without_controls(row_text(row))
                ).text = _raw(row)
        _errors(suite, comparison.target, comparison.problems)
    if judgement.problems:
        _errors(_suite(root, "records"), "records", judgement.problems)
    for element in (*root, root):
        element.set("tests", str(len(element.findall(".//testcase"))))
        for kind, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            element.set(name, str(len(element.findall(f".//{kind}"))))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"


def _suite(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(root, "testsuite", name=name)


def _case(suite: ElementTree.Element, owner: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=owner, name=name)


def _errors(suite: ElementTree.Element, owner: str, problems: Sequence[str]) -> None:
    for number, problem in enumerate(problems, 1):
        case = _case(suite, owner, f"could be judged ({number})")
        ElementTree.SubElement(case, "error", message=without_controls(problem))


def _raw(row: Row) -> str:
    return f"old {list(row.old)}\nnew {list(row.new)}\nin {row.unit}"
