"""Check: from records and expectations to verdicts. Runs nothing and does not need torch.

`repro.judge.gathering` reads the records and refuses those that are not evidence. Compared arms
must have had the same inputs. Then each claim and expectation gets a verdict on the planned seeds;
a planned seed without a record counts as failed. At the smoke tier only claims about this suite's
machinery are judged.

The exit status is 1 for a fault of this suite (a record is refused, a claim about its machinery is
contradicted) and for what is worse than in the blessed records of the same kind of device: a value
by the rule of `repro.judge.as_before`, or a bar that was met there and is missed now. It is 2 if a
named target has no record. All else is a finding and leaves the status at 0: a contradicted claim
of the paper, and a bar that was missed before or has no blessed verdict. At the smoke tier, where
bars say whether the machinery works at all, one without a blessed verdict counts as met before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.evidence import not_run
from repro.evidence.origins import CHANGED, mixed_devices
from repro.evidence.paper import paper_cells
from repro.evidence.plans import read_plans
from repro.evidence.store import Blessed, RunsFolder, Source, source_of
from repro.evidence.verdicts.claim_verdicts import judge, undecided
from repro.evidence.verdicts.expectation import Expectation, load_bars
from repro.evidence.verdicts.statistics import wilson_interval
from repro.evidence.verdicts.verdict import (
    EXPLORATORY,
    MINIMUM_SEEDS,
    MIXED_VERSIONS,
    ONE_PROCESS,
    POST_HOC,
    Status,
    Verdict,
    judge_expectation,
    marked,
)
from repro.judge.as_before import Comparison, MetricRow, by_severity, compare, side_of
from repro.judge.gathering import Evidence, gather
from repro.run.analysis_plan import Plans
from repro.run.places import absence_text
from repro.run.select import Selection
from repro.spec.claim import Claim
from repro.spec.config import TrainScale
from repro.spec.tier import SMOKE_SEEDS, Tier
from repro.targets import TARGETS

# What arms may be compared with several versions of, and marked.
LIBRARIES = ("torch", "triton", "transformers")
_UNSTATED = (
    "Exploratory: no target states these settings, so nothing fixed the claims before the runs"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A selection with its evidence and verdicts.

    `lacking` is a sentence with the folder that has no records; None if there are any, even failed
    ones. `as_before` compares the values with those blessed on the same kind of device; None where
    nothing is blessed, and of blessed records themselves.
    """

    selection: Selection
    evidence: Evidence
    verdicts: list[Verdict]
    lacking: str | None = None
    as_before: Comparison | None = None

    def statements(self) -> Iterator[tuple[Claim, Verdict]]:
        """Yield each claim, including those about the machinery, with its verdict."""
        claims = {claim.name: claim for claim in self.selection.target.claims}
        for verdict in self.verdicts:
            if verdict.about in ("claim", "mechanism"):
                yield claims[verdict.name], verdict

    @property
    def worse(self) -> list[Verdict | MetricRow]:
        """Bars that were met before and are missed, and values that are not as before."""
        values = by_severity(self.as_before.worse) if self.as_before else []
        return [*(verdict for verdict in self.verdicts if verdict.worse), *values]

    @property
    def faulty(self) -> bool:
        """Whether something is at fault or worse than before."""
        own_fault = any(item.own_fault for item in self.verdicts)
        return own_fault or bool(self.evidence.refused or self.worse)

    @property
    def sound(self) -> bool:
        """Whether there are records, and nothing is at fault or worse than before."""
        return self.lacking is None and not self.faulty


def exit_status(checks: Sequence[Checked]) -> int:
    """Return 1 for a fault or what is worse than before, 2 where records are lacking, else 0."""
    if any(item.faulty for item in checks):
        return 1
    return 0 if all(item.sound for item in checks) else 2


