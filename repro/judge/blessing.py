"""The command `bless`: store a folder's records, alone or with earlier ones, as expectations."""

from __future__ import annotations

import argparse
from pathlib import Path

from repro.evidence.bless import BlessError, bless
from repro.evidence.environment import capture_environment, device_of
from repro.evidence.plans import keep_plans, read_plans
from repro.evidence.store import Blessed, Joined, RunsFolder, blessed_sources
from repro.judge.check import device_name
from repro.judge.gathering import Evidence, gather
from repro.run.analysis_plan import carried_plans, needs_plan
from repro.run.places import expected_folder, runs_folder
from repro.run.select import Selection, changes_of, select, selections_of
from repro.spec.arm import require
from repro.spec.tier import PLANNED, Tier, parse_tier
from repro.targets import TARGETS


def main_bless(args: argparse.Namespace) -> int:
    """Carry out `repro bless`; return the exit status; `BlessError` says what is not blessed."""
    require(bool(args.targets), "name the targets to bless, or bless every recorded one: --device")
    folder = runs_folder(args.runs)
    expected = expected_folder(args.expected)
    for selection in selections_of(args):
        require(
            not args.unfinished or selection.tier in PLANNED,
            f"--unfinished at the {selection.tier.value} tier: only where claims wait for planned "
            f"seeds may some be missing ({', '.join(tier.value for tier in PLANNED)})",
        )
        evidence = gather(selection, folder, expected)
        if args.add:
            both = with_blessed(folder, expected, selection, evidence)
            evidence = gather(selection, both, expected)
        paths = _bless(selection, evidence, folder, expected, unfinished=args.unfinished)
        for path in paths:
            print(f"wrote {path}")  # noqa: T201
    return 0


def main_bless_device(args: argparse.Namespace) -> int:
    """Bless every target that has complete records of one kind of device; say why of the others.

    The device is this machine's, or on a machine without a GPU the one that the records name.
    Returns 0 when something was blessed, else 2.
    """
    require(
        not (args.add or args.unfinished),
        "--device blesses whole targets; leave out --add and --unfinished",
    )
    folder = runs_folder(args.runs)
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
    return paths


def incomplete(selection: Selection, evidence: Evidence) -> list[str]:
    """Return which planned seeds have neither finished nor failed, a sentence per arm.

    At the systems tier an arm may be missing as a whole, where this machine lacks its library; half
    an arm may not.
    """
    return [
        f"{len(missing)} of {len(evidence.planned)} planned seeds of {arm.name} have no record "
        f"({', '.join(map(str, missing))})"
        for arm in selection.target.arms
        if selection.tier is not Tier.SYSTEMS
        or arm.name in {*evidence.records, *evidence.failed_seeds}
        if (missing := evidence.without_record(arm.name))
    ]


def with_blessed(runs: Path, expected: Path, selection: Selection, evidence: Evidence) -> Joined:
    """Return the new records together with the blessed ones that they join.

    Those of the device that made them; where timings are not compared, another device's if that is
    where the target's records are. The smoke tier's are blessed for every machine.
    """
    tier, device = selection.tier, device_name(evidence)
    stored = [s for s in blessed_sources(expected, tier) if s.has(selection.source.name)]
    if tier is Tier.SMOKE:
        device = None
    elif tier is not Tier.SYSTEMS and stored and all(s.device != device for s in stored):
        device = stored[0].device
    return Joined([RunsFolder(runs), Blessed(expected, tier.value, device)])
