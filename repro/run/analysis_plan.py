"""What will be asked of the runs, fixed before they ran: claims, metrics, statistics, seeds, scale.

At the proxy tier every record carries the digest of the analysis plan of each target that reads it,
and `check` refuses a record for a target whose plan was another when it ran, or had not been made.
So no claim, margin, metric, seed or arm can be exchanged after the numbers are known without every
run being made again. Wording (labels, statements, reasons) is not part of a plan.

`run` writes the plans beside the records before the first run starts (`<runs>/proxy/plans/`), and
`bless` keeps the one that was written first as a line of `expected/plans.tsv`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from repro.evidence import verdict
from repro.evidence.origins import PLAN_INPUT
from repro.evidence.plans import KeptPlan, plan_line
from repro.evidence.provenance import source_commit
from repro.evidence.record import Record, write_new
from repro.run.select import Selection
from repro.spec.config import RunConfig, digest_of
from repro.spec.resolve import plain_values
from repro.spec.target import Target
from repro.spec.tier import Tier
from repro.targets import TARGETS, runs_of

STATISTICS = {
    "version": 1,
    "alpha": verdict.ALPHA,
    "minimum_pairs": verdict.MINIMUM_SEEDS,
    "interval": "Student's t, 95 %, of per-pair differences",
    "family": "Holm over the claims of a target; those about the machinery apart",
    "trend": "Page's L, exact; order: then adjacent pairs with Holm",
    "failed": "a failed seed takes `reproduced` away from the claims on its arm",
}


def analysis_plan(target: Target, tier: Tier) -> dict[str, Any]:
    """Return the plan of a target at a tier as JSON values."""
    source = runs_of(target)
    claims = [claim for claim in target.claims if claim.applies(tier)]
    wording = ("statement", "source", "because", "tiers")
    found: dict[str, Any] = {
        "target": target.name,
        "version": target.version,
        "tier": tier.value,
        "claims": [
            {key: value for key, value in plain_values(claim).items() if key not in wording}
            for claim in claims
        ],
        "metrics": {metric.name: metric.unit for metric in target.metrics},
        "arms": [_arm(source, name.name) for name in target.arms],
        "scale": plain_values(source.scales[tier]),
        "statistics": STATISTICS,
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def _arm(source: Target, name: str) -> dict[str, Any]:
    values = plain_values(source.arm(name))
    home, recorded = source.home(name)
    return {"recorded as": [home.name, recorded]} | {
        key: value for key, value in values.items() if key != "label"
    }


@functools.cache
def plan_digest(name: str, tier: Tier) -> str:
    """Return the SHA-256 of the plan of the target called `name`."""
    (target,) = (item for item in TARGETS if item.name == name)
    return digest_of(analysis_plan(target, tier))


def needs_plan(target: Target, tier: Tier) -> bool:
    """Whether a target's records must carry its plan: it learns something at the proxy tier.

    A figure without claims that reads another target's runs asks nothing that could be planned.
    """
    source = runs_of(target) if target in TARGETS else target
    asks = bool(target.claims) or target.records_of is None
    learns = asks and source.procedure in ("train", "entropy", "finetune")
    return tier is Tier.PROXY and target in TARGETS and learns


@functools.cache
def _readers(home: str, arm: str) -> tuple[str, ...]:
    """Return the names of the targets that read a run."""
    found = []
    for target in TARGETS:
        source = runs_of(target)
        if needs_plan(target, Tier.PROXY) and Tier.PROXY in source.scales:
            homes = [source.home(item.name) for item in target.arms]
            if any((owner.name, name) == (home, arm) for owner, name in homes):
                found.append(target.name)
    return tuple(found)


def plan_inputs(run: RunConfig) -> dict[str, str]:
    """Return what a run's record carries: the digest of the plan of each target that reads it."""
    if run.tier != Tier.PROXY.value:
        return {}
    return {
        f"{PLAN_INPUT}{name}": plan_digest(name, Tier.PROXY)
        for name in _readers(run.target, run.arm.name)
    }


def plan_refusal(selection: Selection, record: Record) -> str | None:
    """Return why a record was not made under the plan of the selection's target, or None."""
    target, tier = selection.target, selection.tier
    if not needs_plan(target, tier):
        return None
    found = record.inputs.get(f"{PLAN_INPUT}{target.name}")
    if found is None:
        return f"it ran before {target.name} had an analysis plan"
    if found != plan_digest(target.name, tier):
        return f"it ran under another analysis plan of {target.name} ({found[:12]})"
    seeds = selection.source.scales[tier].seeds
    if record.seed not in seeds:
        return f"seed {record.seed} is not in the analysis plan of {target.name} ({list(seeds)})"
    return None


def write_plans(runs: Sequence[RunConfig], folder: Path) -> list[Path]:
    """Write the plans of all targets that read `runs`, unless they are there; return new paths."""
    names = {key.removeprefix(PLAN_INPUT) for run in runs for key in plan_inputs(run)}
    written = []
    for name in sorted(names):
        path = _plan_path(name, folder)
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        (target,) = (item for item in TARGETS if item.name == name)
        written.append(write_new(path, plan_text_of(target, Tier.PROXY)))
    return written


def earliest_plan(
    target: Target, runs: Path, kept: Iterable[KeptPlan], device: str | None
) -> KeptPlan:
    """Return the target's present plan as it was first written down.

    Parameters
    ----------
    runs
        The folder of records; `run` wrote the plan beside them before the first of them began.
    kept
        The plans among the expectations.
    device
        The kind of device that made the records.

    Returns
    -------
    KeptPlan
        Of those that hold the plan (by its digest) the one made first; a new one if none does.
    """
    digest, path = plan_digest(target.name, Tier.PROXY), _plan_path(target.name, runs)
    place = (target.name, Tier.PROXY.value, device or "")
    known = [item for item in kept if (item.target, item.tier, item.device) == place]
    if path.is_file():
        known.append(_kept(json.loads(path.read_text(encoding="utf-8")), place))
    same = [item for item in known if item.digest == digest]
    if same:
        return min(same, key=lambda item: item.time)
    return _kept(json.loads(plan_text_of(target, Tier.PROXY)), place)


def _kept(written: dict[str, Any], place: tuple[str, str, str]) -> KeptPlan:
    target, tier, device = place
    return KeptPlan(
        target=target,
        tier=tier,
        device=device,
        made=written["made"],
        commit=written["commit"],
        dirty=json.dumps(written["dirty"]),
        digest=written["digest"],
        plan=plan_line(written["plan"]),
    )


def _plan_path(name: str, folder: Path) -> Path:
    digest = plan_digest(name, Tier.PROXY)
    return folder / Tier.PROXY.value / "plans" / f"{name}-{digest[:12]}.json"


def plan_text_of(target: Target, tier: Tier) -> str:
    """Return the plan with its digest, the time and the commit, as a file's text."""
    commit, dirty = source_commit()
    value = {
        "digest": plan_digest(target.name, tier),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "plan": analysis_plan(target, tier),
    }
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
