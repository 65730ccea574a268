"""The page of findings: the paper's learning claims at the proxy tier, each with its verdict.

Drawn from blessed records (or a folder of records) and from nothing else: statement, effect with
its 95 % interval, verdict, seeds, and how many would decide; devices stand side by side. Claims of
the paper come first, by verdict; then whether training works at all, and the controls, which answer
questions that the paper leaves open; then what limits it all (`learning_runs`). A statement that
compares arms at different learning rates is marked; one without records is only named.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from repro.evidence import printed
from repro.evidence.origins import commits_text
from repro.evidence.record import replace_text
from repro.evidence.store import Blessed, Source, blessed_sources
from repro.evidence.verdict import Verdict
from repro.judge.check import Checked, check_selection, learning_rates
from repro.report.learning_runs import ends, limits, rates, runs_of_checks, what_was_run
from repro.report.numbers import device_title
from repro.report.pictures import picture_lines
from repro.report.tables import Line, by_device, device_of, side_by_side, table
from repro.report.verdicts import EXCLUDED, beside, counted, no_difference_within, word
from repro.run.analysis_plan import needs_plan, plan_digest
from repro.run.places import expected_folder
from repro.run.select import Selection
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier
from repro.targets import TARGETS, runs_of
from repro.targets.chosen_rates import read_choice
from repro.targets.proxy import PROXY_SWEEP
from repro.targets.table1 import TABLE1

_TITLE = "# Findings: the paper's learning claims at the proxy tier"
_DIFFER = "devices differ"
_HEADINGS = ("reproduced", "contradicted", "inconclusive", _DIFFER)
_INTRODUCTION = """\
The paper says that the noise of 4-bit weights helps reinforcement learning: rewards grow faster,
and QeRL (NVFP4 weights, LoRA, added noise) ends above 16-bit LoRA. Here small policies, pre-trained
in this repository on generated problems, are put to the same comparisons. A statement is
*reproduced* when the 95 % interval of its effect lies wholly on the claimed side, after Holm's
correction over the statements of one target; *contradicted* when it lies wholly on the other side;
*inconclusive* otherwise. Each is a result about the direction of a contrast on these policies.
Written from blessed records by `python -m repro report --findings docs/findings.md`; how the runs
are made, and which protocol they follow: [proxy_tier.md](proxy_tier.md)."""
_READING = """\
Effects are differences paired by seed, the claimed direction positive; *pairs that would decide* is
for 80 % power at the effect measured. An order of arms is tested by ranks within each seed (Page's
test), so its slope's interval may exclude zero while the order is still inconclusive. *Excluded at
the paper's size*: the interval ends below the difference that the paper prints for a model of that
size; here all trained arms share one ceiling, which makes differences smaller. † : the arms had
different learning rates, too (below)."""
# The tables of accuracies, whose inconclusive statements the summary names with their effects.
_TABLES = ("table1", "table2")
# From so many statements of one target without runs on, they are counted rather than named.
_NAMED = 3


def main_findings(args: argparse.Namespace) -> int:
    """Carry out `repro report --findings FILE`; return the exit status."""
    expected = expected_folder(args.expected)
    out, runs = Path(args.findings), args.runs
    checks = findings_checks(Path(runs), expected) if runs else blessed_findings(expected)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, findings_text(checks, expected, out, args.figures))
    print(f"wrote {out}")  # noqa: T201
    return 0


def learning_selections() -> list[Selection]:
    """Return every target that claims something about learning at the proxy tier."""
    return [
        Selection(target=target, source=runs_of(target), tier=Tier.PROXY)
        for target in TARGETS
        if needs_plan(target, Tier.PROXY) and Tier.PROXY in runs_of(target).scales and target.claims
    ]


def findings_checks(runs: Path | Source, expected: Path) -> list[Checked]:
    """Return the checks behind the page, on a folder of records or a source of them."""
    return [check_selection(selection, runs, expected) for selection in learning_selections()]


def blessed_findings(expected: Path) -> list[Checked]:
    """Return the checks behind the page, on the blessed records of each device."""
    nothing = Blessed(expected, Tier.PROXY.value, None)
    sources = blessed_sources(expected, Tier.PROXY) or [nothing]
    return [checked for source in sources for checked in findings_checks(source, expected)]


def findings_text(
    checks: Sequence[Checked], expected: Path, out: Path, figures: str | None = None
) -> str:
    """Return the page as Markdown.

    Parameters
    ----------
    out, figures
        Where the page will lie, and the folder of its pictures; `figures/` beside it by default.
    """
    rows = _rows(checks, expected)
    devices = by_device(checks)
    runs = {device: runs_of_checks(items) for device, items in devices.items()}
    paper = [row for row in rows if row.kind == "paper"]
    training = [row for row in rows if row.kind == "training" and row.status != "not run"]
    controls = [row for row in rows if row.kind == "control" and row.status != "not run"]
    lines = [_TITLE, "", *_answer(paper, devices), "", _INTRODUCTION, ""]
    lines += _per_device(devices, lambda device: what_was_run(runs[device]))
    lines += ["## In short", ""]
    lines += _per_device(devices, lambda device: _in_short(paper, training, device, expected))
    lines += [_READING, ""]
    for status in _HEADINGS:
        same = [row for row in paper if row.status == status]
        lines += _table(status.capitalize(), same, devices, verdicts=status == _DIFFER)
    lines += _table("Whether training works at all", training, devices, verdicts=True)
    lines += _table("Controls that the paper lacks", controls, devices, verdicts=True)
    lines += _per_device(devices, lambda device: limits(runs[device]))
    lines += _per_device(devices, lambda device: ends(runs[device]))
    lines += picture_lines(Path(figures) if figures else out.parent / "figures", out.parent)
    lines += rates(read_choice(PROXY_SWEEP)) + _not_run(rows) + _plans(checks)
    return "\n".join(lines).rstrip() + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A statement on the page, with its verdict on each device.

    Attributes
    ----------
    kind
        `paper`, `training` (whether it works at all), or `control`.
    other_rates
        Whether the arms had different learning rates.
    untrained
        Whether it is about arms that do not train.
    sizes
        The paper's own difference, by model.
    """

    target: Target
    claim: Claim
    kind: str
    other_rates: bool
    untrained: bool
    sizes: Mapping[str, float]
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """The status that all devices with records agree on, or that they differ."""
        statuses = {item.status for item in self.verdicts.values()} - {"not run"}
        return _DIFFER if len(statuses) > 1 else next(iter(statuses), "not run")

    @property
    def place(self) -> str:
        """Where the paper states it, without what stands there in brackets."""
        return self.claim.source.split(" (")[0]


