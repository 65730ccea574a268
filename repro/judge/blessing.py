"""The command `bless`: records of a folder, alone or beside the blessed ones, to expectations."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from repro.evidence.bless import BlessError, bless
from repro.evidence.environment import capture_environment, device_of
from repro.evidence.plans import keep_plans, read_plans
from repro.evidence.store import Blessed, Entry, Joined, RunsFolder
from repro.judge.check import device_name
from repro.judge.gathering import Evidence, gather
from repro.run.analysis_plan import carried_plans, needs_plan
from repro.run.places import absence_text, expected_folder, runs_folder
from repro.run.select import Selection, changes_of, select, selections_of
from repro.spec.arm import require
from repro.spec.tier import PLANNED, Tier, parse_tier
from repro.targets import TARGETS


def main_bless(args: argparse.Namespace) -> int:
    """Carry out `repro bless`; return the exit status.

    Raises
    ------
    BlessError
        If the records of a target must not become expectations.
    """
    require(bool(args.targets), "name the targets to bless, or bless every recorded one: --device")
    folder, _ = runs_folder(args.runs)
    expected = expected_folder(args.expected)
    for selection in selections_of(args):
        require(
            not args.unfinished or selection.tier in PLANNED,
            f"--unfinished at the {selection.tier.value} tier: only where claims wait for planned "
            f"seeds may some be missing ({', '.join(tier.value for tier in PLANNED)})",
        )
        evidence = gather(selection, folder, expected)
        if args.add:
            _require_new(selection, evidence, folder)
            both = with_blessed(folder, expected, selection.tier, evidence)
            evidence = gather(selection, both, expected)
        paths = _bless(selection, evidence, folder, expected, unfinished=args.unfinished)
        for path in paths:
            print(f"wrote {path}")  # noqa: T201
    return 0


def main_bless_device(args: argparse.Namespace) -> int:
    """Bless every target that has complete records of one kind of device; say why of the others.

    The device is this machine's, or on a machine without a GPU the one that the records name.

    Returns
    -------
    int
        0 when something was blessed, else 2.
    """
    require(
        not (args.add or args.unfinished),
        "--device blesses whole targets; leave out --add and --unfinished",
    )
    folder, _ = runs_folder(args.runs)
    expected = expected_folder(args.expected)
    tier, here = parse_tier(args.tier or Tier.SYSTEMS.value), device_of(capture_environment())
    names = args.targets or [item.name for item in TARGETS if tier in item.scales]
    sentences, blessed = [], 0
    for selection in select(names, tier=tier.value, changes=changes_of(args)):
        name, evidence = selection.target.name, gather(selection, folder, expected)
        device = device_name(evidence)
        if here and device and device != here:
            sentences.append(f"left out: {name}: records of {device}; this machine has {here}")
            continue
        try:
            paths = _bless(selection, evidence, folder, expected)
        except BlessError as error:
            sentences.append(f"left out: {error}")
            continue
        blessed += 1
        sentences.append(f"blessed: {name} ({paths[0].parent})")
    print("\n".join([*sentences, f"{blessed} of {len(sentences)} targets blessed"]))  # noqa: T201
    return 0 if blessed else 2


def _require_new(selection: Selection, evidence: Evidence, runs: Path) -> None:
    """Raise `BlessError` where there is nothing to add: what is blessed would be written again."""
    if not (evidence.records or evidence.failed_records or evidence.refused):
        name, tier = selection.source.name, selection.tier.value
        where = absence_text(runs, runs / tier / name)
        raise BlessError(f"{name} at the {tier} tier has nothing to add: {where}")


def _bless(
    selection: Selection,
    evidence: Evidence,
    runs: Path,
    expected: Path,
    *,
    unfinished: bool = False,
) -> list[Path]:
    # Where learning is planned, a run that fails is a result like any other, and is kept as one.
    counts = selection.tier in PLANNED
    problems = [why for _, why in (*evidence.refused, *([] if counts else evidence.failed))]
    paths = bless(
        selection.source,
        selection.tier,
        evidence.records,
        problems=problems + ([] if unfinished else incomplete(selection, evidence)),
        unfinished=unfinished,
        failed=evidence.failed_records if counts else (),
        expected=expected,
    )
    if needs_plan(selection.source, selection.tier):
        target, records = selection.source, [*evidence.every_record(), *evidence.failed_records]
        earlier_plans = read_plans(expected)
        plans = carried_plans(
            target, selection.tier, records, runs, earlier_plans, device_name(evidence)
        )
        paths += keep_plans(plans, expected, replaced=target.name)
        began = min(datetime.fromisoformat(record.started) for record in records)
        kept = runs / selection.tier.value / "plans"
        for late in (plan.target for plan in plans if plan.time > began):
            print(  # noqa: T201
                f"{late}: its plan is dated now, after its runs began: {kept}, "
                "where `run` had written it, is not among these records; copy it there, take the "
                "line out of plans.tsv, and bless again"
            )
    return paths


def incomplete(selection: Selection, evidence: Evidence) -> list[str]:
    """Return which planned seeds have neither finished nor failed, a sentence per arm.

    A target whose every arm another target shares may end at that one's seeds: they are complete
    for the other, while its own statements stay undecided until the rest is there. At the systems
    tier an arm may be missing as a whole, where this machine lacks its library; half an arm may
    not.
    """
    parts = [evidence]
    parts += [evidence.at(seeds) for seeds in _shared_seeds(selection, evidence.planned)]
    optional = selection.tier is Tier.SYSTEMS
    arms = [
        arm.name
        for arm in selection.target.arms
        if not optional or arm.name in {*evidence.records, *evidence.failed_seeds}
    ]
    sentences: list[str] = []
    for part in parts:
        sentences = [
            f"{len(missing)} of {len(part.planned)} planned seeds of {arm} have no record "
            f"({', '.join(map(str, missing))})"
            for arm in arms
            if (missing := part.without_record(arm))
        ]
        if not sentences:
            return []
    return sentences


def _shared_seeds(selection: Selection, planned: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the planned seeds, from the first on, of the targets that share every arm."""
    own = {(selection.source.name, arm.name) for arm in selection.source.arms}
    scales = [
        target.scales[selection.tier]
        for target in TARGETS
        if selection.tier in target.scales
        and own <= {(home.name, arm) for home, arm in target.shared.values()}
    ]
    seeds = {tuple(scale.seeds) for scale in scales}
    return sorted(some for some in seeds if some == tuple(planned[: len(some)]))


def with_blessed(runs: Path, expected: Path, tier: Tier, evidence: Evidence) -> Joined:
    """Return the new records together with the blessed ones of the device that made them.

    Parameters
    ----------
    evidence
        What the new records are; they name the device.
    """
    # The smoke tier's records are blessed for every machine.
    device = None if tier is Tier.SMOKE else device_name(evidence)
    blessed = Blessed(expected, tier.value, device)
    return Joined([RunsFolder(runs), blessed], _refuse_conflict)


def _refuse_conflict(new: Entry, blessed: Entry) -> None:
    record, other = blessed.read(), new.read()
    raise BlessError(
        f"{record.arm} of {record.target}, seed {record.seed}, is in {blessed.path.parents[1]} "
        f"already, of commit {record.commit[:12]}, and recorded again at commit "
        f"{other.commit[:12]}; move one of the two away"
    )
