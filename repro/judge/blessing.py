"""Bless: store a folder's records, alone or with earlier ones, as expectations (`bless`).

Refused for a dirty tree and for a source that changed under a run (the commit would not say what
ran), for a commit that this checkout does not have, for records of several commits but for whole
seeds of learning runs (`repro.evidence.origins` has the rule), for fewer than five seeds per arm
(one of timed repeats), for the paper tier (its expectations are the paper's), and while any record
is refused or any run has failed. Blessed records are the store's (`repro.evidence.store`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from repro.evidence.environment import capture_environment, device_of
from repro.evidence.origins import devices_of, is_clean, mixed_devices, mixed_sources
from repro.evidence.record import Record
from repro.evidence.store import Blessed, Joined, RunsFolder, blessed_sources, write_stored
from repro.evidence.verdicts.verdict import MINIMUM_SEEDS
from repro.judge.gathering import Evidence, gather
from repro.run.analysis_plan import keep_carried_plans, needs_plan
from repro.run.places import expected_folder, runs_folder
from repro.run.select import Selection, selections_of
from repro.spec.checks import require
from repro.spec.target import Target
from repro.spec.tier import PLANNED, Tier, parse_tier
from repro.targets import TARGETS


class BlessError(ValueError):
    """Records that must not become expectations; the message says why."""


_DIGITS = 6
# Fewer digits for values that are drawn, have wide bounds, or only show how a run went.
_COARSE = {"completion_tokens": 3, "entropy": 2, "grad_norm": 1, "sigma_realised": 3}
# Diagnostics of a run, dropped unless the mean of one is a metric of the target.
_DIAGNOSTICS = {
    "loss",
    "sampler_trainer_kl",
    "entropy_truncated",
    "importance_weight",
    "sampler_trainer_abs_diff_max",
    "sampler_trainer_abs_diff_mean",
    "sampler_trainer_exp_abs_diff_mean",
}


def main_bless(args: argparse.Namespace) -> int:
    """Carry out `repro bless`; return the exit status, or raise `BlessError` with the reason."""
    folder, expected = runs_folder(args.runs), expected_folder(args.expected)
    if args.device:
        return _bless_device(args, folder, expected)
    require(bool(args.targets), "name the targets to bless, or bless every recorded one: --device")
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
        for path in bless(selection, evidence, expected, runs=folder, unfinished=args.unfinished):
            print(f"wrote {path}")  # noqa: T201
    return 0


def _bless_device(args: argparse.Namespace, folder: Path, expected: Path) -> int:
    """Bless every target that has complete records of one kind of device; say why of the others.

    The device is this machine's, or on a machine without a GPU the one that the records name.
    Returns 0 when something was blessed, else 2.
    """
    require(
        not (args.add or args.unfinished),
        "--device blesses whole targets; leave out --add and --unfinished",
    )
    tier, here = parse_tier(args.tier or Tier.SYSTEMS.value), device_of(capture_environment())
    args.targets = args.targets or [item.name for item in TARGETS if tier in item.scales]
    args.tier = tier.value
    sentences, blessed = [], 0
    for selection in selections_of(args):
        name, evidence = selection.target.name, gather(selection, folder, expected)
        device = evidence.device
        if here and device and device != here:
            sentences.append(f"left out: {name}: records of {device}; this machine has {here}")
            continue
        try:
            paths = bless(selection, evidence, expected, runs=folder)
        except BlessError as error:
            sentences.append(f"left out: {error}")
            continue
        blessed += 1
        sentences.append(f"blessed: {name} ({paths[0].parent})")
    print("\n".join([*sentences, f"{blessed} of {len(sentences)} targets blessed"]))  # noqa: T201
    return 0 if blessed else 2


def with_blessed(runs: Path, expected: Path, selection: Selection, evidence: Evidence) -> Joined:
    """Return the new records together with the blessed ones that they join.

    Those of the device that made them; where timings are not compared, another device's if that is
    where the target's records are. The smoke tier's are blessed for every machine.
    """
    tier = selection.tier
    device: str | None = evidence.device
    stored = [s for s in blessed_sources(expected, tier) if s.has(selection.source.name)]
    if tier is Tier.SMOKE:
        device = None
    elif tier is not Tier.SYSTEMS and stored and all(s.device != device for s in stored):
        device = stored[0].device
    return Joined([RunsFolder(runs), Blessed(expected, tier.value, device)])


def bless(
    selection: Selection,
    evidence: Evidence,
    expected: Path,
    *,
    runs: Path,
    unfinished: bool = False,
) -> list[Path]:
    """Write records to their place in the store, with rounded series; return the paths.

    Records of shared arms are compared with, and kept by the target that ran them. The analysis
    plans that the records carry, beside them in `runs`, are kept, too. `unfinished` says whether
    planned seeds or arms may still be missing.

    Raises `BlessError` if the records do not qualify.
    """
    target, tier = selection.source, selection.tier
    # Where learning is planned, a run that fails is a result like any other, and is kept as one.
    every, failed = evidence.every_record(), [*evidence.failed.values()]
    if tier in PLANNED:
        every, failed = evidence.all_records(), []
    problems = [why for _, why in (*evidence.refused, *failed)]
    if not unfinished:
        arms = [arm.name for arm in selection.target.arms]
        if tier is Tier.SYSTEMS:
            # An arm may be missing as a whole, where this machine lacks its library; half an arm
            # may not.
            begun = {*evidence.records, *(name for name, _ in evidence.failed)}
            arms = [arm for arm in arms if arm in begun]
        problems += filter(None, map(evidence.missing, arms))
    reason = _unfit(target, tier, every, problems, unfinished=unfinished)
    if reason is not None:
        raise BlessError(f"{target.name} at the {tier.value} tier is not blessed: {reason}")
    own = [record for record in every if record.target == target.name]
    device = devices_of(record for record in own if record.ok)[0] if tier != Tier.SMOKE else None
    names = [metric.name for metric in target.metrics_at(tier)]
    read = [name for name in _DIAGNOSTICS if f"train_{name}_mean" in names]
    exact = names if target.timed_repeats else read
    path = Blessed(expected, tier.value, device).place(tier.value, target.name)
    paths = write_stored(path, names, [compact(record, exact) for record in own])
    if needs_plan(target, tier):
        paths.append(keep_carried_plans(selection, evidence.all_records(), runs, expected))
    return paths


def _unfit(
    target: Target,
    tier: Tier,
    every: Sequence[Record],
    problems: Sequence[str],
    *,
    unfinished: bool,
) -> str | None:
    """Return why records must not become expectations, most basic reason first, or None."""
    ran = [arm.name for arm in target.arms if arm.name not in target.shared]
    if not ran:
        homes = sorted({home.name for home, _ in target.shared.values()})
        return f"it has no runs of its own; bless {', '.join(homes)}"
    if tier is Tier.PAPER:
        return "the paper's own numbers are that tier's expectations"
    if problems:
        return f"{problems[0]} ({len(problems)} such records)"
    own = [record for record in every if record.target == target.name]
    if not own:
        return "no run of its own is recorded"
    planned = len(target.scales[tier].seeds) if tier in PLANNED else MINIMUM_SEEDS
    least = 1 if target.timed_repeats else min(MINIMUM_SEEDS, planned)
    seeds = {arm: {record.seed for record in own if record.arm == arm} for arm in ran}
    lacking = [arm for arm in ran if len(seeds[arm]) < least and not unfinished]
    if lacking:
        return f"fewer than {least} seeds recorded for {', '.join(lacking)}"
    dirty = sorted({record.arm for record in every if not is_clean(record)})
    if dirty:
        return (
            "made from a source tree with changes, or whose state is not known, or that changed "
            f"under the run, or of a commit that is not here ({', '.join(dirty)}); commit and run "
            "again"
        )
    devices = devices_of(every)
    if tier is not Tier.SMOKE:
        if None in devices or (tier is Tier.SYSTEMS and len(devices) > 1):
            return f"the records name the devices {set(devices)}; needs one"
        if mixed := mixed_devices(every):
            return mixed
    return mixed_sources(every, several=tier is not Tier.SYSTEMS)


def compact(record: Record, exact: Sequence[str]) -> Record:
    """Return a record as it is stored: its series rounded, and those of training runs fewer.

    A record is checked whole, and its metrics formed, before it is blessed: the metrics are kept.
    `exact` are the series that verdicts read, timed repeats among them; they are not changed.
    """
    fewer = _DIAGNOSTICS.difference(exact) if record.procedure == "train" else ()
    series = {
        name: list(values) if name in exact else _rounded(values, _COARSE.get(name, _DIGITS))
        for name, values in record.series.items()
        if name not in fewer
    }
    return replace(record, series=series)


def _rounded(values: Sequence[float | None], digits: int) -> list[float | None]:
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]