def _rows(checks: Sequence[Checked], expected: Path) -> list[Row]:
    """Return the statements; of targets that ask the same of the same runs, the first's."""
    rows: dict[tuple[object, ...], Row] = {}
    for checked in checks:
        claims = {claim.name: claim for claim in checked.selection.target.claims}
        for verdict in checked.verdicts:
            if verdict.about in ("claim", "mechanism"):
                claim, source = claims[verdict.name], checked.selection.source
                homes = [(home.name, arm) for home, arm in map(source.home, claim.arms)]
                key = (claim.kind, claim.metric, claim.paired_by, *homes)
                row = rows.setdefault(key, _row(checked, claim, expected))
                if row.target.name == checked.selection.target.name:
                    row.verdicts[device_of(checked)] = verdict
    return list(rows.values())


def _row(checked: Checked, claim: Claim, expected: Path) -> Row:
    target, source = checked.selection.target, checked.selection.source
    return Row(
        target=target,
        claim=claim,
        kind=_kind(claim),
        other_rates=len(set(learning_rates(checked.selection, claim).values())) > 1,
        untrained=all(source.arm(name).training == "none" for name in claim.arms),
        sizes=papers_differences(target.name, claim, expected),
    )


def _kind(claim: Claim) -> str:
    if claim.kind in ("gain", "no_gain"):
        return "training"
    return "control" if claim.mechanism or claim.source.startswith("not in the paper") else "paper"


