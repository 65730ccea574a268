"""Metrics and claims: how the arms of a target relate, without a number but declared margins.

What the numbers should be is an expectation's business (`repro.evidence.expectation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from repro.spec.config import require, require_choice
from repro.spec.tier import Tier

ClaimKind = Literal[
    "difference",
    "non_inferior",
    "gain",
    "no_gain",
    "trend",
    "order",
    "interaction",
    "ratio",
    "at_most",
]
Pairing = Literal["seed", "prompt", "repeat"]
Better = Literal["lower", "higher", "neither"]

# How many arms each kind relates; None is two or more.
_ARMS_OF_KIND: dict[str, int | None] = {
    "difference": 2,
    "non_inferior": 2,
    "gain": 1,
    "no_gain": 1,
    "trend": None,
    "order": None,
    "interaction": 4,
    "ratio": 2,
    "at_most": 1,
}
# Units of what belongs to the machine, and which way is better.
BETTER_OF_UNIT: dict[str, Better] = {
    "seconds": "lower",
    "bytes": "lower",
    "tokens per second": "higher",
}
_KINDS_WITH_MARGIN = ("non_inferior", "no_gain", "ratio", "at_most")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number that a run yields.

    Attributes
    ----------
    unit
        `percent` (0 to 100), `points` (difference of percents), `nats`, `seconds`, `bytes`,
        `tokens`, `tokens per second`, `rows`, `reward` or `ratio`.
    title
        What a table's heading says.
    change
        A percent that may be negative, for it is a change and no share of a whole.
    better
        Which way is better, where the unit does not say (`BETTER_OF_UNIT`) or says it wrongly;
        `neither` describes a run and cannot regress.
    """

    name: str
    unit: str
    title: str
    change: bool = False
    better: Better | None = None

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
        `difference`: A - B > 0, paired by seed. `non_inferior`: A - B > -margin. `gain`: A's own
        gain > 0. `no_gain`: a control's gain stays under the margin. `trend`: Page's L over arms
        listed from the lowest to the highest. `order`: the trend as a gate, then each adjacent
        pair with Holm's correction. `interaction`: (A - B) - (C - D) > 0. `ratio`: A / B > margin.
        `at_most`: A's metric <= margin.
    arms
        A, or A and B, or the order from lowest to highest.
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
    tiers: tuple[Tier, ...] = ()
    mechanism: bool = False

    def __post_init__(self) -> None:
        where = f"claim {self.name}"
        require_choice(f"{where}: kind", self.kind, ClaimKind)
        require_choice(f"{where}: paired_by", self.paired_by, Pairing)
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

    def applies(self, tier: Tier) -> bool:
        """Whether the claim is made at `tier`."""
        return not self.tiers or tier in self.tiers
