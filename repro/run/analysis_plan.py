"""The analysis plan, fixed before the runs: claims, metrics, statistics, seeds and scale.

At the mini tier every record of learning carries the digest of the analysis plan of each target
that reads it. `check` refuses a record that carries none, or a plan that nobody kept. One whose
plan was kept and is no longer the target's is judged by today's rules on the seeds that *its* plan
names, and every verdict that those rules change is labelled post hoc. So no claim, margin, size,
metric, seed or arm can be exchanged after the numbers are known without the page saying so, and
neither can the code that judges: a plan holds what it makes of fixed cases
(`repro.evidence.verdicts.rules`). Wording (labels, statements, reasons) is not part of a plan.

`run` writes the plans beside the records before the first run starts (`<runs>/<tier>/plans/`), and
`bless` keeps the one that was written first as a line of `expected/plans.jsonl.xz`.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from repro.evidence.origins import PLAN_INPUT
from repro.evidence.plans import KeptPlan, keep_plans, parse_plan, read_plans
from repro.evidence.provenance import source_commit
from repro.evidence.record import Record
from repro.evidence.verdicts.rules import rules
from repro.evidence.verdicts.sizes import MINIMUM_DRAWS
from repro.run.select import Selection
from repro.spec.claim import Claim, planned
from repro.spec.config import RunConfig, digest_of
from repro.spec.settings import plain_values
from repro.spec.target import Target
from repro.spec.tier import PLANNED, Tier
from repro.spec.whole_files import write_new
from repro.targets import TARGETS, find


def analysis_plan(target: Target, tier: Tier) -> dict[str, Any]:
    """Return the plan of a target at a tier as JSON values."""
    source = target.runs
    content: dict[str, Any] = {
        "target": target.name,
        "version": target.version,
        "tier": tier.value,
        "claims": [planned(claim) for claim in target.claims],
        "metrics": {metric.name: metric.unit for metric in target.metrics_at(tier)},
        "arms": [_arm(source, arm.name) for arm in target.arms],
        "scale": plain_values(source.scales[tier]),
        "rules": rules(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain


def _arm(source: Target, name: str) -> dict[str, Any]:
    values = plain_values(source.arm(name))
    home, recorded = source.home(name)
    content: dict[str, Any] = {"recorded as": [home.name, recorded]}
    return content | {key: value for key, value in values.items() if key != "label"}


@functools.cache
def plan_digest(name: str, tier: Tier) -> str:
    """Return the SHA-256 of the plan of the target called `name`."""
    return digest_of(analysis_plan(find(name), tier))


def needs_plan(target: Target, tier: Tier) -> bool:
    """Whether a target's records must carry its plan: it learns something at a planned tier.

    A figure without claims that reads another target's runs asks nothing that could be planned.
    """
    source = target.runs
    asks = bool(target.claims) or target.records_of is None
    learns = asks and source.procedure in ("train", "dose")
    return tier in PLANNED and tier in source.scales and target in TARGETS and learns


@functools.cache
def _readers(home: str, arm: str, tier: Tier) -> tuple[str, ...]:
    """Return the names of the targets that read a run of a tier."""
    names = []
    for target in TARGETS:
        if needs_plan(target, tier):
            homes = [target.runs.home(item.name) for item in target.arms]
            if any((owner.name, name) == (home, arm) for owner, name in homes):
                names.append(target.name)
    return tuple(names)


def plan_inputs(run: RunConfig) -> dict[str, str]:
    """Return the digests that a run's record carries: the plan of each target that reads it."""
    tier = Tier(run.tier)
    readers = _readers(run.target, run.arm.name, tier)
    return {f"{PLAN_INPUT}{name}": plan_digest(name, tier) for name in readers}