def check_selection(selection: Selection, runs: Path | Source, expected: Path) -> Checked:
    """Return the verdicts of a selection on the records of a folder or another source."""
    source = source_of(runs)
    evidence = gather(selection, source, expected)
    place = source.place(selection.tier.value, selection.source.name)
    verdicts = _verdicts(selection, evidence, place, expected)
    lacking = _lacking(selection, evidence, source, place)
    earlier, as_before = verdicts, None
    if not isinstance(source, Blessed):
        stored = None if lacking else stored_evidence(selection, evidence.device, expected)
        earlier = [] if stored is None else _verdicts(selection, stored, place, expected)
        if stored is not None:
            old = side_of("blessed records", selection, stored)
            new = side_of(str(place), selection, evidence)
            as_before = compare(selection.source, selection.tier, old, new)
    before = {(v.name, v.source): v.status for v in earlier if v.status != "not run"}
    otherwise: Status | None = "reproduced" if selection.tier is Tier.SMOKE else None
    return Checked(
        selection=selection,
        evidence=evidence,
        verdicts=[
            dataclasses.replace(v, before=before.get((v.name, v.source), otherwise))
            if v.is_bar
            else v
            for v in verdicts
        ],
        lacking=lacking,
        as_before=as_before,
    )


def stored_evidence(selection: Selection, device: str | None, expected: Path) -> Evidence | None:
    """Return what is blessed of a selection on a kind of device; None where nothing is.

    The smoke tier's records belong to no device.
    """
    device = None if selection.tier is Tier.SMOKE else device
    stored = gather(selection, Blessed(expected, selection.tier.value, device), expected)
    return stored if stored.count or stored.refused else None


def _verdicts(
    selection: Selection, evidence: Evidence, place: Path, expected: Path
) -> list[Verdict]:
    """Return the verdicts on the target's claims, then on bars and the paper's values.

    Arms that must not be compared are added to what is refused, under `place`.
    """
    target = selection.target
    absent = _absent_arms(selection, evidence)
    lost = {arm.name: evidence.lost(arm.name) for arm in target.arms}
    metrics = {metric.name: metric for metric in target.metrics}  # at a tier without a scale, too
    plans = Plans(selection, read_plans(expected))
    judged = judge(
        target.claims,
        metrics,
        {name: evidence.values(name) for name in metrics},
        absent,
        lost,
        settled=_settled(selection, evidence, absent, place),
        fewest=SMOKE_SEEDS if selection.tier is Tier.SMOKE else MINIMUM_SEEDS,
        timed=evidence.timed,
    )
    ordered = []
    for claim, verdict in zip(target.claims, judged, strict=True):
        marks = {
            POST_HOC: plans.post_hoc(claim, evidence.every_record()),
            EXPLORATORY: "" if selection.source in TARGETS else _UNSTATED,
            CHANGED: evidence.changed(claim.arms),
            MIXED_VERSIONS: mixed_versions(claim, evidence),
            ONE_PROCESS: _one_process(claim, evidence),
        }
        ordered.append(marked(_with_caveat(selection, claim, evidence, verdict), marks))
    for expectation in _expectations(selection, evidence.device, expected):
        verdict = judge_expectation(
            expectation,
            target.metric(expectation.metric),
            evidence.values(expectation.metric).get(expectation.arm, {}),
            absent.get(expectation.arm),
            lost[expectation.arm],
        )
        arm = [expectation.arm]
        runs = evidence.records.get(expectation.arm, {}).values()
        late = expectation.late(record.started for record in runs)
        marks = {POST_HOC: late, CHANGED: evidence.changed(arm)}
        ordered.append(marked(_explained(verdict, expectation.metric, arm, evidence), marks))
    return ordered


def _settled(
    selection: Selection, evidence: Evidence, absent: Mapping[str, str], place: Path
) -> dict[str, Verdict]:
    """Return the verdicts on claims that no test decides, by name.

    Those whose arms must not be compared, and at the smoke tier the paper's.
    """
    settled = {}
    for claim in selection.target.claims:
        metric = selection.target.metric(claim.metric)
        recorded = not set(claim.arms) & set(absent)
        mismatch = _mismatch(selection, claim, evidence) if recorded else None
        if mismatch is not None:
            evidence.refused.append((place, mismatch))
            settled[claim.name] = undecided(claim, metric, "not run", f"refused: {mismatch}")
        elif selection.tier is Tier.SMOKE and not claim.mechanism:
            sentence = "the smoke tier judges the machinery alone"
            settled[claim.name] = undecided(claim, metric, "not addressed", sentence)
    return settled


