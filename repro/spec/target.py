"""Targets: one table or figure of the paper, stated so that a machine can say whether it holds.

A `Target` names its **arms** (the rows that the paper compares), its **scales** (how large each
tier of hardware runs them), its **metrics** and its **claims** (how the arms relate through the
metrics). `plan` turns a target and a tier into runs.

Claims hold no numbers but declared margins, each with its reason; what the numbers should be is an
expectation's business (`repro.evidence.expectation`). A claim that compares arms declares the
factor in which they may differ, and a target whose arms differ in anything else cannot be built.
That is the guard against the released scripts' confounded pairs (NVFP4 on GSM8K at one learning
rate against BF16 on BigMath at another).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from repro.spec.config import Arm, RunConfig, require, require_choice
from repro.spec.tier import Download, Tier

ClaimKind = Literal[
    "difference", "non_inferior", "gain", "no_gain", "trend", "order", "ratio", "at_most"
]

# How many arms each kind relates; None is two or more.
_ARMS_OF_KIND: dict[str, int | None] = {
    "difference": 2,
    "non_inferior": 2,
    "gain": 1,
    "no_gain": 1,
    "trend": None,
    "order": None,
    "ratio": 2,
    "at_most": 1,
}
_KINDS_WITH_MARGIN = ("non_inferior", "no_gain", "ratio", "at_most")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number that a run yields.

    Attributes
    ----------
    unit
        `percent` (0 to 100), `points` (difference of percents), `nats`, `seconds`, `bytes`,
        `tokens`, `tokens per second`, `reward` or `ratio`.
    title
        What a table's heading says.
    """

    name: str
    unit: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence of the paper (or about this suite's machinery), as a relation between arms.

    Attributes
    ----------
    statement
        The claim in this project's words.
    source
        Where the paper says so.
    kind
        `difference`: A - B > 0, paired by seed. `non_inferior`: A - B > -margin. `gain`: A's own
        gain > 0. `no_gain`: a control's gain stays under the margin. `trend`: Page's L over arms
        listed from the lowest to the highest. `order`: the trend as a gate, then each adjacent
        pair with Holm's correction. `ratio`: A / B > margin. `at_most`: A's metric <= margin.
    arms
        A, or A and B, or the order from lowest to highest.
    metric
        Name of the metric that is compared.
    factor
        Fields of `Arm` in which the arms may differ, or `learning_rate`, which the scale sets.
    margin, because
        A number stated in advance, in the metric's unit, and its reason.
    mechanism
        True for what must hold if the machinery works (training gains, controls do not). A
        contradicted mechanism claim is this suite's fault; a contradicted claim of the paper's is
        a finding.
    """

    name: str
    statement: str
    source: str
    kind: ClaimKind
    arms: tuple[str, ...]
    metric: str
    factor: tuple[str, ...] = ()
    margin: float | None = None
    because: str = ""
    mechanism: bool = False

    def __post_init__(self) -> None:
        where = f"claim {self.name}"
        require_choice(f"{where}: kind", self.kind, ClaimKind)
        count = _ARMS_OF_KIND[self.kind]
        found = len(self.arms)
        require(
            found == count if count is not None else found >= 2,
            f"{where}: kind {self.kind} relates {count or 'two or more'} arms; found {found}",
        )
        require(len(set(self.arms)) == found, f"{where}: an arm is named twice in {self.arms}")
        needs_margin = self.kind in _KINDS_WITH_MARGIN
        require(
            (self.margin is not None) == needs_margin,
            f"{where}: margin is {self.margin}; kind {self.kind} "
            f"{'needs one' if needs_margin else 'takes none'}",
        )
        require(
            not needs_margin or bool(self.because),
            f"{where}: its margin of {self.margin} has no reason; fill `because`",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one run at a tier is thought to need before any has been recorded there.

    Attributes
    ----------
    train_seconds, evaluate_seconds
        Wall time of a run that trains, and of one that only evaluates; None where nobody has
        timed one.
    memory_bytes, disk_bytes
        Peak memory (device memory where the tier has a device), and disk for one run's
        checkpoints and record.
    downloads
        What the hub is asked for, once for all runs.
    basis
        Where the figures come from.
    """

    train_seconds: float | None
    evaluate_seconds: float | None
    memory_bytes: int
    disk_bytes: int
    downloads: tuple[Download, ...] = ()
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One table or figure of the paper.

    Attributes
    ----------
    version
        Moves when the meaning of a metric, an arm or a scale moves; part of every run's digest.
    statement
        What the table or figure is said to show.
    source
        Its place in the paper.
    procedure
        What carries out the arms that train (`train`) or measure (`throughput`, ...); an arm with
        training `none` of a target that trains is evaluated instead.
    controls
        Names of arms that the paper does not have: they must not gain.
    scales
        How large each tier runs it. A tier without a scale yields `not run`, with `why_not`.
    records_of
        Name of the target whose runs this one reads, where a figure draws a table's runs.
    headline
        Metric printed beside the paper's cells.
    why_not
        Why it cannot run yet, for a target without scales.
    paper_file, paper_column
        File under `expected/paper/` with the paper's cells, and the column that the `paper` tier's
        scale stands for.
    """

    name: str
    version: int = 1
    title: str
    statement: str
    source: str
    procedure: str = "train"
    arms: tuple[Arm, ...] = ()
    controls: tuple[str, ...] = ()
    scales: Mapping[Tier, Any] = field(default_factory=dict)
    costs: Mapping[Tier, Cost] = field(default_factory=dict)
    metrics: tuple[Metric, ...] = ()
    claims: tuple[Claim, ...] = ()
    headline: str | None = None
    records_of: str | None = None
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
        for control in self.controls:
            require(control in arm_names, f"{where}: control {control} is not among its arms")
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
            _require_declared_factor(where, claim, [self.arm(name) for name in claim.arms])
        require(
            set(self.scales) == set(self.costs) or self.records_of is not None,
            f"{where}: each tier with a scale needs a cost and the reverse; found scales for "
            f"{_names(self.scales)} and costs for {_names(self.costs)}",
        )
        require(
            bool(self.scales) or bool(self.why_not) or self.records_of is not None,
            f"{where}: it has no scale and gives no reason; fill `why_not`",
        )

    def arm(self, name: str) -> Arm:
        """Return the arm called `name`; `ValueError` lists the arms otherwise."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise ValueError(
            f"target {self.name} has no arm {name!r}; its arms are "
            f"{', '.join(arm.name for arm in self.arms)}"
        )

    def metric(self, name: str) -> Metric:
        """Return the metric called `name`."""
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise ValueError(f"target {self.name} has no metric {name!r}")

    def procedure_of(self, arm: Arm) -> str:
        """Return the procedure that carries out `arm`."""
        return (
            "evaluate" if self.procedure == "train" and arm.training == "none" else self.procedure
        )

    def tiers(self) -> tuple[Tier, ...]:
        """Return the tiers with a scale, from the smallest."""
        return tuple(tier for tier in Tier if tier in self.scales)

    def not_runnable(self, tier: Tier) -> str | None:
        """Return a sentence saying why the target cannot run at `tier` here, or None."""
        if tier in self.scales:
            return tier.missing()
        if self.why_not:
            return self.why_not
        return f"{self.name} has no scale at the {tier.value} tier yet"


