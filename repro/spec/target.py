"""Targets: one table or figure of the paper, stated so that a machine can say whether it holds.

A `Target` names its **arms** (the rows that the paper compares), its **scales** (how large each
tier of hardware runs them), its **metrics** and its **claims** (how the arms relate through the
metrics). `plan` turns a target and a tier into runs.

Claims contain no numbers except margins, each with its reason; expected values are separate
(`repro.evidence.verdicts.expectation`). A claim that compares arms declares the factors in which
they may differ, and a target whose arms differ in anything else cannot be built. This prevents
confounded comparisons as in the released scripts (NVFP4 on GSM8K at one learning rate against BF16
on BigMath at another).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from repro.spec.arm import Arm
from repro.spec.checks import require, unknown
from repro.spec.claim import Claim, Metric
from repro.spec.config import RunConfig
from repro.spec.needs import Needs, needs_of_checkpoint
from repro.spec.tier import REAL_CHECKPOINTS, SMOKE_SEEDS, Tier, cuda_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One table or figure of the paper.

    Attributes
    ----------
    version
        Changes with the meaning of a metric, an arm or a scale; part of every run's digest.
    procedure
        The procedure for arms that train (`train`) or measure (`throughput`, ...). In a target
        that trains, arms with training `none` are evaluated instead.
    timed_repeats
        0: the spread of a value is that between seeds. Above 0: every run times a deterministic
        workload at least this often, and verdicts and `bless` use the repeats in place of seeds. A
        record has them as series with the names of the metrics.
    scales
        How large each tier runs it. A tier without a scale yields `not run`, with `why_not`.
    needs
        Requirements of runs at a tier; for published checkpoints computed from the scale
        (`needs_at`).
    records_of
        The target whose runs this one reads, if a figure draws a table's runs.
    shared
        {arm: (target, its arm)} for arms that are run and recorded by another target: the same arm
        except for name and label, at the same scale except for the seeds.
    headline
        Metric printed beside the paper's cells.
    why_not
        Why it cannot run yet, for a target without scales.
    paper_file, paper_column
        File under `expected/paper/` with the paper's cells, and the column that corresponds to the
        scale of the `paper` tier.
    """

    name: str
    version: int = 1
    title: str
    statement: str
    source: str
    procedure: str = "train"
    arms: tuple[Arm, ...] = ()
    timed_repeats: int = 0
    scales: Mapping[Tier, Any] = field(default_factory=dict)
    needs: Mapping[Tier, Needs] = field(default_factory=dict)
    metrics: tuple[Metric, ...] = ()
    claims: tuple[Claim, ...] = ()
    headline: str | None = None
    records_of: Target | None = None
    shared: Mapping[str, tuple[Target, str]] = field(default_factory=dict)
    why_not: str = ""
    paper_file: str = ""
    paper_column: str = ""

    def __post_init__(self) -> None:
        where = f"target {self.name}"
        require(self.name.isidentifier(), f"{where}: the name must be a Python identifier")
        _require_unique(f"{where}: arms", [arm.name for arm in self.arms])
        _require_unique(f"{where}: metrics", [metric.name for metric in self.metrics])
        _require_unique(f"{where}: claims", [claim.name for claim in self.claims])
        arm_names = {arm.name for arm in self.arms}
        metric_names = {metric.name for metric in self.metrics}
        require(
            self.headline is None or self.headline in metric_names,
            f"{where}: headline {self.headline} is not among its metrics",
        )
        for claim in self.claims:
            for name in claim.arms:
                require(
                    name in arm_names, f"{where}: claim {claim.name} names no arm of it: {name}"
                )
            require(
                claim.metric in metric_names,
                f"{where}: claim {claim.name} names no metric of it: {claim.metric}",
            )
            _require_declared_factor(self, claim)
        undeclared = set(self.scales) - set(self.needs) - set(REAL_CHECKPOINTS)
        require(
            not undeclared or self.records_of is not None,
            f"{where}: scales without `needs`: {_names(undeclared)}; only those of published "
            "checkpoints follow from the scale",
        )
        require(
            bool(self.scales) or bool(self.why_not) or self.records_of is not None,
            f"{where}: it has no scale and gives no reason; fill `why_not`",
        )

    def arm(self, name: str) -> Arm:
        """Return the arm called `name`; `ValueError` lists the arms otherwise."""
        known = {arm.name: arm for arm in self.arms}
        if name not in known:
            raise ValueError(f"target {self.name}: {unknown('arm', list(known), name)}")
        return known[name]

    def metric(self, name: str) -> Metric:
        """Return the metric called `name`."""
        known = {metric.name: metric for metric in self.metrics}
        require(name in known, f"target {self.name} has no metric {name!r}")
        return known[name]

    def metrics_at(self, tier: Tier) -> tuple[Metric, ...]:
        """Return the metrics of the target at a tier."""
        return tuple(metric for metric in self.metrics if tier in (metric.tiers or (tier,)))

    def home(self, arm: str) -> tuple[Target, str]:
        """Return the target, and its name of the arm, under which the runs of `arm` lie."""
        return self.shared.get(arm, (self, arm))

    @property
    def runs(self) -> Target:
        """The target whose runs are read: itself, or that of `records_of`."""
        return self if self.records_of is None else self.records_of

    def tiers(self) -> tuple[Tier, ...]:
        """Return the tiers with a scale, from the smallest."""
        return tuple(tier for tier in Tier if tier in self.scales)

    def planned_seeds(self, tier: Tier) -> tuple[int, ...]:
        """Return the seeds that are run and judged by default: those of the scale.

        At the smoke tier the first `SMOKE_SEEDS` of them.
        """
        seeds = tuple(self.scales[tier].seeds)
        return seeds[:SMOKE_SEEDS] if tier is Tier.SMOKE else seeds

    def needs_at(self, tier: Tier) -> Needs:
        """Return what runs at `tier` need."""
        return self.needs.get(tier) or needs_of_checkpoint(self.scales[tier])

    def not_runnable(self, tier: Tier) -> str | None:
        """Return a sentence saying why the target cannot run at `tier` here, or None."""
        if tier in self.scales:
            needed, found = getattr(self.scales[tier], "ranks", 1), len(cuda_devices())
            few = f"needs {needed} CUDA devices; found {found}" if found < needed > 1 else None
            return tier.missing() or few
        if self.why_not:
            return self.why_not
        return f"{self.name} has no scale at the {tier.value} tier yet"


