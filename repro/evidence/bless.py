"""Bless: put this suite's own records into the store, once a person asked for it.

Refused for a dirty tree and for a source that changed under a run (the commit would not say what
ran), for a commit that this checkout does not have, for records of several commits but for whole
seeds of learning runs (`repro.evidence.origins` has the rule), for fewer than five seeds per arm
(one of timed repeats), for the paper tier (its expectations are the paper's), and while any record
is refused or any run has failed.

Blessed records are the store's (`repro.evidence.store`); what they lead to expect of a new run is
computed from them (`repro.evidence.verdicts.measured`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from repro.evidence.origins import devices_of, is_clean, mixed_devices, refusal
from repro.evidence.record import Record
from repro.evidence.store import stored_path, write_stored
from repro.evidence.verdicts.measured import MINIMUM_SEEDS
from repro.spec.target import Target
from repro.spec.tier import PLANNED, Tier


class BlessError(ValueError):
    """Records that must not become expectations; the message says why."""


_DIGITS = 6
# Fewer, where a value is drawn, or must lie within wide bounds, or shows how a run went.
_COARSE = {
    "completion_tokens": 3,
    "entropy": 2,
    "grad_norm": 1,
    "sigma_realised": 3,
}
# Diagnostics of a run, dropped unless the mean of one is a metric of the target.
_DIAGNOSTICS = frozenset(
    {
        "loss",
        "sampler_trainer_kl",
        "entropy_truncated",
        "importance_weight",
        "sampler_trainer_abs_diff_max",
        "sampler_trainer_abs_diff_mean",
        "sampler_trainer_exp_abs_diff_mean",
    }
)


def bless(
    target: Target,
    tier: Tier,
    records: Mapping[str, Mapping[int, Record]],
    *,
    problems: Sequence[str],
    expected: Path,
    failed: Sequence[Record] = (),
    unfinished: bool = False,
) -> list[Path]:
    """Write the records to their place in the store, with rounded series; return the paths.

    Parameters
    ----------
    records
        By arm and seed, those of shared arms among them: they are compared, and kept by the target
        that ran them.
    unfinished
        Whether planned seeds or arms may still be missing.

    Raises
    ------
    BlessError
        If the records do not qualify.
    """
    compared = [record for by_seed in records.values() for record in by_seed.values()]
    records = {arm: by_seed for arm, by_seed in records.items() if arm not in target.shared}
    reason = _unfit(target, tier, [*compared, *failed], problems, unfinished=unfinished)
    if reason is not None:
        raise BlessError(f"{target.name} at the {tier.value} tier is not blessed: {reason}")
    failed = [record for record in failed if record.target == target.name]
    every = [record for by_seed in records.values() for record in by_seed.values()]
    device = devices_of(every)[0] if tier is not Tier.SMOKE else None
    path = stored_path(expected, tier.value, target.name, device)
    names = [metric.name for metric in target.metrics_at(tier)]
    read = [name for name in _DIAGNOSTICS if f"train_{name}_mean" in names]
    exact = names if target.timed_repeats else read
    stored = [compact(record, exact) for record in (*every, *failed)]
    return write_stored(path, names, stored)


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
    return refusal(every, several=tier is not Tier.SYSTEMS)


def compact(record: Record, exact: Sequence[str]) -> Record:
    """Return a record as it is stored: its series rounded, and those of training runs fewer.

    A record is checked whole, and its metrics formed, before it is blessed: the metrics are kept.

    Parameters
    ----------
    exact
        Series that verdicts read, timed repeats among them; they are not changed.
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
