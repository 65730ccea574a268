"""The page of findings: which of the paper's learning claims hold at the proxy tier, which do not.

Drawn from blessed records (or a folder of records) and from nothing else: statement, effect with
its 95 % interval, verdict, seeds, and how many would decide. Claims of the paper come first, by
verdict; then whether training works at all, and the controls, which answer questions that the
paper leaves open; then what limits it all (`learning_runs`). A statement that compares arms
at different learning rates is marked; one without records is only named.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repro.analysis_plan import needs_plan, plan_digest
from repro.blessed import unpack
from repro.check import Checked, Evidence, check_selection, learning_rates
from repro.evidence.origins import commits_text
from repro.evidence.record import replace_text
from repro.evidence.verdict import Verdict
from repro.places import expected_folder
from repro.report.learning_runs import ends, limits, rates, runs_of_checks, what_was_run
from repro.report.pictures import picture_lines
from repro.selection import Selection
from repro.spec.target import Claim
from repro.spec.tier import Tier
from repro.targets import TARGETS, runs_of
from repro.targets.chosen_rates import read_choice
from repro.targets.proxy import PROXY_SWEEP

_HEADINGS = {
    "reproduced": "Holds here",
    "contradicted": "Does not hold here",
    "inconclusive": "Cannot be told with these seeds",
}
_INTRODUCTION = """\
# Findings: the paper's learning claims at the proxy tier

Written by `python -m repro report --findings docs/findings.md` from blessed records; nothing here
is typed in but what the section on the protocol says of the figures that it replaced. The paper
says that the noise of 4-bit weights helps reinforcement learning: rewards grow faster, and QeRL
(NVFP4 weights, LoRA, added noise) ends above 16-bit LoRA. Here small policies, pre-trained in this
repository on generated problems, are put to the same comparisons. A statement *holds* when the 95 %
interval of its effect lies wholly on the claimed side, after Holm's correction over the statements
of one target; it *does not hold* when wholly on the other side.
Either is a result, about the direction of a contrast on these policies."""
_PROTOCOL = """\
## The protocol, and the one before it

Runs have 120 steps, and the area under the held-out accuracy is taken over 300 000 sampled tokens.
A first protocol had 60 steps, 150 000 tokens and test seeds 0 to 4 (Table 1 and the noise
factorial, 75 runs at commit `2d2f26cdf3a9`). Its figures are superseded, and no verdict here counts
them. What they showed: a run's final accuracy hung on when it took off. Seeds of 16-bit LoRA ended
between 69.8 and 97.6 %, because some rose between steps 40 and 60 and some had not yet risen, while
those that had risen stood together. QeRL minus 16-bit LoRA was -2.9 points (-26 to +21), AQN on
NVFP4 -4.0 (-18 to +10): nothing could be told. Its sweep chose between rates whose means differed
by less than the evaluation's own error, so MXFP4 ran at 1e-3 and the other formats at 3.3e-4, and
MXFP4's higher end (97.0 against 90.8 % for NVFP4) compared rates, not formats.

The change is for precision: twice the steps and tokens for every arm alike, rates that the sweep's
evaluation cannot tell apart counted as ties (below), and test seeds that no run had had. It was
fixed after the figures above were known and before any run of 120 steps. Claims, metrics, arms and
statistics are those of before. With all arms near their ceiling the final accuracy no longer shows
who learns faster; the area under the held-out accuracy does.
"""
# Table 1: 90.8 against 88.1 %, QeRL and 16-bit LoRA at 7B.
_PAPERS_GAIN = 2.7
# The tables of accuracies, whose undecided statements the summary names with their effects.
_TABLES = ("table1", "table2")
# So many statements of one target are named where none of them was run.
_NAMED = 3
_READING = """\
Effects are differences paired by seed, the claimed direction positive; *pairs that would decide* is
for 80 % power at the effect measured. An order of arms is tested by ranks within each seed (Page's
test), so its slope's interval may exclude zero and the order still not be shown. † : the arms had
different learning rates, too (below)."""


def main_findings(args: argparse.Namespace) -> int:
    """Carry out `repro report --findings FILE`; return the exit status."""
    expected = expected_folder(args.expected)
    out = Path(args.findings)
    if args.runs:
        text = findings_text(findings_checks(Path(args.runs), expected), out, args.figures)
    else:
        text = findings_text(blessed_findings(expected), out, args.figures)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, text)
    print(f"wrote {out}")  # noqa: T201
    return 0


def findings_short(checks: Sequence[Checked]) -> list[str]:
    """Return what the page says in short, as a list of Markdown's."""
    rows = _rows(checks)
    return _in_short(_of_paper(rows), _of_training(rows))


