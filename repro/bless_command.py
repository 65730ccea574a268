"""The command `bless`: records of a folder, alone or beside the blessed ones, to expectations."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from repro.analysis_plan import earliest_plan_text, needs_plan
from repro.check import Evidence, device_name, gather
from repro.evidence.bless import BlessError, bless
from repro.evidence.environment import capture_environment, device_of
from repro.evidence.record import (
    Record,
    iterate_records,
    parse_record,
    record_folder,
    replace_text,
)
from repro.places import expected_folder, runs_folder
from repro.selection import Selection, select
from repro.spec.config import require
from repro.spec.tier import Tier, parse_tier
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
    for selection in select(args.targets, tier=args.tier, data=args.data, steps=args.steps):
        if args.add:
            with tempfile.TemporaryDirectory() as together:
                join_blessed(selection, folder, expected, Path(together))
                paths = _bless(selection, gather(selection, Path(together)), folder, expected)
        else:
            paths = _bless(selection, gather(selection, folder), folder, expected)
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
    require(not args.add, "--device blesses whole targets; leave out --add")
    folder, _ = runs_folder(args.runs)
    expected = expected_folder(args.expected)
    tier, here = parse_tier(args.tier or Tier.SYSTEMS.value), device_of(capture_environment())
    names = args.targets or [item.name for item in TARGETS if tier in item.scales]
    sentences, blessed = [], 0
    for selection in select(names, tier=tier.value, data=args.data, steps=args.steps):
        name, evidence = selection.target.name, gather(selection, folder)
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


def _bless(selection: Selection, evidence: Evidence, runs: Path, expected: Path) -> list[Path]:
    # At the proxy tier a run that fails is a result like any other, and is kept as one.
    counts = selection.tier is Tier.PROXY
    paths = bless(
        selection.source,
        selection.tier,
        evidence.records,
        problems=[why for _, why in (*evidence.refused, *([] if counts else evidence.failed))],
        failed=evidence.failed_records if counts else (),
        expected=expected,
    )
    if needs_plan(selection.source, selection.tier):
        path = paths[0].with_name(f"{selection.source.name}.plan.json")
        replace_text(path, earliest_plan_text(selection.source, runs, path))
        paths.append(path)
    return paths


def join_blessed(selection: Selection, runs: Path, expected: Path, together: Path) -> None:
    """Write the records that a selection needs to `together`: new ones, and the blessed ones.

    Raises
    ------
    BlessError
        If a run is both blessed and recorded anew, with another result: which of the two counts is
        not for this command to choose.
    """
    source, tier = selection.source, selection.tier
    homes = {source.name, *(home.name for home, _ in source.shared.values())}
    for name in homes:
        for path in iterate_records(runs, tier.value, name):
            place = together / path.relative_to(runs)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    device = device_name(gather(selection, runs))
    for name in sorted(homes):
        path = expected / tier.value / (device or "") / f"{name}.records.json"
        if path.is_file():
            for record in _records_of(path):
                _add(record, together, path)


def _records_of(path: Path) -> list[Record]:
    raw = json.loads(path.read_text(encoding="utf-8"))
    return [parse_record(item, f"{path}: records[{i}]") for i, item in enumerate(raw["records"])]


def _add(record: Record, together: Path, origin: Path) -> None:
    folder = record_folder(record.tier, record.target, record.arm, together)
    place = folder / f"seed-{record.seed}.json"
    if record.ok and place.is_file():
        found = json.loads(place.read_text(encoding="utf-8"))
        if (found["commit"], found["started"]) == (record.commit, record.started):
            return
        raise BlessError(
            f"{record.arm} of {record.target}, seed {record.seed}, is in {origin} already, of "
            f"commit {record.commit[:12]}, and recorded anew at commit {found['commit'][:12]}; "
            "move one of the two away"
        )
    if not record.ok and any(
        json.loads(item.read_text(encoding="utf-8"))["started"] == record.started
        for item in folder.glob(f"seed-{record.seed}.failed-*.json")
    ):
        return
    record.write(together)