def default_tier(target: Target) -> Tier:
    """Return the highest tier that this machine can serve for `target` without downloads.

    Raises
    ------
    ValueError
        If no tier of the target can run here; the message says why for each.
    """
    reasons = []
    for tier in reversed(target.tiers()):
        reason = tier.missing()
        absent = [item.name for item in target.costs[tier].downloads if not item.present()]
        if reason is None and not absent:
            return tier
        reasons.append(f"{tier.value} {reason or 'would download ' + ', '.join(absent)}")
    detail = "; ".join(reasons) or target.why_not
    raise ValueError(f"no tier of {target.name} runs here without being named: {detail}")


def plan(
    target: Target,
    tier: Tier,
    seeds: int | Sequence[int] | None = None,
    arms: Iterable[str] | None = None,
) -> list[RunConfig]:
    """Return the runs of `target` at `tier`, all arms of one seed before the next seed.

    Parameters
    ----------
    seeds
        How many (0, 1, ...), or which; None takes the scale's own.
    arms
        Names of the arms to run; None takes all, controls included.

    Raises
    ------
    ValueError
        If the target has no scale at the tier, an arm is unknown, or there is no seed.
    """
    if tier not in target.scales:
        offered = _names(target.scales) or "none"
        raise ValueError(
            f"{target.name} has no scale at the {tier.value} tier (it has: {offered})"
            + (f"; {target.why_not}" if target.why_not else "")
        )
    require(
        target.records_of is None,
        f"{target.name} reads the runs of {target.records_of}; plan that target instead",
    )
    scale = target.scales[tier]
    if seeds is None:
        seeds = scale.seeds
    chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    require(bool(chosen), f"{target.name}: no seed to run; give 1 or more")
    _require_unique(f"{target.name}: seeds", [str(seed) for seed in chosen])
    selected = target.arms if arms is None else tuple(target.arm(name) for name in arms)
    return [
        RunConfig(
            target=target.name,
            target_version=target.version,
            tier=tier.value,
            procedure=target.procedure_of(arm),
            arm=arm,
            scale=scale,
            seed=seed,
        )
        for seed in chosen
        for arm in selected
    ]


def differing_fields(first: Arm, second: Arm) -> set[str]:
    """Return the fields in which two arms differ, names and labels aside."""
    return {
        item.name
        for item in dataclasses.fields(Arm)
        if item.name not in ("name", "label")
        and getattr(first, item.name) != getattr(second, item.name)
    }


def _require_declared_factor(where: str, claim: Claim, arms: Sequence[Arm]) -> None:
    for first in arms:
        for second in arms:
            undeclared = differing_fields(first, second) - set(claim.factor)
            require(
                not undeclared,
                f"{where}: claim {claim.name} compares {first.name} with {second.name}, which also "
                f"differ in {', '.join(sorted(undeclared))}; declare it as a factor or match them",
            )


def _require_unique(what: str, names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    require(not repeated, f"{what} repeat {', '.join(repeated)}")


def _names(tiers: Iterable[Tier]) -> str:
    return ", ".join(tier.value for tier in Tier if tier in set(tiers))
