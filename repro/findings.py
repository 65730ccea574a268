"""The page of findings: which of the paper's learning claims hold at the proxy tier, which do not.

Drawn from blessed records (or a folder of records) and from nothing else: statement, effect with
its 95 % interval, verdict, seeds, and how many would decide. A claim without records is listed as
not run. Claims of the paper come first, by verdict; then the controls', which answer
questions that the paper leaves open; then what can be said of the runs themselves.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repro.analysis_plan import needs_plan, plan_digest
from repro.blessed import unpack
from repro.check import Checked, check_selection
from repro.evidence.record import Record, replace_text
from repro.evidence.verdict import Verdict
from repro.places import expected_folder
from repro.report_tables import cell_text
from repro.selection import Selection
from repro.spec.tier import Tier
from repro.targets import TARGETS, runs_of
from repro.targets.chosen_rates import read_choice

_HEADINGS = {
    "reproduced": "Holds here",
    "contradicted": "Does not hold here",
    "inconclusive": "Cannot be told with these seeds",
    "not run": "Not run",
}
_INTRODUCTION = """\
# Findings: the paper's learning claims at the proxy tier

Written by `python -m repro report --findings` from recorded runs; nothing here is typed in. The
policies are small and pre-trained here on generated problems, so a verdict is about the direction
of a contrast on them, not about the paper's models or percentages. *Holds* means that the 95 %
interval lies wholly on the claimed side after Holm's correction over the claims of one target;
*does not hold*, wholly on the other side. Either is a result."""


def main_findings(args: argparse.Namespace) -> int:
    """Carry out `repro report --findings FILE`; return the exit status."""
    expected = expected_folder(args.expected)
    out = Path(args.findings)
    if args.runs:
        text = findings_text(findings_checks(Path(args.runs), expected), out, args.figures)
    else:
        with tempfile.TemporaryDirectory() as folder:
            unpack_blessed(expected, Path(folder))
            text = findings_text(findings_checks(Path(folder), expected), out, args.figures)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, text)
    print(f"wrote {out}")  # noqa: T201
    return 0


def unpack_blessed(expected: Path, runs: Path) -> int:
    """Write the proxy tier's blessed records to `runs`; return how many there are."""
    paths = sorted((expected / Tier.PROXY.value).rglob("*.records.json"))
    return sum(unpack(path, runs) for path in paths)


def findings_checks(runs: Path, expected: Path) -> list[Checked]:
    """Return the checks of every target that claims something about learning here."""
    checks = []
    for target in TARGETS:
        source = runs_of(target)
        if needs_plan(target, Tier.PROXY) and Tier.PROXY in source.scales and target.claims:
            selection = Selection(target=target, source=source, tier=Tier.PROXY)
            checks.append(check_selection(selection, runs, expected))
    return checks


def findings_text(checks: Sequence[Checked], out: Path, figures: str | None = None) -> str:
    """Return the page as Markdown."""
    paper, controls = _verdicts(checks)
    lines = [_INTRODUCTION, "", *_counts(paper)]
    for status, heading in _HEADINGS.items():
        lines += _table(f"## {heading}", [row for row in paper if row[1].status == status])
    lines += _table("## Controls that the paper lacks", controls)
    lines += _accuracies(checks) + _rates() + _pictures(out, figures)
    lines += _runs_section(checks)
    return "\n".join(lines).rstrip() + "\n"


Row = tuple[Checked, Verdict]


def _verdicts(checks: Sequence[Checked]) -> tuple[list[Row], list[Row]]:
    """Return (checked, verdict) of the paper's claims and of the controls'."""
    paper: list[Row] = []
    controls: list[Row] = []
    for checked in checks:
        for verdict in checked.verdicts:
            if verdict.about not in ("claim", "mechanism"):
                continue
            control = verdict.about == "mechanism" or verdict.source.startswith("not in the paper")
            (controls if control else paper).append((checked, verdict))
    return paper, controls


def _counts(rows: Sequence[Row]) -> list[str]:
    counted = dict.fromkeys(_HEADINGS, 0)
    for _, verdict in rows:
        counted[verdict.status] += 1
    return [
        f"Of {len(rows)} statements of the paper that can be put to these policies, "
        f"{counted['reproduced']} hold, {counted['contradicted']} do not, "
        f"{counted['inconclusive']} cannot be told, {counted['not run']} were not run.",
        "",
    ]