class Plans:
    """The plans under which a selection's records may have been made: its own, and those kept."""

    def __init__(self, selection: Selection, kept: Mapping[str, KeptPlan]) -> None:
        self.selection = selection
        target, tier = selection.target, selection.tier
        self.key = f"{PLAN_INPUT}{target.name}"
        # Without a plan nothing is asked of records.
        self.present = plan_digest(target.name, tier) if needs_plan(target, tier) else ""
        self.by_digest: dict[str, Mapping[str, Any]] = {
            digest: item.plan
            for digest, item in kept.items()
            if (item.plan["target"], item.plan["tier"]) == (target.name, tier.value)
        }
        if self.present:
            self.by_digest[self.present] = analysis_plan(target, tier)

    def refusal(self, record: Record) -> str | None:
        """Return why a record was made under none of them, or None."""
        if not self.present:
            return None
        name, carried = self.selection.target.name, record.inputs.get(self.key)
        if carried is None:
            return f"it ran before {name} had an analysis plan"
        if carried not in self.by_digest:
            return f"it ran under another analysis plan of {name} ({carried[:12]})"
        seeds = self._seeds(carried)
        if record.seed not in seeds:
            return f"seed {record.seed} is not in the analysis plan of {name} ({list(seeds)})"
        return None

    def planned_seeds(self, records: Iterable[Record]) -> tuple[int, ...]:
        """Return the seeds that were planned: by the plans that the records carry, in order."""
        source, tier = self.selection.source, self.selection.tier
        if tier not in source.scales:
            return ()
        if not self.present:
            return source.planned_seeds(tier)
        carried = self.carried(records)
        return tuple(dict.fromkeys(seed for digest in carried for seed in self._seeds(digest)))

    def carried(self, records: Iterable[Record]) -> list[str]:
        """Return the digests that records carry, the present plan's where there are none."""
        digests = {digest for record in records if (digest := record.inputs.get(self.key))}
        return sorted(digests, key=lambda digest: digest == self.present) or [self.present]

    def post_hoc(self, claim: Claim, records: Iterable[Record]) -> str:
        """Return why a claim is not judged by rules fixed before the runs; empty where it is."""
        if not self.present:
            return ""
        carried = self.carried(records)
        late = [digest[:12] for digest in carried if not self._is_stated(claim, digest)]
        plans = ", ".join(late)
        said = f"Post hoc: the plan of these runs ({plans}) has other rules or seeds"
        return said if late else ""

    def _seeds(self, digest: str) -> tuple[int, ...]:
        return tuple(self.by_digest[digest]["scale"]["seeds"])

    def _is_stated(self, claim: Claim, digest: str) -> bool:
        """Whether a plan states a claim and seeds as of today, and a family that is no smaller."""
        plan = self.by_digest[digest]
        today = [planned(item) for item in self.selection.target.claims]
        return (
            planned(claim) in plan["claims"]
            and self._seeds(digest) == self._seeds(self.present)
            and _family(plan["claims"], claim) <= _family(today, claim)
            and "rules" in plan
            and plan["rules"].items() <= rules().items()
        )


def _family(claims: Iterable[Mapping[str, Any]], claim: Claim) -> int:
    """Return how many planned claims are corrected together with a claim."""
    return sum(
        item.get("mechanism", False) is claim.mechanism
        and not item.get("confounded")
        and item.get("draws", MINIMUM_DRAWS) >= MINIMUM_DRAWS
        for item in claims
    )


def write_plans(runs: Sequence[RunConfig], folder: Path) -> list[Path]:
    """Write the plans of all targets that read `runs`, unless they are there; return new paths."""
    read = {(key.removeprefix(PLAN_INPUT), run.tier) for run in runs for key in plan_inputs(run)}
    written = []
    for name, of_tier in sorted(read):
        tier = Tier(of_tier)
        path = _plan_path(name, tier, plan_digest(name, tier), folder)
        # Another start may write it at the same time.
        with contextlib.suppress(FileExistsError):
            if not path.exists():
                written.append(write_new(path, present_plan(name, tier).to_text(indent=1)))
    return written


def keep_carried_plans(
    selection: Selection, records: Iterable[Record], runs: Path, expected: Path
) -> Path:
    """Keep the plans that records carry, each as it was first written down; return their file.

    Those of the figures that read the records are among them: they have no records of their own.
    The target's present plan is made now where nobody had written it down. In the folder `runs`
    of records, `run` wrote the plans beside them before the first of them began.
    """
    target, tier = selection.source, selection.tier
    kept = read_plans(expected)
    carried = {
        (key.removeprefix(PLAN_INPUT), digest)
        for record in records
        for key, digest in record.inputs.items()
        if key.startswith(PLAN_INPUT)
    }
    for name, digest in carried:
        path = _plan_path(name, tier, digest, runs)
        if digest not in kept and path.is_file():
            kept[digest] = parse_plan(path.read_text(encoding="utf-8"))
        elif digest not in kept and (name, digest) == (target.name, plan_digest(name, tier)):
            kept[digest] = present_plan(name, tier)
    return keep_plans(kept, expected)


def _plan_path(name: str, tier: Tier, digest: str, folder: Path) -> Path:
    return folder / tier.value / "plans" / f"{name}-{digest[:12]}.json"


def present_plan(name: str, tier: Tier) -> KeptPlan:
    """Return the present plan of the target called `name`, made now."""
    commit, dirty = source_commit()
    return KeptPlan(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        dirty=dirty,
        digest=plan_digest(name, tier),
        plan=analysis_plan(find(name), tier),
    )
