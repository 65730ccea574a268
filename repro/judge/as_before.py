"""Whether the values of new records are as they were in old ones, metric by metric.

The values of a metric are its seeds, or its timed repeats where the target declares them. Two
things must come together before a row is called regressed:

* **practice**: the change is beyond the threshold of the metric's unit: 5 % (seconds, tokens per
  second, ratios, nats), 1 % of bytes, 1 point of percents (they are shares of a time or of a
  memory; 3 points at the smoke tier), any change of a count that should stay the same;
* **statistics**: a one-sided t test with Holm's correction over the tested rows of one target.
  Ratios are tested on logarithms: noise of timings is in proportion. Where a seed draws something
  (at the systems tier a repeat of drawn lengths), those that both sides have are compared in pairs;
  else the test is Welch's.

Where both sides have fewer than three values (a peak of memory, which does not vary) there is no
test: a row has regressed if it is beyond the threshold and all new values are worse than all old
ones.

A metric without a better side describes a run. It is not compared at the systems tier; elsewhere
its row is `changed` where the difference, to either side, is shown and beyond the threshold.

Easy to get wrong: to read "not significant" as "as before". A row whose 95 % interval reaches
beyond the threshold is `unclear`, not `unchanged`: its noise could hide the loss that is looked
for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal, get_args

from repro.evidence.origins import devices_of, mixed_sources
from repro.evidence.record import Record, run_settings
from repro.evidence.verdicts.sizes import Pair
from repro.evidence.verdicts.statistics import MINIMUM_REPEATS, difference, holm
from repro.judge.gathering import Evidence, values_of
from repro.run.select import Selection
from repro.spec.claim import ALPHA, BETTER_OF_UNIT, Better, Metric
from repro.spec.config import digest_of
from repro.spec.target import Target
from repro.spec.tier import PLANNED, Tier

Records = Mapping[str, Mapping[int, Record]]
Samples = Mapping[Pair, float]
RowVerdict = Literal["regressed", "changed", "unclear", "improved", "unchanged"]

VERDICTS: tuple[RowVerdict, ...] = get_args(RowVerdict)
# Those that show that a value is not as good as it was, or not the same where none is better.
WORSE: tuple[RowVerdict, ...] = ("regressed", "changed")
# Units whose values are compared by their difference, with the threshold in that unit.
ABSOLUTE_THRESHOLDS = {"percent": 1.0, "points": 1.0, "rows": 0.0}
# Sums in another order, on another processor, flip near-ties even where nothing is drawn.
SMOKE_THRESHOLDS = {"percent": 3.0, "points": 3.0}
# Fractions of the old value.
RELATIVE_THRESHOLDS = {"bytes": 0.01}
OTHER_THRESHOLD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two sets of records of a target, those that are usable by arm and seed.

    Sentences call them by `name`: where they are from. There is a problem, a sentence, for each
    record that is refused, failed or cannot be read.
    """

    name: str
    records: Records = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def every(self) -> list[Record]:
        """Return the usable records."""
        return [record for by_seed in self.records.values() for record in by_seed.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One metric of one arm, old against new.

    Attributes
    ----------
    old, new
        Raw values: of each seed, or of each timed repeat.
    relative
        Whether `change`, `low`, `high` and `threshold` are fractions of the old value (0.05 is
        5 %) or differences in the metric's unit.
    change, low, high
        New against old, with the 95 % interval, not corrected for the number of rows; None where
        nothing shows a spread.
    p_worse, p_better
        One-sided p that the new values are worse (better), after Holm's correction. Where no side
        is better, `p_worse` is two-sided and `p_better` 1.
    """

    target: str
    arm: str
    metric: str
    unit: str
    better: Better
    old: tuple[float, ...]
    new: tuple[float, ...]
    relative: bool
    threshold: float
    change: float
    low: float | None = None
    high: float | None = None
    p_worse: float | None = None
    p_better: float | None = None
    verdict: RowVerdict = "unchanged"

    @property
    def loss(self) -> float:
        """The change, positive where the new values are worse."""
        return self._loss(self.change)

    @property
    def worst_loss(self) -> float:
        """The end of the interval on the worse side; the loss itself without an interval."""
        ends = (self.change if end is None else end for end in (self.low, self.high))
        return max(map(self._loss, ends))

    def _loss(self, change: float) -> float:
        if self.better == "neither":
            return abs(change)
        return change if self.better == "lower" else -change


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rows of one target at one tier; problems say why it was not, or not wholly, judged."""

    old: Side
    new: Side
    rows: tuple[MetricRow, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def worse(self) -> list[MetricRow]:
        """The rows that are shown not to be as before."""
        return [row for row in self.rows if row.verdict in WORSE]

    def counts(self) -> dict[RowVerdict, int]:
        """Return how many rows have each verdict that occurs."""
        found = Counter(row.verdict for row in self.rows)
        return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def by_severity(rows: Sequence[MetricRow]) -> list[MetricRow]:
    """Return the rows in the order of `VERDICTS`, the largest losses first."""
    return sorted(rows, key=lambda row: (VERDICTS.index(row.verdict), -_severity(row)))


def _severity(row: MetricRow) -> float:
    """Return the loss in thresholds; of counts, whose threshold is 0, the loss itself.

    For an unclear row it is the loss that noise could hide.
    """
    loss = row.worst_loss if row.verdict == "unclear" else row.loss
    return loss / (row.threshold or 1.0)


def side_of(name: str, selection: Selection, evidence: Evidence) -> Side:
    """Return evidence as one side; arms that other targets record are left to those.

    Where learning is planned, a run that fails is a result like any other, and spoils nothing.
    """
    shared = selection.source.shared
    failed = [] if selection.tier in PLANNED else evidence.failed.values()
    spoilt = [
        f"{'/'.join(path.parts[-4:])} {what}: {why}"
        for what, items in (("is refused", evidence.refused), ("failed", failed))
        for path, why in items
    ]
    own = {arm: by_seed for arm, by_seed in evidence.records.items() if arm not in shared}
    return Side(name=name, records=own, problems=tuple(spoilt))


def compare(target: Target, tier: Tier, old: Side, new: Side) -> Comparison:
    """Judge the metrics of a target, arm by arm.

    Arms that another target records are left to that target. At the smoke tier nothing belongs to
    a named machine, so that times and bytes are not judged there.
    """
    problems = list(_not_comparable(target, tier, old, new))
    if problems:
        return Comparison(old=old, new=new, problems=tuple(problems))
    values = list(_values(target, tier, old, new))
    rows = judged(target, tier, values)
    missing = [f"{arm}.{metric.name}" for arm, metric, before, after in values if not after]
    if missing:
        problems.append(
            f"{new.name} lacks {len(missing)} values of {target.name} that {old.name} has: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        )
    elif not rows:
        problems.append(f"{target.name}: {old.name} and {new.name} have no value in common")
    return Comparison(old=old, new=new, rows=rows, problems=tuple(problems))


def judged(
    target: Target, tier: Tier, values: Iterable[tuple[str, Metric, Samples, Samples]]
) -> tuple[MetricRow, ...]:
    """Return the rows of values, (arm, metric, old, new) each, where both sides have some."""
    rows = [_measured(target, tier, *one) for one in values if one[2] and one[3]]
    tested = [place for place, row in enumerate(rows) if row.p_worse is not None]
    worse = holm([rows[place].p_worse or 0.0 for place in tested])
    better = holm([rows[place].p_better or 0.0 for place in tested])
    for place, p_worse, p_better in zip(tested, worse, better, strict=True):
        rows[place] = replace(rows[place], p_worse=p_worse, p_better=p_better)
    return tuple(replace(row, verdict=_verdict(row)) for row in rows)


def _not_comparable(target: Target, tier: Tier, old: Side, new: Side) -> Iterator[str]:
    for side in (new, old):
        where = f"{target.name} at the {tier.value} tier, {side.name}"
        if side.problems:
            more = f" (and {len(side.problems) - 1} more)" if len(side.problems) > 1 else ""
            yield f"{where}: {side.problems[0]}{more}"
        elif not side.every():
            yield f"{where}: there is no record"
        elif tier is Tier.SYSTEMS:
            mixed = mixed_sources(side.every(), several=False)
            if mixed:
                yield f"{where}: {mixed}"
        if side is new and not new.every():
            return
    if not old.every() or not new.every():
        return
    devices = [sorted(map(str, devices_of(side.every()))) for side in (old, new)]
    # Where seeds are compared in pairs, both of a pair are of one kind of device.
    several = tier is Tier.SYSTEMS and len(devices[0]) > 1
    if tier is not Tier.SMOKE and (devices[0] != devices[1] or several):
        yield (
            f"{target.name} at the {tier.value} tier: records of {', '.join(devices[0])} and of "
            f"{', '.join(devices[1])} are not compared; needs one kind of device"
        )
    for arm in sorted(old.records.keys() & new.records.keys()):
        of_arm = [record for side in (old, new) for record in side.records[arm].values()]
        digests = {digest_of(run_settings(record.config) | {"seed": None}) for record in of_arm}
        if len(digests) > 1:
            yield (
                f"{target.name} at the {tier.value} tier: the records of {arm} are of "
                f"{len(digests)} configurations ({old.name}, {new.name}); needs one"
            )


def _values(
    target: Target, tier: Tier, old: Side, new: Side
) -> Iterator[tuple[str, Metric, Samples, Samples]]:
    """Yield (arm, metric, old values, new values) wherever either side has some."""
    timed = target.timed_repeats > 0
    for arm in target.arms:
        if arm.name in target.shared:
            continue
        for metric in target.metrics_at(tier):
            described = tier is Tier.SYSTEMS and metric.direction() == "neither"
            if described or (tier is Tier.SMOKE and metric.unit in BETTER_OF_UNIT):
                continue
            before, after = (
                values_of(side.records.get(arm.name, {}), metric.name, timed=timed)
                for side in (old, new)
            )
            if before or after:
                yield arm.name, metric, before, after


def _measured(
    target: Target, tier: Tier, arm: str, metric: Metric, before: Samples, after: Samples
) -> MetricRow:
    """Return a row with its change, interval and uncorrected p values, not judged yet."""
    points = getattr(target.scales[tier], "points", ())
    drawn = tuple(p.name for p in points if getattr(p, "lengths", "full") != "full")
    same_work = tier is Tier.SYSTEMS and not metric.name.endswith(drawn)
    both = [] if same_work else sorted(before.keys() & after.keys())
    paired = len(both) >= MINIMUM_REPEATS
    if paired:
        before, after = ({pair: side[pair] for pair in both} for side in (before, after))
    old, new = tuple(before.values()), tuple(after.values())
    absolute = ABSOLUTE_THRESHOLDS | (SMOKE_THRESHOLDS if tier is Tier.SMOKE else {})
    threshold = absolute.get(metric.unit)
    relative = threshold is None and min(*old, *new) > 0
    if threshold is None:
        threshold = RELATIVE_THRESHOLDS.get(metric.unit, OTHER_THRESHOLD)
        # Values that may be zero have no ratio; their threshold is in their own unit.
        threshold *= 1.0 if relative else abs(fmean(old))
    form, back = (math.log, math.expm1) if relative else (float, float)
    change = difference(list(map(form, old)), list(map(form, new)), paired=paired)
    better = metric.direction() or "neither"
    p_worse, p_better = change.p_above, change.p_below
    if better == "higher":
        p_worse, p_better = p_better, p_worse
    elif better == "neither" and p_worse is not None and p_better is not None:
        p_worse, p_better = min(1.0, 2 * min(p_worse, p_better)), 1.0
    return MetricRow(
        target=target.name,
        arm=arm,
        metric=metric.name,
        unit=metric.unit,
        better=better,
        old=old,
        new=new,
        relative=relative,
        threshold=threshold,
        change=back(change.value),
        low=None if change.low is None else back(change.low),
        high=None if change.high is None else back(change.high),
        p_worse=p_worse,
        p_better=p_better,
    )


def _verdict(row: MetricRow) -> RowVerdict:
    """Return a row's verdict by its threshold, and by its p values or, without a test, the ends."""
    above, below = min(row.new) > max(row.old), max(row.new) < min(row.old)
    is_worse, is_better = (above, below) if row.better == "lower" else (below, above)
    if row.better == "neither":
        is_worse, is_better = above or below, False
    if row.p_worse is not None and row.p_better is not None:
        is_worse, is_better = row.p_worse < ALPHA, row.p_better < ALPHA
    if row.loss > row.threshold and is_worse:
        return "changed" if row.better == "neither" else "regressed"
    if -row.loss > row.threshold and is_better:
        return "improved"
    return "unclear" if row.worst_loss > row.threshold else "unchanged"
