"""Gather the records of a selection, and refuse those that are not evidence.

A record is checked in this order: the file can be read; its path is the one that it names; its
configuration is the target's present one; its receipts show that what it claims was done; and the
seeds of an arm have the same inputs. A record that fails is refused, with a sentence, and ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from repro.evidence.environment import device_of
from repro.evidence.origins import (
    CHANGED,
    OF_THE_SEED,
    PLAN_INPUT,
    devices_of,
    is_changed,
    seeds_text,
)
from repro.evidence.plans import read_plans
from repro.evidence.receipts import violations
from repro.evidence.record import Record, RecordError, config_difference
from repro.evidence.store import Entry, Source, source_of
from repro.evidence.verdicts.sizes import Pair
from repro.run.analysis_plan import Plans, needs_plan
from repro.run.select import Selection
from repro.spec.target import plan


def values_of(records: Mapping[int, Record], metric: str, *, timed: bool) -> dict[Pair, float]:
    """Return {seed: value} of a metric, or {(seed, repeat): value} where repeats are timed."""
    values: dict[Pair, float] = {}
    for seed, record in sorted(records.items()):
        value = record.value(metric)
        if timed:
            values |= {(seed, i): v for i, v in enumerate(record.repeats(metric))}
        elif value is not None:
            values[seed] = value
    return values


@dataclass(slots=True, kw_only=True)
class Evidence:
    """The records of a selection, sorted into what counts and what does not.

    Attributes
    ----------
    records
        Usable ones by arm and seed.
    refused
        (path, sentence) of those that are not evidence.
    failed
        {(arm, seed): (path, sentence)} of runs that failed and were not made good since.
    planned
        The seeds that the plan of these records names.
    timed
        Whether timed repeats stand in for seeds (`Target.timed_repeats`).
    """

    records: dict[str, dict[int, Record]] = field(default_factory=dict)
    refused: list[tuple[Path, str]] = field(default_factory=list)
    failed: dict[tuple[str, int], tuple[Path, str]] = field(default_factory=dict)
    failed_records: list[Record] = field(default_factory=list)
    refused_arms: dict[str, str] = field(default_factory=dict)
    planned: tuple[int, ...] = ()
    timed: bool = False

    def every_record(self) -> list[Record]:
        """Return the usable records of all arms."""
        return [record for by_seed in self.records.values() for record in by_seed.values()]

    def all_records(self) -> list[Record]:
        """Return the usable records, and those of failed runs."""
        return [*self.every_record(), *self.failed_records]

    @property
    def devices(self) -> dict[str, list[int]]:
        """{kind of device: seeds of its records}, that of most records first."""
        records = self.every_record()
        return {
            device: sorted({r.seed for r in records if device_of(r.environment) == device})
            for device in devices_of(records)
            if device is not None
        }

    @property
    def device(self) -> str:
        """The kind of device of most of the records, as folders spell it; empty for none."""
        return next(iter(self.devices), "")

    def changed(self, arms: Iterable[str]) -> str:
        """Return a sentence on the records of these arms that are of no one commit, or empty."""
        records = [record for arm in arms for record in self.records.get(arm, {}).values()]
        seeds = [record.seed for record in records if is_changed(record)]
        of = f"{len(seeds)} of {len(records)} records ({seeds_text(seeds)})"
        return f"Of no one commit: {of}: the source was, or became, another" if seeds else ""

    def without_record(self, arm: str) -> list[int]:
        """Return the planned seeds of an arm that have neither finished nor failed."""
        known = {*self.records.get(arm, ()), *(seed for name, seed in self.failed if name == arm)}
        return [seed for seed in self.planned if seed not in known]

    def missing(self, arm: str) -> str:
        """Return a sentence on the planned seeds of an arm without a record; empty without any."""
        seeds = self.without_record(arm)
        listed = ", ".join(map(str, seeds))
        what = f"{len(seeds)} of {len(self.planned)} planned seeds"
        return f"{what} of {arm} have no record ({listed})" if seeds else ""

    def lost(self, arm: str) -> str:
        """Return a sentence on the planned seeds of an arm that failed or have no record."""
        failed = sum(name == arm for name, _ in self.failed)
        parts = [f"{failed} run(s) of {arm} failed" if failed else "", self.missing(arm)]
        return "; ".join(filter(None, parts))

    def values(self, metric: str) -> dict[str, dict[Pair, float]]:
        """Return {arm: {seed: value}} of a metric; a timed one has (seed, repeat) for the seed."""
        by_arm = {
            arm: values_of(records, metric, timed=self.timed)
            for arm, records in self.records.items()
        }
        return {arm: values for arm, values in by_arm.items() if values}

    @property
    def count(self) -> int:
        """Usable records."""
        return sum(len(records) for records in self.records.values())

    @property
    def count_text(self) -> str:
        """`30 records`, and how many of them are of a changed source."""
        changed = sum(map(is_changed, self.every_record()))
        return f"{self.count} records" + (f" ({changed} of {CHANGED})" if changed else "")


def gather(selection: Selection, runs: Path | Source, expected: Path) -> Evidence:
    """Read the records of a selection and refuse those that are not evidence.

    Earlier analysis plans are kept in `expected`.
    """
    evidence = Evidence(timed=selection.source.timed_repeats > 0)
    plans = Plans(selection, read_plans(expected))
    paths: dict[tuple[str, int], Path] = {}
    places = _places(selection, source_of(runs))
    finished = {(arm, entry.stem) for entry, arm in places if entry.finished}
    for entry, arm in places:
        try:
            record = entry.read()
            misplaced = _misplaced(record, entry)
            reasons = misplaced or _reasons(selection, record, arm, plans)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"{error}"
            if not isinstance(error, RecordError):  # sealed, and not written by this program
                why = f"it holds what no run leaves ({type(error).__name__}: {error})"
            _refuse(evidence, entry.path, arm, why)
            continue
        if not record.ok and not misplaced:
            evidence.failed_records.append(record)
            if (arm, entry.stem) not in finished:
                evidence.failed[arm, record.seed] = (entry.path, reasons[0])
        elif reasons:
            for reason in reasons:
                _refuse(evidence, entry.path, arm, reason)
        else:
            evidence.records.setdefault(arm, {})[record.seed] = record
            paths[arm, record.seed] = entry.path
    for (arm, seed), reason in _other_inputs(evidence.records).items():
        del evidence.records[arm][seed]
        _refuse(evidence, paths[arm, seed], arm, reason)
    evidence.planned = plans.planned_seeds(evidence.every_record())
    return evidence


def _other_inputs(records: Mapping[str, Mapping[int, Record]]) -> dict[tuple[str, int], str]:
    """Return {(arm, seed): sentence} of seeds whose inputs are not those of most of an arm.

    Of inputs that are a seed's own, those of another seed.
    """
    sentences: dict[tuple[str, int], str] = {}
    for arm, by_seed in records.items():
        names = sorted({name for record in by_seed.values() for name in record.inputs})
        for name in (name for name in names if not name.startswith(PLAN_INPUT)):
            values = {seed: record.inputs.get(name) for seed, record in sorted(by_seed.items())}
            if name in OF_THE_SEED:
                first = {value: seed for seed, value in reversed(values.items())}
                sentences |= {
                    (arm, seed): f"inputs.{name} is that of seed {first[value]} of {arm}, too"
                    for seed, value in values.items()
                    if value is not None and first[value] != seed
                }
                continue
            usual = Counter(values.values()).most_common(1)[0][0]
            for seed, value in values.items():
                if value != usual:
                    what = f"inputs.{name}: another {name.replace('_', ' ')} than most seeds of"
                    sentences[arm, seed] = f"{what} {arm} had ({(value or 'none')[:12]})"
    return sentences


def _places(selection: Selection, records: Source) -> list[tuple[Entry, str]]:
    """Return the records' entries, each with the selection's own name of its arm.

    A figure that reads a table's runs asks only those of its own arms. Of arms that it shares, a
    target with an analysis plan asks the seeds of its plan: their home may have planned more.
    """
    source, tier = selection.source, selection.tier.value
    others = {arm.name for arm in source.arms} - {arm.name for arm in selection.target.arms}
    places = [
        (entry, entry.arm)
        for entry in records.entries(tier, source.name)
        if entry.arm not in others
    ]
    for arm, (home, name) in source.shared.items():
        entries = [entry for entry in records.entries(tier, home.name) if entry.arm == name]
        if needs_plan(source, selection.tier):
            planned = {f"seed-{seed}" for seed in source.scales[selection.tier].seeds}
            entries = [entry for entry in entries if entry.stem in planned]
        places += [(entry, arm) for entry in entries]
    return places


def _refuse(evidence: Evidence, path: Path, arm: str, reason: str) -> None:
    evidence.refused.append((path, reason))
    evidence.refused_arms.setdefault(arm, f"{path.name} refused: {reason}")


def _misplaced(record: Record, entry: Entry) -> list[str]:
    """Return why a record is not what its place says, a failed run among them."""
    name = f"seed-{record.seed}.json" if record.ok else f"seed-{record.seed}.failed-<n>.json"
    place = (record.tier, record.target, record.arm, f"seed-{record.seed}")
    if place != (entry.tier, entry.target, entry.arm, entry.stem) or record.ok != entry.finished:
        return [f"the record says it is {'/'.join([*place[:3], name])}, and lies elsewhere"]
    return []


def _reasons(selection: Selection, record: Record, arm: str, plans: Plans) -> list[str]:
    """Return why a record does not count, most basic reason first; one for a failed run."""
    if not record.ok:
        return violations(record)
    try:
        run = plan(selection.source, selection.tier, [record.seed], [arm])[0]
    except ValueError as error:
        return [str(error)]
    difference = config_difference(record, run) or plans.refusal(record)
    return [difference] if difference else violations(record, run)