def papers_differences(target: str, claim: Claim, expected: Path) -> dict[str, float]:
    """Return the paper's own differences of accuracy for the arms of a claim, by model."""
    if claim.metric != "accuracy" or claim.kind not in ("difference", "non_inferior"):
        return {}
    by_place = printed.differences(expected, target, [claim.arms])
    return {place.words: round(values[claim.arms], 6) for place, values in by_place.items()}


def _per_device(devices: Collection[str], written: Callable[[str], list[str]]) -> list[str]:
    """Return what is written of each device, with its name where there are several."""
    lines = []
    for device in devices:
        part = written(device)
        if part and len(devices) > 1:
            title = device_title(device)
            headed = part[0].startswith("## ")
            part = [f"{part[0]}: {title}", *part[1:]] if headed else [f"**{title}**", "", *part]
        lines += part
    return lines


def _answer(paper: Sequence[Row], devices: Collection[str]) -> list[str]:
    lines = []
    for device in devices or [""]:
        verdicts = [row.verdicts[device] for row in paper if device in row.verdicts]
        where = f" on one {device_title(device)}" if devices else ""
        lines.append(
            f"**Of {len(paper)} different statements of the paper that can be put to small "
            f"policies{where}: {counted(verdicts)}.**"
        )
    return lines


def _in_short(
    paper: Sequence[Row], training: Sequence[Row], device: str, expected: Path
) -> list[str]:
    known = [(row, row.verdicts[device]) for row in paper if device in row.verdicts]
    lines = [
        f"- {word(verdict).capitalize()}: {verdict.statement} ({row.place})."
        for status in ("reproduced", "contradicted")
        for row, verdict in known
        if verdict.status == status
    ]
    undecided = [row for row, verdict in known if verdict.status == "inconclusive"]
    for row in undecided:
        if row.target.name in _TABLES and not row.untrained:
            effect = ", ".join([*_numbers(row.verdicts[device]), *_excluded(row, device)])
            lines.append(f"- Inconclusive: {row.claim.statement}, {effect} ({row.place}).")
    lines += _widths(undecided, device, expected)
    marked = sum(row.other_rates for row in undecided)
    if marked:
        lines.append(
            f"- {marked} of the inconclusive ones compare arms whose best learning rates differ "
            "(†): a difference there would not be the format's alone."
        )
    verdicts = [row.verdicts[device] for row in training if device in row.verdicts]
    if verdicts:
        lines.append(
            f"- Training itself: {counted(verdicts)} (every trained arm gains; trained on random "
            "rewards or on the format alone it must not)."
        )
    return [*lines, ""]


def _widths(undecided: Sequence[Row], device: str, expected: Path) -> list[str]:
    """Return what the intervals of inconclusive differences of accuracy still allow."""
    known = [(r.claim.metric, r.verdicts[device]) for r in undecided]
    known = [(m, v) for m, v in known if v.unit == "points" and v.low is not None]
    finals = [verdict for metric, verdict in known if metric == "accuracy"]
    halves = [((v.high or 0) - (v.low or 0)) / 2 for metric, v in known if metric != "accuracy"]
    lines = []
    if finals:
        gain = _papers_gain(expected)
        lines.append(
            f"- Accuracy: of {len(finals)} inconclusive differences, "
            f"{len(no_difference_within(finals, gain))} show no difference within {gain:g} points, "
            "the paper's own gain of QeRL over 16-bit LoRA (Table 1, 7B). Gains may be smaller "
            "here, where all trained arms share one ceiling."
        )
    if halves:
        lines.append(
            f"- Speed of learning: of {len(halves)} inconclusive differences of the area under the "
            f"held-out accuracy, half of the interval is {min(halves):.1f} to {max(halves):.1f} "
            "points."
        )
    return lines


def _papers_gain(expected: Path) -> float:
    """Return what QeRL gains over 16-bit LoRA in the paper's Table 1, at 7B, in points."""
    (claim,) = (claim for claim in TABLE1.claims if claim.name == "qerl_beats_lora")
    return papers_differences(TABLE1.name, claim, expected)["7B"]


