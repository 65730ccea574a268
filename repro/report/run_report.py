"""The report: the paper's tables and claims beside records and expectations.

For each target: the paper's table beside what was measured, each cell with mean, 95 % interval and
number of seeds; the verdict of each claim with its sentence; what this tier can and cannot say.
Nothing is run, and no tier speaks for another.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from repro.judge.blessed import blessed_of, untested_checks
from repro.judge.check import Checked, check_selection
from repro.judge.recorded import recorded_selections
from repro.report.numbers import environment_lines
from repro.report.tables import arms_table, paper_columns
from repro.report.tidy import rendered
from repro.report.verdict_words import Kind, about, as_before_lines, counts_of, labelled
from repro.run.places import expected_folder, runs_folder
from repro.run.select import CHANGING, Selection, selections_of
from repro.spec.checks import require
from repro.spec.whole_files import replace_text
from repro.targets import TARGETS

# Flags that write another page: what it is, and the flags that go with them.
_READ = {
    "html": ("one page of what is blessed, or of --runs", {"expected", "runs", "targets", "tier"}),
    "log": ("curves of what is blessed, or of --runs", {"expected", "runs", "targets", "tier"}),
    "readme": ("the blocks of one file from blessed records", {"expected"}),
}


def report_text(checks: list[Checked], expected: Path, out: Path) -> str:
    """Return the report at `out` as Markdown; it links to the figures in the folder beside it."""
    pictures = sorted((out.parent / "figures").glob("*.png"))
    records = [record for checked in checks for record in checked.evidence.every_record()]
    lines = rendered(
        "run_report.md",
        about=about,
        as_before=lambda checked: as_before_lines(checked.as_before),
        checks=checks,
        counts=lambda checked: counts_of([checked], expected).values(),
        details=_details_table,
        environment=environment_lines(records) if records else [],
        headline=lambda checked: _headline_table(checked, expected),
        kinds=[kind.value for kind in Kind],
        labelled=labelled,
        paper=lambda target: paper_columns(target, expected),
        pictures={path.stem: f"figures/{path.name}" for path in pictures},
    )
    return "\n".join(lines).rstrip() + "\n"


def _headline_table(checked: Checked, expected: Path) -> str:
    target = checked.selection.target
    metric = target.metric(target.headline or "")
    head = f"{checked.selection.tier.value}: {metric.title} ({metric.unit})"
    columns = paper_columns(target, expected)
    return "\n".join(arms_table(target, columns, [(head, checked, metric)]))


def _details_table(checked: Checked) -> str:
    """Return the table of a training target's metrics besides the headline; empty without any."""
    target = checked.selection.target
    if target.procedure != "train":
        return ""
    shown = [
        (f"{metric.title} ({metric.unit})", checked, metric)
        for metric in target.metrics_at(checked.selection.tier)
        if metric.name != target.headline and checked.evidence.values(metric.name)
    ]
    return "\n".join(arms_table(target, {}, shown, n=False)) if shown else ""


def chosen_selections(args: argparse.Namespace, runs: Path) -> list[Selection]:
    """Return the selections that a command line names, else all that a folder has records of."""
    if args.targets:
        return selections_of(args)
    changing = ", ".join(f"--{name}" for name in CHANGING if vars(args).get(name))
    require(not changing, f"{changing}: name the targets that change")
    chosen = recorded_selections(args.tier, runs)
    what = f"records of the {args.tier} tier" if args.tier else "records"
    require(bool(chosen), f"{runs} has no target's {what}; start with: python -m repro run table1")
    return chosen


def reported(args: argparse.Namespace, runs: Path, expected: Path) -> list[Checked]:
    """Return the checks that a report is about; `ValueError` where none of them has a record."""
    chosen = chosen_selections(args, runs)
    known = {(item.target.name, item.tier) for item in chosen}
    # Beside targets that are named, the figures that read the same, unchanged, runs.
    figures = [
        Selection(target=target, tier=item.tier)
        for item in (chosen if args.targets else [])
        if item.target is item.source
        for target in TARGETS
        if target.records_of == item.target and (target.name, item.tier) not in known
    ]
    checks = [check_selection(selection, runs, expected) for selection in [*chosen, *figures]]
    lacking = [checked.lacking for checked in checks if checked.lacking]
    require(len(lacking) < len(checks), "; ".join(lacking[: len(chosen)]))
    return checks


def require_read(args: argparse.Namespace) -> None:
    """Raise `ValueError` where `report` would not read something that its line names."""
    given = {name for name, value in vars(args).items() if value not in (None, [])}
    given -= {"command"}
    for page in given & _READ.keys():
        written, read = _READ[page]
        others = sorted(given - {page} - read)
        named = [
            *(args.targets if "targets" in others else ()),
            *(f"--{name}" for name in others if name != "targets"),
        ]
        require(not others, f"--{page} writes {written}; leave out {', '.join(named)}")


def stored_or_own(args: argparse.Namespace) -> list[Checked]:
    """Return the checks of blessed records or, with `--runs`, of that folder."""
    expected = expected_folder(args.expected)
    if args.runs:
        return reported(args, runs_folder(args.runs), expected)
    return blessed_of(expected, args.targets, args.tier)


def main_report(args: argparse.Namespace) -> int:
    """Carry out `repro report`; return the exit status."""
    runs = runs_folder(args.runs)
    expected = expected_folder(args.expected)
    if args.readme:
        from repro.report.page_blocks import renewed_readme

        # From the blessed records, not from whatever was run last.
        replace_text(Path(args.readme), renewed_readme(Path(args.readme), expected))
        print(f"renewed the results in {args.readme}")  # noqa: T201
        return 0
    if args.html:
        from repro.report.one_page import REPORTED, page_text, reports

        stored = not args.runs
        whole = stored and not args.targets
        others = reports(REPORTED, expected) if whole else None
        checks = stored_or_own(args)
        untested = untested_checks(expected, checks) if whole and not args.tier else ()
        replace_text(Path(args.html), page_text(checks, expected, others, untested))
        print(f"wrote {args.html}, of {'blessed records' if stored else runs}")  # noqa: T201
        return 0
    out = Path(args.out) if args.out else runs / "report.md"
    checks = reported(args, runs, expected)
    replace_text(out, report_text(checks, expected, out))
    print(f"wrote {out}")  # noqa: T201
    return 0