def mixed_versions(claim: Claim, evidence: Evidence) -> str:
    """Return the libraries of which the arms of a seed had several versions, or empty."""
    by_arm = [evidence.records.get(arm, {}) for arm in claim.arms]
    found: dict[str, str] = {}
    for seed in sorted(set.intersection(*map(set, by_arm))):
        packages = [of[seed].environment.get("packages") or {} for of in by_arm]
        for name in LIBRARIES:
            versions = sorted({str(item.get(name)) for item in packages})
            if len(versions) > 1:
                found.setdefault(name, f"{name} {' and '.join(versions)}")
    return f"Mixed versions: {', '.join(found.values())}" if found else ""


def _one_process(claim: Claim, evidence: Evidence) -> str:
    """Return which arms' repeats were timed by a single process each, or empty."""
    # Seeds that are timed together have a record each, and one beginning.
    runs = {arm: evidence.records.get(arm, {}).values() for arm in claim.arms}
    begun = {
        arm: {r.started for r in own if r.facts.get("repeats_together", evidence.timed)}
        for arm, own in runs.items()
    }
    single = [arm for arm, times in begun.items() if len(times) == 1]
    return f"Within one process: one timed all repeats of {', '.join(single)}" if single else ""


def _lacking(selection: Selection, evidence: Evidence, records: Source, place: Path) -> str | None:
    """Return a sentence with the folder that has no record of the selection; else None."""
    if evidence.count or evidence.refused or evidence.failed:
        return None
    source, tier = selection.source, selection.tier
    reason = source.not_runnable(tier) if tier not in source.scales else None
    what = f"no record of {selection.target.name} at the {tier.value} tier"
    runs = place.parents[1]
    text = f"{what}: {reason or absence_text(runs, place)}"
    if isinstance(records, RunsFolder) and records.targets():
        text += f"; what there is: python -m repro check --runs {runs}"
    return text


def _absent_arms(selection: Selection, evidence: Evidence) -> dict[str, str]:
    """Return a sentence for every arm without usable records."""
    absent = dict(evidence.refused_arms)
    missing = None if evidence.count else selection.source.not_runnable(selection.tier)
    for arm in selection.target.arms:
        if arm.name in absent or evidence.records.get(arm.name):
            continue
        reasons = [why for (name, _), (_, why) in evidence.failed.items() if name == arm.name]
        if reasons:
            absent[arm.name] = f"all {len(reasons)} run(s) of {arm.name} failed ({reasons[-1]})"
        else:
            absent[arm.name] = missing or f"{arm.name} has no record at this tier yet"
    return absent


def _mismatch(selection: Selection, claim: Claim, evidence: Evidence) -> str | None:
    """Return why the arms of a claim must not be compared, or None."""
    if not {"learning_rate", "learning_rate_factor"} & set(claim.factor):
        rates = learning_rates(selection, claim)
        if len(set(rates.values())) > 1:
            return f"claim {claim.name} compares arms at different learning rates: {rates}"
    other_inputs = _other_inputs(claim, evidence)
    if other_inputs or selection.tier is Tier.SMOKE:  # the smoke tier runs on CPUs only
        return other_inputs
    # The card's arithmetic and speed would be part of the difference.
    records = [record for arm in claim.arms for record in evidence.records[arm].values()]
    mixed = mixed_devices(records)
    return mixed and f"claim {claim.name}: {mixed}"


def _other_inputs(claim: Claim, evidence: Evidence) -> str | None:
    """Return a sentence on the first seed whose arms had different inputs, or None."""
    factor = set(claim.factor)
    factor |= {"checkpoint_files"} if "checkpoint" in factor else set()
    for seed in sorted(set.intersection(*(set(evidence.records[arm]) for arm in claim.arms))):
        inputs = [evidence.records[arm][seed].inputs for arm in claim.arms]
        for key in set.intersection(*(set(item) for item in inputs)) - factor:
            if len({item[key] for item in inputs}) > 1:
                return (
                    f"claim {claim.name}: in seed {seed} the arms {', '.join(claim.arms)} had "
                    f"different {key.replace('_', ' ')}"
                )
    return None