def _excluded(row: Row, device: str) -> list[str]:
    """Return the sizes at which the paper's difference lies outside the interval, in words."""
    sizes = [name for name, size in row.sizes.items() if beside(row.verdicts[device], size)]
    return [f"{EXCLUDED} ({', '.join(sizes)})"] if sizes else []


def _table(
    heading: str, rows: Sequence[Row], devices: Collection[str], *, verdicts: bool = False
) -> list[str]:
    parts = {
        device: [_line(row, device, verdicts) for row in rows if device in row.verdicts]
        for device in devices
    }
    own = ["effect", "95 % interval", "beside it", "pairs"]
    own += ["verdict"] * verdicts + ["pairs that would decide"]
    lines = side_by_side(["statement", "source", "the paper's difference"], own, parts)
    return [f"## {heading}", "", *lines] if lines else []


def _line(row: Row, device: str, verdicts: bool) -> Line:
    verdict = row.verdicts[device]
    place = "" if row.kind == "control" else f"{verdict.source}, "
    sizes = ", ".join(f"{size:+g} ({name})" for name, size in row.sizes.items())
    numbers = [*_numbers(verdict), *(_excluded(row, device) or [""]), str(verdict.n or "")]
    return Line(
        common=(verdict.statement + " †" * row.other_rates, f"{place}`{row.target.name}`", sizes),
        own=(*numbers, *([word(verdict)] * verdicts), _needed(row, verdict)),
    )


def _numbers(verdict: Verdict) -> tuple[str, str]:
    if verdict.effect is None:
        return "", verdict.sentence
    effect = f"{verdict.effect:+.3g} {verdict.unit}"
    if verdict.low is None or verdict.high is None:
        return effect, ""
    return effect, f"{verdict.low:+.3g} to {verdict.high:+.3g}"


def _needed(row: Row, verdict: Verdict) -> str:
    if verdict.status != "inconclusive":
        return ""
    if verdict.needed is not None:
        return str(verdict.needed)
    if verdict.p is None:
        return "5 or more"
    return "tested by ranks" if row.claim.kind in ("trend", "order") else "more than 1000"


def _not_run(rows: Sequence[Row]) -> list[str]:
    """Return the list of statements without records, a line per target, with refusals."""
    absent: dict[str, list[Row]] = {}
    for row in rows:
        if row.status == "not run":
            absent.setdefault(row.target.name, []).append(row)
    lines = ["## Not run", "", "Stated, and without records yet; `python -m repro run TARGET "]
    lines[-1] += "--tier proxy` makes them."
    lines.append("")
    for name, of_target in absent.items():
        statements = "; ".join(row.claim.statement for row in of_target)
        if len(of_target) > _NAMED:
            statements = f"{len(of_target)} statements"
        reasons = {item.sentence for row in of_target for item in row.verdicts.values()}
        refused = sorted(reason for reason in reasons if "refused" in reason)
        lines.append(f"- `{name}` ({of_target[0].target.title}): "
                     f"{'; '.join([statements, *refused])}.")  # fmt: skip
    return [*lines, ""] if absent else []


def _plans(checks: Sequence[Checked]) -> list[str]:
    rows = []
    for checked in checks:
        evidence, name = checked.evidence, checked.selection.target.name
        if evidence.count or evidence.refused or evidence.failed:
            records = (r for by_seed in evidence.records.values() for r in by_seed.values())
            rows.append([
                name,
                f"`{plan_digest(name, Tier.PROXY)[:12]}`",
                device_title(device_of(checked)),
                f"{evidence.count}",
                f"{sum(evidence.failed_arms.values())}",
                f"{len(evidence.refused)}",
                commits_text(records),
            ])  # fmt: skip
    heads = ["target", "plan", "device", "runs", "failed", "refused", "source commit"]
    return [
        "## Analysis plans",
        "",
        "A plan is the digest of claims, metrics, statistics, seeds, arms and scale, made before "
        "the runs; each record carries it. Targets share runs, so the numbers do not add up. Arms "
        "are compared within a seed.",
        "",
        *table(heads, rows),
    ]
