"""The page of learning: the paper's twelve claims at the proxy tier, readable in two minutes.

In this order, for that is how it is to be read: three sentences and a picture; what such policies
can and cannot show; then the twelve in one table, each with the statement that decides it
(`repro.report.twelve`); and the dose (`dose_response`, `mediation`), where there are records of it.
Everything else is folded below: every statement (`learning_statements`), every seed, learning
rates, pictures (`learning_runs`, `pictures`); in an appendix, the protocol.
Written from blessed records (or a folder of records) and the claims' declarations, nothing else;
devices stand side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from repro.evidence.sizes import MINIMUM_DRAWS
from repro.evidence.store import Blessed, Source, blessed_records, blessed_sources
from repro.evidence.verdict import Verdict
from repro.judge.check import Checked, check_selection
from repro.judge.study import with_study
from repro.report import dose_response, mediation
from repro.report.learning_runs import (
    ends,
    limits,
    policies,
    rate_of_the_ladder,
    rates,
    rates_of_skill,
    runs_of_checks,
    what_was_run,
)
from repro.report.learning_statements import (
    DIFFER,
    HEADINGS,
    READING,
    Row,
    are_pairs_counted,
    not_run,
    pairs_needed,
    plans,
    statement_rows,
    statement_table,
)
from repro.report.numbers import device_title
from repro.report.pictures import DOSE, FOREST, picture_lines
from repro.report.tables import Line, by_device, link_to, side_by_side
from repro.report.twelve import TWELVE, Decided, Share, decided, statements
from repro.report.verdicts import CLAIM_WORDS, counted, labelled
from repro.run.analysis_plan import needs_plan
from repro.run.places import absence_text, expected_folder
from repro.run.select import Selection
from repro.spec.claim import Claim
from repro.spec.tier import Tier
from repro.spec.whole_files import replace_text
from repro.targets import TARGETS, runs_of
from repro.targets.chosen_rates import choice_file, read_choice
from repro.targets.ladder.needle import NEEDLE_05, NEEDLE_4, NEEDLE_40, NEEDLE_SWEEP
from repro.targets.ladder.needle import SWEEP as NEEDLE_SWEPT
from repro.targets.ladder.skill import SKILL_SWEEP, SWEEP_SCALE
from repro.targets.pretraining import PRETRAIN_PROXY
from repro.targets.proxy import PROXY_SWEEP

_TITLE = "# Learning: the paper's twelve claims at the proxy tier"
_QUESTION = """\
The paper says that the noise of 4-bit weights helps reinforcement learning: rewards grow faster,
and QeRL (NVFP4 weights, LoRA, added noise) ends above 16-bit LoRA. Here the same comparisons are
made on small policies, pre-trained in this repository on generated problems. Most are decided on
`needle_4`, where a policy shows the working that earns the reward in 4 % of its completions (the
*prior*). Training is flat until a run comes across that habit, then it *takes off*. One token, the
*deciding token*, settles whether a completion shows its working."""
_TABLE_READING = """\
Effects are relative, so that they can be compared with the paper's: in percent of the *gain* by
training, of the *shortfall* (what the other arm's curve leaves below its ceiling), of the other
arm's *mean*, of the *runs* (those that collapse, or take off), or *in speed* (+100 %: half the
steps to the take-off). In brackets: the interval that holds for all statements of a target together
(95 %). Each verdict is that of the statement named, with Holm's correction over its target.
*Excluded at the paper's size*: not shown, and the interval ends below the paper's effect. *No
difference within x*: the interval lies within x to both sides. *Not testable here*: no effect could
have appeared, or what the claim speaks of was drawn too few times. *Post hoc*: the rule is younger
than the runs. Where a planned early look at part of the seeds decided, the verdict is that look's,
and the effect is that of all seeds."""
_FOREST_WORDS = "Measured effects with their intervals, the paper's as diamonds"
_DOSE_WORDS = "Steps to the take-off over BF16's by dose, the paper's as a diamond"
_PROTOCOL = """\
How the runs are made, and why an earlier protocol was superseded:
[proxy_tier.md](proxy_tier.md#the-protocol-and-the-one-before-it). Written from blessed records by
`python -m repro report --learning docs/learning.md`."""


def main_learning(args: argparse.Namespace) -> int:
    """Carry out `repro report --learning FILE`; return the exit status."""
    expected = expected_folder(args.expected)
    out, runs = Path(args.learning), args.runs
    if runs and not Path(runs).is_dir():
        raise ValueError(absence_text(Path(runs), Path(runs)))
    checks = learning_checks(Path(runs), expected) if runs else blessed_learning(expected)
    replace_text(out, learning_text(checks, expected, out, args.figures))
    print(f"wrote {out}")  # noqa: T201
    return 0


def learning_selections() -> list[Selection]:
    """Return every target that claims something about learning at the proxy tier."""
    return [
        Selection(target=target, source=runs_of(target), tier=Tier.PROXY)
        for target in TARGETS
        if needs_plan(target, Tier.PROXY) and Tier.PROXY in runs_of(target).scales and target.claims
    ]


def learning_checks(runs: Path | Source, expected: Path) -> list[Checked]:
    """Return the checks behind the page, on a folder of records or a source of them."""
    checks = [check_selection(selection, runs, expected) for selection in learning_selections()]
    return with_study(checks)


def blessed_learning(expected: Path) -> list[Checked]:
    """Return the checks behind the page, on the blessed records of each device."""
    nothing = Blessed(expected, Tier.PROXY.value, None)
    sources = blessed_sources(expected, Tier.PROXY) or [nothing]
    return [checked for source in sources for checked in learning_checks(source, expected)]


def learning_text(
    checks: Sequence[Checked], expected: Path, out: Path, figures: str | None = None
) -> str:
    """Return the page as Markdown.

    Parameters
    ----------
    out, figures
        Where the page will lie, and the folder of its pictures; `figures/` beside it by default.
    """
    folder = Path(figures) if figures else out.parent / "figures"
    devices = by_device(checks)
    twelve = {device: decided(items) for device, items in devices.items()} or {"": decided(checks)}
    rows = statement_rows(checks, expected)
    lines = [_TITLE, "", *_per_device(twelve, lambda device: _short(twelve[device]))]
    lines += [*_drawn(folder, out, FOREST, _FOREST_WORDS), _QUESTION, ""]
    lines += _limits(devices, twelve, rows)
    lines += ["## The twelve claims", "", _TABLE_READING, "", *_table(twelve)]
    lines += _dose(devices, folder, out)
    examined = blessed_records(expected, Tier.PROXY, PRETRAIN_PROXY.name)
    lines += folded("What the policies show and know before training", policies(examined))
    lines += _details(checks, rows, folder, out)
    lines += ["## Appendix: the protocol", "", _PROTOCOL, ""]
    runs = {device: runs_of_checks(items) for device, items in devices.items()}
    lines += _per_device(devices, lambda device: what_was_run(runs[device]))
    lines += folded("Statements without records, and analysis plans", not_run(rows) + plans(checks))
    return "\n".join(lines).rstrip() + "\n"


def folded(summary: str, lines: Sequence[str]) -> list[str]:
    """Return lines below a summary that a click unfolds; nothing for none."""
    head = ["<details>", f"<summary>{summary}</summary>", ""]
    return [*head, *lines, "</details>", ""] if lines else []


def _per_device(devices: Collection[str], written: Callable[[str], list[str]]) -> list[str]:
    """Return what is written of each device, with its name where there are several."""
    lines = []
    for device in devices:
        part = written(device)
        lines += [f"**{device_title(device)}**", ""] * (bool(part) and len(devices) > 1) + part
    return lines


def _short(rows: Sequence[Decided]) -> list[str]:
    """Return the three sentences: how many of each verdict, the first decided, what stays open."""
    verdicts = [row.verdict for row in rows if row.verdict is not None and row.is_run]
    absent = [number for number, row in enumerate(rows, 1) if not row.is_run]
    untestable = [n for n, row in enumerate(rows, 1) if row.is_run and not row.is_testable]
    counts = filter(None, [counted(verdicts), f"{len(absent)} not run" * bool(absent)])
    sentences = [
        f"**Of the paper's {len(rows)} claims about learning, on small policies: "
        f"{', '.join(counts)}.**"
    ]
    first = next((pair for pair in enumerate(rows, 1) if _is_decided(pair[1])), None)
    if first is not None:
        number, row = first
        sentences.append(
            f"For claim {number}, that {_lower(row.claim.title)}, the effect is {_measured(row)}; "
            f"the paper's is {row.paper:+.3g}."
        )
    parts = [_numbered("cannot be tested with these runs", untestable)]
    needs = "still need their runs" if len(absent) > 1 else "still needs its runs"
    parts.append(_numbered(needs, absent))
    opened = "; ".join(filter(None, parts))
    return [" ".join([*sentences, f"{opened}.".capitalize()] if opened else sentences), ""]


def _numbered(what: str, numbers: Sequence[int]) -> str:
    return f"{_claims(numbers)} {what}" if numbers else ""


def _claims(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"claims {', '.join(first)} and {last}" if first else f"claim {last}"


def _is_decided(row: Decided) -> bool:
    return row.is_testable and bool(row.paper) and row.half is not None


def _lower(title: str) -> str:
    """Return a title as it stands within a sentence; abbreviations stay as they are."""
    return title if title[1:2].isupper() or title[:4] == "QeRL" else title[0].lower() + title[1:]


def _drawn(folder: Path, out: Path, name: str, words: str) -> list[str]:
    """Return links to the pictures of that name, one per device; `words` say what they show."""
    pictures = sorted(folder.glob(f"proxy_*{name}.svg")) if folder.is_dir() else []
    return [line for path in pictures for line in (f"![{words}]({link_to(path, out)})", "")]


def _dose(devices: Mapping[str, Sequence[Checked]], folder: Path, out: Path) -> list[str]:
    """Return the section on the dose; nothing where no device has records of it."""

    def written(device: str) -> list[str]:
        response = dose_response.dose_response(devices[device])
        parts = [dose_response.in_words(response)] if response is not None else []
        parts += filter(None, [mediation.in_words(mediation.mediation(devices[device]))])
        return [line for part in parts for line in (part, "")]

    lines = _per_device(devices, written)
    pictures = _drawn(folder, out, DOSE, _DOSE_WORDS) if lines else []
    return ["## How much noise it takes", "", *lines, *pictures] if lines else []


def _limits(
    devices: Mapping[str, Sequence[Checked]],
    twelve: Mapping[str, Sequence[Decided]],
    rows: Sequence[Row],
) -> list[str]:
    """Return what the policies can and cannot show, which is read before the verdicts."""

    def written(device: str) -> list[str]:
        lines = _can(twelve[device]) + _explored(devices[device]) + _cannot(rows, device)
        return [*lines, *limits(runs_of_checks(devices[device])), ""]

    lines = _per_device(devices, written)
    return ["## What these policies can and cannot show", "", *lines] if devices else []


def _can(rows: Sequence[Decided]) -> list[str]:
    """Return how small an effect the testable claims resolve, by the measure of their shares."""
    by_measure: dict[str, dict[int, float]] = {}
    for number, row in enumerate(rows, 1):
        if row.is_testable and row.half is not None:
            by_measure.setdefault(row.measure, {})[number] = row.half
    resolved = [
        f"± {_range(halves.values())} {measure} ({_claims(list(halves))})"
        for measure, halves in by_measure.items()
    ]
    if not resolved:
        return []
    return [
        f"- **They can show** effects beyond {'; '.join(resolved)}: half the width of the "
        "intervals."
    ]


def _explored(checks: Sequence[Checked]) -> list[str]:
    """Return what the exploration controls say: whether it binds, and what more of it is worth."""
    known = statements(checks)
    rungs = []
    for rung in (NEEDLE_40, NEEDLE_4, NEEDLE_05):
        colder, warmer = (
            known.get(f"{rung.name}.{name}", (None, None, None))[2]
            for name in ("opening_colder_later", "opening_warmer_sooner")
        )
        if colder is None or warmer is None or None in (colder.low, warmer.low):
            continue
        rungs.append(
            f"on `{rung.name}`, with the deciding token drawn colder a run takes {_times(colder)} "
            "the steps (at least: one that never takes off counts with those it had)"
            f"{'' if colder.status == 'reproduced' else ', so nothing could be seen there'}; drawn "
            f"warmer, it is {_times(warmer)} as fast"
        )
    if not rungs:
        return []
    return [
        f"- **Where exploration decides**: {'; '.join(rungs)}. So exploration matters, and the "
        "warmer draw shows how much more of it could gain."
    ]


def _times(verdict: Verdict) -> str:
    """Return a ratio with its interval, of all seeds."""
    of = verdict.all_seeds or verdict
    return f"{of.effect:.3g} ({of.low:.3g} to {of.high:.3g}) times"


def _range(values: Iterable[float]) -> str:
    texts = [f"{value:.2g}" for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def _cannot(rows: Sequence[Row], device: str) -> list[str]:
    """Return how many of the paper's statements no effect could have appeared in, and why."""
    known = [
        row
        for row in rows
        if row.kind == "paper"
        and device in row.verdicts
        and row.verdicts[device].status != "not run"
    ]
    failed = [row for row in known if row.verdicts[device].status == "not testable"]
    if not failed:
        return []
    few = [row for row in failed if (row.claim.draws or MINIMUM_DRAWS) < MINIMUM_DRAWS]
    design = [
        row
        for row in failed
        if row not in few and any(assay.kind == "design" for assay in row.claim.assays)
    ]
    own = [
        row
        for row in failed
        if row not in [*few, *design]
        and any(assay.kind in ("range", "control") for assay in row.claim.assays)
    ]
    ceiling = len(failed) - len(few) - len(design) - len(own)
    counts = {
        "end under a ceiling shared by all arms": ceiling,
        "are of runs that fail an assay of their own (too few take off, accuracy falls, or "
        "exploration does not bind)": len(own),
        "are about rounding and have one draw of it": len(few),
        "cannot by the design of their runs": len(design),
    }
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    return [
        f"- **They cannot show** {len(failed)} of the paper's {len(known)} statements that have "
        f"runs: {reasons}."
    ]


def _table(twelve: Mapping[str, Sequence[Decided]]) -> list[str]:
    parts = {
        device: [
            Line(common=(f"{number}. {row.claim.title}", _papers(row)), own=_cells(row))
            for number, row in enumerate(rows, 1)
        ]
        for device, rows in twelve.items()
    }
    own = ["here", "verdict", "can this show it?"]
    return side_by_side(["claim", "the paper"], own, parts)


def _papers(row: Decided) -> str:
    """Return the paper's size as it is declared, and where the paper has it."""
    if row.statement is None:
        return row.claim.place
    source = row.statement.source.split(" (")[0]
    if row.is_equality:
        return f"no difference ({source})"
    return source if row.paper is None else f"{row.paper:+.3g} {row.measure} ({source})"


def _cells(row: Decided) -> tuple[str, str, str]:
    if not row.is_run or row.verdict is None:
        return "", CLAIM_WORDS["not run"], f"not yet: {row.remark}"
    by = f"<br>`{row.name}`"
    return (
        f"{_measured(row)}{_at_look(row)}{by}",
        labelled(row.verdict),
        _can_show(row, row.verdict),
    )


def _can_show(row: Decided, verdict: Verdict) -> str:
    if not row.is_testable:
        return f"no: {verdict.sentence.partition('. Point estimate')[0]}"
    parts = ["yes"]
    if row.statement is not None and are_pairs_counted(row.statement):
        needed = pairs_needed(row.statement, verdict)
        parts += [f"{needed} pairs would decide, were the effect as measured"] if needed else []
    return ": ".join(filter(None, ["; ".join(parts), row.remark]))


def _measured(row: Decided) -> str:
    return "" if row.measured is None else f"{_share(row.measured)} {row.measure}"


def _share(share: Share) -> str:
    ends = (share.low, share.high)
    interval = "" if None in ends else f" ({share.low:+.2g} to {share.high:+.2g})"
    return f"{share.value:+.2g}{interval}"


def _at_look(row: Decided) -> str:
    """Return how many seeds the effect is of, and what the look that decided had; or nothing."""
    if row.measured is None or row.at_look is None:
        return ""
    return (
        f", all {row.measured.pairs} seeds; {_share(row.at_look)} at the look that decided, "
        f"{row.at_look.pairs} seeds"
    )


def _details(checks: Sequence[Checked], rows: Sequence[Row], folder: Path, out: Path) -> list[str]:
    devices = by_device(checks)
    runs = {device: runs_of_checks(items) for device, items in devices.items()}
    paper = [row for row in rows if row.kind == "paper"]
    others = [row for row in rows if row.kind != "paper" and row.status != "not run"]
    lines = folded("How each claim is decided, and what else bears on it", _deciding(devices))
    lines += folded("Every statement of the paper", _statements(paper, devices))
    lines += folded(
        "Whether training works at all, and controls that the paper lacks",
        _others(others, devices),
    )
    lines += folded("What entropy is worth, and what a format brings of it", _mediation(devices))
    lines += folded("Every seed's end", _per_device(devices, lambda device: ends(runs[device])))
    ladder = rate_of_the_ladder(read_choice(NEEDLE_SWEPT, choice_file(NEEDLE_SWEEP.name)))
    skill = rates_of_skill(read_choice(SWEEP_SCALE, choice_file(SKILL_SWEEP.name)))
    lines += folded("Learning rates", rates(read_choice(PROXY_SWEEP)) + ladder + skill)
    return lines + folded("Pictures of each target", picture_lines(folder, out.parent))


def _mediation(devices: Mapping[str, Sequence[Checked]]) -> list[str]:
    return _per_device(
        devices,
        lambda device: mediation.mediation_table(mediation.mediation(devices[device])),
    )


def _deciding(devices: Mapping[str, Sequence[Checked]]) -> list[str]:
    """Return a row per statement behind the twelve, the deciding one of each first."""
    parts = {}
    deciding = {row.name for checks in devices.values() for row in decided(checks)}
    for device, checks in devices.items():
        known = statements(checks)
        parts[device] = [
            Line(
                common=(*_named(number, name, name in deciding), _place(known[name][1])),
                own=(labelled(known[name][2]),),
            )
            for number, claim in enumerate(TWELVE, 1)
            for name in claim.statements
            if name in known
        ]
    heads = ["claim", "statement", "the paper's size, and its arithmetic"]
    return side_by_side(heads, ["verdict"], parts)


def _named(number: int, name: str, deciding: bool) -> tuple[str, str]:
    later = ", decides once its planned runs are there" * (name == TWELVE[number - 1].then)
    return f"{number}", f"`{name}`" + (", decides" if deciding else later)


def _place(statement: Claim) -> str:
    return "" if statement.effect is None else statement.effect.place


def _statements(paper: Sequence[Row], devices: Mapping[str, Sequence[Checked]]) -> list[str]:
    lines = []
    for status in HEADINGS:
        same = [row for row in paper if row.status == status]
        heading = CLAIM_WORDS[status].capitalize()
        lines += statement_table(heading, same, devices, verdicts=status == "no difference")
    differing = [row for row in paper if row.status == DIFFER]
    lines += statement_table(DIFFER.capitalize(), differing, devices, verdicts=True)
    return [_counts(paper, devices), "", READING, "", *lines] if lines else []


def _counts(paper: Sequence[Row], devices: Collection[str]) -> str:
    counts = [
        f"{device_title(device)}: "
        + counted([row.verdicts[device] for row in paper if device in row.verdicts])
        for device in devices
    ]
    return f"Of {len(paper)} different statements, {'; '.join(counts)}."


def _others(rows: Sequence[Row], devices: Mapping[str, Sequence[Checked]]) -> list[str]:
    training = [row for row in rows if row.kind == "training"]
    controls = [row for row in rows if row.kind == "control"]
    lines = statement_table("Whether training works at all", training, devices, verdicts=True)
    return lines + statement_table("Controls", controls, devices, verdicts=True)