def learning_rates(selection: Selection, claim: Claim) -> dict[str, float]:
    """Return the learning rate of each trained arm of a claim; empty if none is trained."""
    scale = selection.source.scales.get(selection.tier)
    if not isinstance(scale, TrainScale):
        return {}
    arms = [selection.source.arm(name) for name in claim.arms]
    rates = scale.optimizer.learning_rates
    return {arm.name: rates.of(arm) for arm in arms if arm.training != "none"}


def _with_caveat(
    selection: Selection, claim: Claim, evidence: Evidence, verdict: Verdict
) -> Verdict:
    """Add to a verdict why the claim was not run, or that the arms' learning rates differed."""
    if verdict.status == "not run":
        return _explained(verdict, claim.metric, claim.arms, evidence)
    rates = learning_rates(selection, claim)
    stated = verdict.status == "not addressed" or "learning_rate_factor" in claim.factor
    if stated or len(set(rates.values())) < 2:
        return verdict
    listed = ", ".join(f"{arm} {rate:g}" for arm, rate in rates.items())
    sentence = f"{verdict.sentence}. The arms' learning rates differ, too: {listed}"
    return dataclasses.replace(verdict, sentence=sentence)


def _explained(verdict: Verdict, metric: str, arms: Sequence[str], evidence: Evidence) -> Verdict:
    """Return a verdict that was not run for lack of a metric, with the records' own reasons."""
    recorded = {arm: evidence.records.get(arm, {}) for arm in arms}
    if verdict.status != "not run" or not all(recorded.values()):
        return verdict
    sentences = {
        f"{arm}, {sentence}"
        for arm, by_seed in recorded.items()
        for record in by_seed.values()
        if record.value(metric) is None and (sentence := not_run.reason(record, metric)) is not None
    }
    return dataclasses.replace(verdict, sentence="; ".join(sorted(sentences)) or verdict.sentence)


def _expectations(selection: Selection, device: str | None, expected: Path) -> list[Expectation]:
    """Return the bars of a selection and, at the paper tier, the paper's values."""
    target, tier = selection.target, selection.tier
    expectations = load_bars(expected, tier.value, target.name, device)
    if tier is Tier.PAPER and target.headline:
        known = {metric.name for metric in target.metrics_at(tier)}
        names = {"accuracy": target.headline}  # of others, that of their test set
        for cell in paper_cells(expected, target.paper_file):
            metric = names.get(cell.quantity, f"accuracy_{cell.quantity.lower()}")
            if cell.column == target.paper_column and cell.arm and cell.items and metric in known:
                value, items = cell.value, cell.items
                low, high = wilson_interval(value / 100 * items, items)
                because = f"{cell.place}: {value}, with Wilson's 95 % interval on {items} problems"
                bar = Expectation(
                    arm=cell.arm,
                    metric=metric,
                    accept=(100 * low, 100 * high),
                    source="paper",
                    because=because,
                )
                expectations.append(bar)
    return [item for item in expectations if item.arm in {arm.name for arm in target.arms}]


def checked_json(checked: Checked) -> dict[str, Any]:
    """Return a check's result as JSON values; of values as before, the rows not unchanged."""
    evidence, compared = checked.evidence, checked.as_before
    rows = by_severity(compared.rows) if compared else []
    rows = [row for row in rows if row.verdict != "unchanged"]
    return {
        "target": checked.selection.target.name,
        "tier": checked.selection.tier.value,
        "records": evidence.count,
        "sound": checked.sound,
        "refused": [{"record": str(path), "because": why} for path, why in evidence.refused],
        "failed": [{"record": str(path), "because": why} for path, why in evidence.failed.values()],
        "verdicts": [dataclasses.asdict(verdict) for verdict in checked.verdicts],
        "as_before": None
        if compared is None
        else {
            "counts": compared.counts(),
            "rows": [dataclasses.asdict(row) for row in rows],
            "problems": list(compared.problems),
        },
    } | ({"reason": checked.lacking} if checked.lacking else {})
