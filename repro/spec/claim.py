"""Metrics and claims: how the arms of a target relate, with declared margins and sizes.

A claim of the paper carries the paper's own effect as a share that another model can have, the
smallest effect that matters, what must hold before it can be judged (`repro.spec.effect`) and what
was drawn again from pair to pair. What numbers should be is an expectation's business
(`repro.evidence.verdicts.expectation`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from repro.spec.arm import require, require_choice
from repro.spec.effect import Assay, Effect, Unit
from repro.spec.resolve import LATER
from repro.spec.tier import Tier

ClaimKind = Literal[
    "difference",
    "non_inferior",
    "equivalent",
    "gain",
    "no_gain",
    "trend",
    "order",
    "interaction",
    "ratio",
    "slope",
]
Pairing = Literal["seed", "prompt", "repeat"]
Test = Literal["t", "sign_flip", "mcnemar"]
Better = Literal["lower", "higher", "neither"]

# How many arms each kind relates; None is two or more.
_ARMS_OF_KIND: dict[str, int | None] = {
    "difference": 2,
    "non_inferior": 2,
    "equivalent": 2,
    "gain": 1,
    "no_gain": 1,
    "trend": None,
    "order": None,
    "interaction": 4,
    "ratio": 2,
    "slope": None,
}
# Units of what belongs to the machine, and which way is better.
BETTER_OF_UNIT: dict[str, Better] = {
    "seconds": "lower",
    "bytes": "lower",
    "tokens per second": "higher",
}
_KINDS_WITH_MARGIN = ("non_inferior", "equivalent", "no_gain", "ratio")
# Kinds whose bound is no difference at all: the smallest that matters must be stated beside it.
SIZED_KINDS = ("difference", "trend", "order", "interaction", "slope")
# Kinds whose estimate may be a logarithm, of a quotient or of a quotient of two.
_KINDS_OF_RATIOS = ("ratio", "interaction", "equivalent", "slope")
# What is drawn again from pair to pair, where a claim does not say otherwise.
_UNIT_OF_PAIRING: dict[str, Unit] = {
    "seed": "training seed",
    "prompt": "prompt",
    "repeat": "timed repeat",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number that a run yields.

    Attributes
    ----------
    unit
        `percent` (0 to 100), `points` (difference of percents), `share` (0 to 1), `nats`,
        `seconds`, `bytes`, `tokens`, `completions`, `tokens per second`, `rows`, `reward` or
        `ratio`.
    title
        What a table's heading says.
    change
        A percent that may be negative, for it is a change and no share of a whole.
    better
        Which way is better, where the unit does not say (`BETTER_OF_UNIT`) or says it wrongly;
        `neither` describes a run and cannot regress.
    tiers
        Where it is a metric of its target; empty is everywhere.
    ceiling
        The largest value there is, where the unit does not say: 100 for a percent that is no
        change.
    """

    name: str
    unit: str
    title: str
    change: bool = False
    better: Better | None = None
    ceiling: float | None = None
    tiers: tuple[Tier, ...] = ()

    def applies(self, tier: Tier) -> bool:
        """Whether it is a metric of its target at `tier`."""
        return not self.tiers or tier in self.tiers

    @property
    def most(self) -> float | None:
        """The largest value that it can have; None where there is none."""
        percent = self.unit == "percent" and not self.change
        return 100.0 if self.ceiling is None and percent else self.ceiling

    def direction(self) -> Better | None:
        """Return which way is better; None where neither the metric nor its unit says."""
        return self.better or BETTER_OF_UNIT.get(self.unit)


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
        `difference`: A - B > 0, paired by seed. `non_inferior`: A - B > -margin. `equivalent`:
        A - B lies within the margin to both sides, or A / B within it and its inverse where its
        effect is a ratio. `gain`: A's own gain > 0. `no_gain`: a control's
        gain stays under the margin. `trend`: Page's L over arms listed from the lowest to the
        highest. `order`: the trend as a gate, then each adjacent pair with Holm's correction.
        `interaction`: (A - B) - (C - D) > 0, or (A / B) / (C / D) > 1 where its effect is a ratio.
        `ratio`: A / B > margin. `slope`: the line through the arms of a seed, of the metric (of its
        logarithm, where the effect is a ratio) over `against`, times `dose`, > 0.
    arms
        A, or A and B, or the order from lowest to highest, or A, B, C and D.
    metric
        Name of the metric that is compared.
    factor
        Fields of `Arm` in which the arms may differ, or `learning_rate`, which the scale sets.
    margin, because
        A number stated in advance, in the metric's unit, and its reason.
    paired_by
        What the arms have in common value by value: the training `seed`, or the `prompt`, for which
        records hold the series `<metric>_by_prompt`, or the timed `repeat` of a deterministic
        workload, in targets that declare `timed_repeats`.
    effect
        How large the paper's effect is, and the smallest that matters; needed by claims of
        `SIZED_KINDS` that are not about the machinery.
    assays
        What must hold in the same records before the claim is judged.
    against, given, dose
        Of a slope: the metric that it is over, metrics held fixed beside it (linear regression over
        the arms of a seed), and the change of `against` that it is given for.
    unit, draws
        What the statement speaks of more than one of, and how many of it the design draws, where
        that is not one per pair. A statement about a rounding that rests on one draw of it is not
        testable, however many seeds sample from it.
    test
        `t`: Student's t on the differences. `sign_flip`: the exact test of the claimed direction
        alone, with the median, where a run may collapse and one outlier would hide it. `mcnemar`:
        the exact test of a metric that is 0 or 1 in each run, to both sides, with the difference
        of the two shares.
    tiers
        Tiers at which the claim is made; none named means every tier.
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
    paired_by: Pairing = "seed"
    effect: Effect | None = None
    assays: tuple[Assay, ...] = ()
    unit: Unit | None = None
    draws: int | None = None
    test: Test = "t"
    tiers: tuple[Tier, ...] = ()
    mechanism: bool = False
    against: str = field(default="", metadata=LATER)
    given: tuple[str, ...] = field(default=(), metadata=LATER)
    dose: float = field(default=0.0, metadata=LATER)

    @property
    def unit_of_replication(self) -> Unit:
        """What is drawn again from pair to pair."""
        return self.unit or _UNIT_OF_PAIRING[self.paired_by]

    @property
    def is_ratio(self) -> bool:
        """Whether its estimate is a quotient, compared as a logarithm."""
        ratio = self.effect is not None and self.effect.measure == "ratio"
        return self.kind == "ratio" or ratio

    @property
    def baseline(self) -> str:
        """The arm that sizes are shares of: the one subtracted, or the lowest of an order."""
        if self.kind in ("trend", "order", "slope"):
            return self.arms[0]
        return self.arms[-1]

    def __post_init__(self) -> None:
        where = f"claim {self.name}"
        self._require_size(where)
        require_choice(f"{where}: kind", self.kind, ClaimKind)
        require_choice(f"{where}: paired_by", self.paired_by, Pairing)
        count = _ARMS_OF_KIND[self.kind]
        arm_count = len(self.arms)
        require(
            arm_count == count if count is not None else arm_count >= 2,
            f"{where}: kind {self.kind} relates {count or 'two or more'} arms; found {arm_count}",
        )
        require(len(set(self.arms)) == arm_count, f"{where}: an arm is named twice in {self.arms}")
        self._require_slope(where)
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

    def _require_slope(self, where: str) -> None:
        slope = self.kind == "slope"
        require(
            slope == bool(self.against and self.dose) and (slope or not self.given),
            f"{where}: kind {self.kind}, against {self.against!r}, given {self.given}, dose "
            f"{self.dose:g}; a slope needs against and a dose other than 0, other kinds take none",
        )
        # A line through as many arms as it has numbers fits whatever they are.
        needed = 3 + len(self.given)
        require(
            not slope or len(self.arms) >= needed,
            f"{where}: a slope given {len(self.given)} metrics needs {needed} arms; found "
            f"{len(self.arms)}",
        )

    def _require_size(self, where: str) -> None:
        sized = self.kind in SIZED_KINDS and not self.mechanism
        require(
            self.effect is not None or not sized,
            f"{where}: kind {self.kind} needs an `effect`: the paper's size, or the smallest that "
            "matters",
        )
        ratio = self.effect is not None and self.effect.measure == "ratio"
        require(
            self.effect is None
            or (ratio and self.kind in _KINDS_OF_RATIOS)
            or (not ratio and self.kind != "ratio"),
            f"{where}: kind {self.kind} with the effect {self.effect}; a ratio has a ratio's, "
            f"{' and '.join(_KINDS_OF_RATIOS[1:])} may, other kinds have none",
        )
        smallest = None if self.effect is None else self.effect.smallest
        require(
            not ratio or self.kind != "equivalent" or self.margin == smallest,
            f"{where}: its margin of {self.margin} is not the smallest ratio that matters, "
            f"{smallest}",
        )
        require(
            self.kind != "ratio" or smallest is None or self.margin == 1.0,
            f"{where}: its margin is {self.margin}; a ratio with a smallest size of its own needs "
            "the margin 1",
        )
        require_choice(f"{where}: test", self.test, Test)
        require(
            self.test == "t" or self.kind == "difference",
            f"{where}: kind {self.kind} has the test {self.test}; only a difference may",
        )
        require(
            (self.unit is None) == (self.draws is None),
            f"{where}: unit {self.unit}, draws {self.draws}; give both, or neither (one per pair)",
        )

    def applies(self, tier: Tier) -> bool:
        """Whether the claim is made at `tier`."""
        return not self.tiers or tier in self.tiers