def blessed_findings(expected: Path) -> list[Checked]:
    """Return the checks behind the page, on the blessed records."""
    with tempfile.TemporaryDirectory() as folder:
        unpack_blessed(expected, Path(folder))
        return findings_checks(Path(folder), expected)


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
    rows = _rows(checks)
    paper, training = _of_paper(rows), _of_training(rows)
    controls = [row for row in rows if row.kind == "control" and row.verdict.status != "not run"]
    runs = runs_of_checks(checks)
    lines = [_INTRODUCTION, "", *what_was_run(runs), "## In short", ""]
    lines += [*_in_short(paper, training), "", _READING, "", _PROTOCOL]
    for status, heading in _HEADINGS.items():
        lines += _table(f"## {heading}", [row for row in paper if row.verdict.status == status])
    lines += _table("## Whether training works at all", training, verdicts=True)
    lines += _table("## Controls that the paper lacks", controls, verdicts=True)
    lines += limits(runs) + ends(runs) + _pictures(out, figures) + rates(read_choice(PROXY_SWEEP))
    lines += _not_run(rows) + _plans(checks)
    return "\n".join(lines).rstrip() + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A verdict on the page: about the paper, about training at all, or a control's."""

    checked: Checked
    verdict: Verdict
    kind: str
    metric: str
    other_rates: bool
    ranked: bool
    untrained: bool


def _rows(checks: Sequence[Checked]) -> list[Row]:
    """Return the verdicts on claims; of targets that ask the same of the same runs, the first."""
    found: dict[tuple[object, ...], Row] = {}
    for checked in checks:
        claims = {claim.name: claim for claim in checked.selection.target.claims}
        for verdict in checked.verdicts:
            if verdict.about not in ("claim", "mechanism"):
                continue
            claim, source = claims[verdict.name], checked.selection.source
            homes = [(home.name, arm) for home, arm in map(source.home, claim.arms)]
            row = Row(
                checked=checked,
                verdict=verdict,
                kind=_kind(claim),
                metric=claim.metric,
                other_rates=len(set(learning_rates(checked.selection, claim).values())) > 1,
                ranked=claim.kind in ("trend", "order"),
                untrained=all(source.arm(name).training == "none" for name in claim.arms),
            )
            found.setdefault((claim.kind, claim.metric, claim.paired_by, *homes), row)
    return list(found.values())


def _kind(claim: Claim) -> str:
    if claim.kind in ("gain", "no_gain"):
        return "training"
    return "control" if claim.mechanism or claim.source.startswith("not in the paper") else "paper"


def _of_paper(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "paper"]


def _of_training(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "training" and row.verdict.status != "not run"]


def _in_short(paper: Sequence[Row], training: Sequence[Row]) -> list[str]:
    by_status = {
        status: [row for row in paper if row.verdict.status == status]
        for status in (*_HEADINGS, "not run")
    }
    counts = {status: len(rows) for status, rows in by_status.items()}
    lines = [
        f"- Of {len(paper)} different statements of the paper that can be put to these policies, "
        f"{counts['reproduced']} hold{'s' if counts['reproduced'] == 1 else ''}, "
        f"{counts['contradicted']} do{'es' if counts['contradicted'] == 1 else ''} not, "
        f"{counts['inconclusive']} cannot be told, {counts['not run']} were not run.",
    ]
    for status, words in (("reproduced", "Holds"), ("contradicted", "Does not hold")):
        lines += [
            f"- {words}: {row.verdict.statement} ({_place(row)})." for row in by_status[status]
        ]
    lines += _finals(by_status["inconclusive"]) + _widths(by_status["inconclusive"])
    marked = sum(row.other_rates for row in by_status["inconclusive"])
    if marked:
        lines.append(
            f"- {marked} of those that cannot be told compare arms whose best learning rates "
            "differ (†): a difference there would not be the format's alone."
        )
    gains = [row for row in training if row.verdict.status == "reproduced"]
    if training:
        lines.append(
            f"- Training itself: {len(gains)} of {len(training)} statements hold (every trained "
            "arm gains; trained on random rewards or on the format alone it must not)."
        )
    return lines


def _place(row: Row) -> str:
    """Return where the paper states it, without what stands there in brackets."""
    return row.verdict.source.split(" (")[0]


def _finals(undecided: Sequence[Row]) -> list[str]:
    """Return what was measured of the tables' undecided statements about trained arms."""
    said = [
        f"{row.verdict.statement}, {', '.join(_numbers(row.verdict))} ({_place(row)})"
        for row in undecided
        if row.checked.selection.target.name in _TABLES and not row.untrained
    ]
    return [f"- Cannot be told: {item}." for item in said]