def _table(heading: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [heading, "", "| statement | source | effect | 95 % interval | pairs | verdict | "]
    lines[-1] += "pairs that would decide |"
    lines.append("|---|---|---|---|---|---|---|")
    for checked, verdict in rows:
        source = f"{verdict.source} (`{checked.selection.target.name}`)"
        cells = [verdict.statement, source, *_numbers(verdict), str(verdict.n or "")]
        cells += [verdict.status, _needed(verdict)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _numbers(verdict: Verdict) -> tuple[str, str]:
    if verdict.effect is None:
        told = any(word in verdict.sentence for word in ("refused", "failed"))
        return "", verdict.sentence if told else "no record"
    effect = f"{verdict.effect:+.3g} {verdict.unit}"
    if verdict.low is None or verdict.high is None:
        return effect, ""
    return effect, f"{verdict.low:+.3g} to {verdict.high:+.3g}"


def _needed(verdict: Verdict) -> str:
    if verdict.status != "inconclusive":
        return ""
    if verdict.needed is None:
        return "more than 1000" if verdict.p is not None else "5 or more"
    return str(verdict.needed)


def _accuracies(checks: Sequence[Checked]) -> list[str]:
    """Return one table a target that has runs of its own: mean and interval of each arm."""
    lines: list[str] = []
    for checked in checks:
        target = checked.selection.target
        if target.headline is None or target.records_of or not checked.evidence.count:
            continue
        names = [target.headline]
        names += [
            name
            for name in ("accuracy", "heldout_area", "accuracy_hard", "accuracy_human")
            if name not in names
        ]
        columns = {name: checked.evidence.values(name) for name in names}
        columns = {name: found for name, found in columns.items() if found}
        titles = [target.metric(name).title for name in columns]
        lines += [f"## {target.title}", "", f"| arm | {' | '.join(titles)} |"]
        lines.append("|---" * (len(titles) + 1) + "|")
        for arm in target.arms:
            cells = [
                cell_text(list(found.get(arm.name, {}).values())) for found in columns.values()
            ]
            lines.append(f"| {arm.label} | {' | '.join(cells)} |")
        lines += ["", "Mean ± half of the 95 % t interval over seeds.", ""]
    return lines


def _rates() -> list[str]:
    choice: dict[str, Any] | None = read_choice()
    lines = ["## Learning rates", ""]
    if choice is None:
        return [*lines, "No sweep has been made: every arm has the middle of the grid.", ""]
    lines += [f"Chosen on tuning seeds ({choice['rule']}):", ""]
    lines += ["| what is trained | chosen | held-out accuracy by rate |", "|---|---|---|"]
    for key, rate in choice["chosen"].items():
        means = ", ".join(f"{name}: {mean:.1f}" for name, mean in choice["means"][key].items())
        lines.append(f"| {key} | {rate:.3g} | {means} |")
    return [*lines, ""]


def _pictures(out: Path, figures: str | None) -> list[str]:
    folder = Path(figures) if figures else out.parent / "figures"
    pictures = sorted(folder.glob("proxy_*.png")) if folder.is_dir() else []
    if not pictures:
        return []
    lines = ["## Figures", "", "Drawn from the same records.", ""]
    for picture in pictures:
        link = os.path.relpath(picture, out.parent).replace(os.sep, "/")
        lines += [f"![{picture.stem.replace('_', ' ')}]({link})", ""]
    return lines


def _runs_section(checks: Sequence[Checked]) -> list[str]:
    records: dict[tuple[str, str, int], Record] = {}
    lines = [
        "## The runs",
        "",
        "| target | plan | runs | failed | refused |",
        "|---|---|---|---|---|",
    ]
    for checked in checks:
        evidence, name = checked.evidence, checked.selection.target.name
        found = [record for by_seed in evidence.records.values() for record in by_seed.values()]
        records |= {(record.target, record.arm, record.seed): record for record in found}
        plan = plan_digest(name, Tier.PROXY)[:12]
        lines.append(
            f"| {name} | `{plan}` | {evidence.count} | {sum(evidence.failed_arms.values())} | "
            f"{len(evidence.refused)} |"
        )
    commits = ", ".join(sorted({f"`{record.commit[:12]}`" for record in records.values()}))
    lines += [
        "",
        "A plan is the digest of claims, metrics, statistics, seeds, arms and scale, made before "
        "the runs; each record carries it. Targets share runs, so the column does not add up.",
        "",
        f"{len(records)} different runs, source commit {commits or 'none'}.",
        "",
    ]
    return lines