def default_tier(target: Target) -> Tier:
    """Return the smallest tier of `target` that this machine can run without downloads.

    The smallest, so that a command without `--tier` does the same on most machines. If no tier can
    run here, the `ValueError` gives the reason for each.
    """
    reasons = []
    for tier in target.tiers():
        reason = lacking_here(target, tier)
        if reason is None:
            return tier
        reasons.append(f"{tier.value} {reason}")
    where = f"no tier of {target.name} runs here without being named" if reasons else target.name
    raise ValueError(f"{where}: {'; '.join(reasons) or target.why_not}")


def lacking_here(target: Target, tier: Tier) -> str | None:
    """Return what this machine lacks to run a target at a tier without downloads, or None."""
    absent = [item.name for item in target.needs_at(tier).downloads if not item.present()]
    return target.not_runnable(tier) or (f"would download {', '.join(absent)}" if absent else None)


def other_tiers(target: Target, taken: Tier) -> str | None:
    """Return a line on the other tiers of a target, or None if there are none."""
    others = [tier for tier in target.tiers() if tier is not taken]
    said = [f"--tier {tier.value} {lacking_here(target, tier) or 'runs here'}" for tier in others]
    chosen = f"{target.name}: the {taken.value} tier, since none was named"
    return f"{chosen}; {'; '.join(said)}." if said else None


def plan(
    target: Target,
    tier: Tier,
    seeds: int | Sequence[int] | None = None,
    arms: Iterable[str] | None = None,
) -> list[RunConfig]:
    """Return the runs of `target` at `tier`, all arms of one seed before the next seed.

    `seeds` is a number, counted from the scale's first, or a list; None takes the planned ones.
    `arms` are names, of the target whose runs are read; None takes all of the target, controls
    included.

    Raises `ValueError` if the target has no scale at the tier, an arm is unknown, or there is no
    seed.
    """
    source = target.runs
    if tier not in source.scales:
        offered = _names(source.scales) or "none"
        raise ValueError(
            f"{source.name} has no scale at the {tier.value} tier (it has: {offered})"
            + (f"; {source.why_not}" if source.why_not else "")
        )
    own = source.planned_seeds(tier)
    if isinstance(seeds, int):
        chosen = tuple(range(own[0], own[0] + seeds))
    else:
        chosen = tuple(own if seeds is None else seeds)
    require(bool(chosen), f"{source.name}: no seed to run; give 1 or more")
    require(min(chosen) >= 0, f"{source.name}: seed {min(chosen)} is negative; needs 0 or more")
    _require_unique(f"{source.name}: seeds", [str(seed) for seed in chosen])
    names = [arm.name for arm in target.arms] if arms is None else list(arms)
    return [_run_of(source, tier, name, seed) for seed in chosen for name in names]


def _run_of(target: Target, tier: Tier, arm_name: str, seed: int) -> RunConfig:
    """Return one run, under the name of the target that records it."""
    target.arm(arm_name)
    home, name = target.home(arm_name)
    arm = home.arm(name)
    untrained = home.procedure == "train" and arm.training == "none"
    return RunConfig(
        target=home.name,
        target_version=home.version,
        tier=tier.value,
        procedure="evaluate" if untrained else home.procedure,
        arm=arm,
        scale=home.scales[tier],
        seed=seed,
    )


def differing_fields(first: Any, second: Any) -> set[str]:
    """Return the fields in which two arms, or two scales, differ, names and labels aside."""
    names = {item.name for value in (first, second) for item in dataclasses.fields(value)}
    return {
        name
        for name in names - {"name", "label"}
        if getattr(first, name, None) != getattr(second, name, None)
    }


def _require_declared_factor(target: Target, claim: Claim) -> None:
    for one, other in itertools.combinations(claim.arms, 2):
        undeclared = differing_fields(target.arm(one), target.arm(other)) - set(claim.factor)
        require(
            not undeclared,
            f"target {target.name}: claim {claim.name} compares {one} with {other}, which also "
            f"differ in {', '.join(sorted(undeclared))}; declare it as a factor or match them",
        )


def _require_unique(what: str, names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    require(not repeated, f"{what} repeat {', '.join(repeated)}")


def _names(tiers: Iterable[Tier]) -> str:
    return ", ".join(tier.value for tier in Tier if tier in set(tiers))