def _widths(undecided: Sequence[Row]) -> list[str]:
    """Return what the intervals of undecided differences of accuracy still allow."""
    reach, others = [], []
    for row in undecided:
        low, high = row.verdict.low, row.verdict.high
        if row.verdict.unit != "points" or low is None or high is None:
            continue
        if row.metric == "accuracy":
            reach.append(max(abs(low), abs(high)))
        else:
            others.append((high - low) / 2)
    lines = []
    if reach:
        lines.append(
            f"- Accuracy: of {len(reach)} differences that cannot be told, "
            f"{sum(far < _PAPERS_GAIN for far in reach)} have intervals within {_PAPERS_GAIN} "
            "points of zero, the paper's own gain of QeRL over 16-bit LoRA (Table 1, 7B). What "
            "there may be is smaller here, where all trained arms share one ceiling."
        )
    if others:
        lines.append(
            f"- Speed of learning: of {len(others)} areas under the held-out accuracy that cannot "
            f"be told apart, half of the interval is {min(others):.1f} to {max(others):.1f} points."
        )
    return lines


def _table(heading: str, rows: Sequence[Row], *, verdicts: bool = False) -> list[str]:
    if not rows:
        return []
    names = ["statement", "source", "effect", "95 % interval", "pairs"]
    names += ["verdict"] * verdicts + ["pairs that would decide"]
    lines = [heading, "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        verdict = row.verdict
        place = "" if row.kind == "control" else f"{verdict.source}, "
        source = f"{place}`{row.checked.selection.target.name}`"
        cells = [verdict.statement + " †" * row.other_rates, source, *_numbers(verdict)]
        cells += [str(verdict.n or ""), *([verdict.status] * verdicts), _needed(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _numbers(verdict: Verdict) -> tuple[str, str]:
    if verdict.effect is None:
        return "", verdict.sentence
    effect = f"{verdict.effect:+.3g} {verdict.unit}"
    if verdict.low is None or verdict.high is None:
        return effect, ""
    return effect, f"{verdict.low:+.3g} to {verdict.high:+.3g}"


def _needed(row: Row) -> str:
    verdict = row.verdict
    if verdict.status != "inconclusive":
        return ""
    if verdict.needed is not None:
        return str(verdict.needed)
    if verdict.p is None:
        return "5 or more"
    return "tested by ranks" if row.ranked else "more than 1000"


def _not_run(rows: Sequence[Row]) -> list[str]:
    """Return the list of statements without records, a line a target; refusals are said."""
    left: dict[str, list[Row]] = {}
    for row in rows:
        if row.verdict.status == "not run":
            left.setdefault(row.checked.selection.target.name, []).append(row)
    if not left:
        return []
    lines = ["## Not run", "", "Stated, and without records yet; `python -m repro run TARGET "]
    lines[-1] += "--tier proxy` makes them."
    lines.append("")
    for name, found in left.items():
        title = found[0].checked.selection.target.title
        said = "; ".join(row.verdict.statement for row in found)
        if len(found) > _NAMED:
            said = f"{len(found)} statements"
        refused = sorted({why for row in found if "refused" in (why := row.verdict.sentence)})
        lines.append(f"- `{name}` ({title}): {'; '.join([said, *refused])}.")
    return [*lines, ""]


def _pictures(out: Path, figures: str | None) -> list[str]:
    return picture_lines(Path(figures) if figures else out.parent / "figures", out.parent)


def _commits(evidence: Evidence) -> str:
    return commits_text(r for by_seed in evidence.records.values() for r in by_seed.values())


def _plans(checks: Sequence[Checked]) -> list[str]:
    lines = [
        "## Analysis plans",
        "",
        "A plan is the digest of claims, metrics, statistics, seeds, arms and scale, made before "
        "the runs; each record carries it. Targets share runs, so the numbers do not add up. Arms "
        "are compared within a seed.",
        "",
        "| target | plan | runs | failed | refused | source commit |",
        "|---|---|---|---|---|---|",
    ]
    for checked in checks:
        evidence, name = checked.evidence, checked.selection.target.name
        if not evidence.count and not evidence.refused and not evidence.failed:
            continue
        lines.append(
            f"| {name} | `{plan_digest(name, Tier.PROXY)[:12]}` | {evidence.count} | "
            f"{sum(evidence.failed_arms.values())} | {len(evidence.refused)} | "
            f"{_commits(evidence)} |"
        )
    return [*lines, ""]
