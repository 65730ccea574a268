"""Every statement at the proxy tier in tables: the folded part of the page of learning.

Statement, effect with its interval, the paper's size here, verdict, pairs, and how many would
decide; devices stand side by side. A statement that compares arms at different learning rates is
marked; one without records is only named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from repro.evidence import printed
from repro.evidence.claim_verdicts import MINIMUM_PAIRS
from repro.evidence.comparison import RANKED
from repro.evidence.origins import commits_text, seeds_text
from repro.evidence.statistics import MOST_PAIRS
from repro.evidence.verdict import Verdict
from repro.judge.check import Checked, learning_rates
from repro.report.numbers import device_title
from repro.report.tables import Line, device_of, side_by_side, table
from repro.report.verdicts import CLAIM_WORDS, labelled
from repro.run.analysis_plan import PLAN_INPUT, plan_digest
from repro.spec.target import Claim, Target
from repro.spec.tier import Tier

DIFFER = "devices differ"
# Sections in which the rows of one verdict stand together.
HEADINGS = tuple(status for status in CLAIM_WORDS if status != "not run")
READING = """\
Effects are differences paired by seed, the claimed direction positive, with intervals that hold
for all statements of a target together (95 %); *pairs that would decide* is for 80 % power at the
effect measured. An order of arms is tested by ranks within each seed (Page's test), so its slope's
interval may exclude zero while the order is still inconclusive. Where an early look decided, its
numbers stand first, those of all seeds below. *q* is the false-discovery rate
over all statements of this tier on the device (Benjamini and Hochberg). † : the arms had different
learning rates, too (below)."""
# From so many statements of one target without runs on, they are counted rather than named.
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A statement on the page, with its verdict on each device.

    Attributes
    ----------
    kind
        `paper`, `training` (whether it works at all), or `control`.
    other_rates
        Whether the arms had different learning rates.
    sizes
        The paper's own difference of accuracies, by model.
    """

    target: Target
    claim: Claim
    kind: str
    other_rates: bool
    sizes: Mapping[str, float]
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """The status that all devices with records agree on, or that they differ."""
        statuses = {item.status for item in self.verdicts.values()} - {"not run"}
        return DIFFER if len(statuses) > 1 else next(iter(statuses), "not run")


def statement_rows(checks: Sequence[Checked], expected: Path) -> list[Row]:
    """Return the statements; of targets that ask the same of the same runs, the first's."""
    rows: dict[tuple[object, ...], Row] = {}
    for checked in checks:
        for claim, verdict in checked.statements():
            homes = [
                (home.name, arm) for home, arm in map(checked.selection.source.home, claim.arms)
            ]
            key = (claim.kind, claim.metric, claim.paired_by, *homes)
            row = rows.setdefault(key, _row(checked, claim, expected))
            if row.target.name == checked.selection.target.name:
                row.verdicts[device_of(checked)] = verdict
    return list(rows.values())


def _row(checked: Checked, claim: Claim, expected: Path) -> Row:
    target = checked.selection.target
    return Row(
        target=target,
        claim=claim,
        kind=_kind(claim),
        other_rates=len(set(learning_rates(checked.selection, claim).values())) > 1,
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


def statement_table(
    heading: str, rows: Sequence[Row], devices: Collection[str], *, verdicts: bool = False
) -> list[str]:
    """Return a table of statements under its heading; nothing for none of them."""
    parts = {
        device: [_line(row, device, verdicts) for row in rows if device in row.verdicts]
        for device in devices
    }
    own = ["effect", "interval", "the paper's size here", "q", "pairs"]
    own += ["verdict"] * verdicts + ["pairs that would decide"]
    lines = side_by_side(["statement", "source", "the paper's difference"], own, parts)
    return [f"### {heading}", "", *lines] if lines else []


def _line(row: Row, device: str, verdicts: bool) -> Line:
    verdict = row.verdicts[device]
    place = "" if row.kind == "control" else f"{verdict.source}, "
    sizes = ", ".join(f"{size:+g} ({name})" for name, size in row.sizes.items())
    paper = "" if verdict.paper is None else f"{_signed(verdict, verdict.paper)} {verdict.unit}"
    q = "" if verdict.q is None else f"{verdict.q:.2g}"
    effect, interval = _numbers(verdict)
    pairs = str(verdict.n or "")
    if (every := verdict.all_seeds) is not None:
        effect += f"<br>all {every.n} seeds: {_signed(verdict, every.effect)} {verdict.unit}"
        if every.low is not None and every.high is not None:
            interval += f"<br>{_signed(verdict, every.low)} to {_signed(verdict, every.high)}"
        pairs += f"<br>{every.n}"
    numbers = [effect, interval, paper, q, pairs]
    return Line(
        common=(verdict.statement + " †" * row.other_rates, f"{place}`{row.target.name}`", sizes),
        own=(*numbers, *([labelled(verdict)] * verdicts), pairs_needed(row.claim, verdict)),
    )


def _numbers(verdict: Verdict) -> tuple[str, str]:
    if verdict.effect is None:
        return "", verdict.sentence
    effect = f"{_signed(verdict, verdict.effect)} {verdict.unit}"
    if verdict.status == "not testable":
        return effect, verdict.sentence.partition(". Point estimate")[0]
    if verdict.low is None or verdict.high is None:
        return effect, ""
    return effect, f"{_signed(verdict, verdict.low)} to {_signed(verdict, verdict.high)}"


def _signed(verdict: Verdict, value: float) -> str:
    """Return a difference with its sign; a quotient has none."""
    return f"{value:.3g}" if verdict.unit == "x" else f"{value:+.3g}"


def pairs_needed(claim: Claim, verdict: Verdict) -> str:
    """Return how many pairs would decide a statement that is inconclusive; of others, nothing."""
    if verdict.status != "inconclusive":
        return ""
    if verdict.needed is not None:
        return str(verdict.needed)
    if verdict.p is None:
        return f"{MINIMUM_PAIRS[claim.paired_by]} or more"
    if are_pairs_counted(claim):
        return f"more than {MOST_PAIRS}"
    return "tested by ranks" if claim.kind in RANKED else "tested exactly"


def are_pairs_counted(claim: Claim) -> bool:
    """Whether it can be said how many pairs would decide a statement."""
    return claim.test != "sign_flip" and claim.kind not in RANKED


def not_run(rows: Sequence[Row]) -> list[str]:
    """Return the list of statements without records, a line per target, with refusals."""
    absent: dict[str, list[Row]] = {}
    for row in rows:
        if row.status == "not run":
            absent.setdefault(row.target.name, []).append(row)
    lines = ["### Not run", "", "Stated, and without records yet; `python -m repro run TARGET "]
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


def plans(checks: Sequence[Checked]) -> list[str]:
    """Return the table of the plans that the records carry, with seeds and commits."""
    rows = []
    for checked in checks:
        evidence, name = checked.evidence, checked.selection.target.name
        if evidence.count or evidence.refused or evidence.failed:
            records = evidence.every_record()
            present = plan_digest(name, Tier.PROXY)[:12]
            carried = {record.inputs[f"{PLAN_INPUT}{name}"][:12] for record in records}
            rows.append([
                name,
                ", ".join(f"`{digest}`" for digest in sorted(carried)),
                "the same" if carried == {present} else f"`{present}`",
                seeds_text(evidence.planned).partition(" ")[2],
                device_title(device_of(checked)),
                f"{evidence.count}",
                f"{sum(evidence.failed_arms.values())}",
                f"{len(evidence.refused)}",
                commits_text(records),
            ])  # fmt: skip
    heads = ["target", "plan of the runs", "plan today", "planned seeds", "device", "runs"]
    heads += ["failed", "refused", "source commit"]
    return [
        "### Analysis plans",
        "",
        "A plan is the digest of claims, metrics, statistics, seeds, arms and scale, made before "
        "the runs; each record carries it, and a verdict counts the seeds that it names. Where the "
        "plan is another today, the statements that it changes are judged post hoc. Targets share "
        "runs, so the numbers do not add up. Arms are compared within a seed.",
        "",
        *table(heads, rows),
    ]
