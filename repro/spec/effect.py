"""How large an effect the paper has, what must hold before it can be looked for, and when to look.

All three are declared with a claim, before the runs. A claim without a size can only be shown or
not shown: "not shown" then covers *far smaller than the paper's* and *too noisy to say* alike. A
claim without an assay is judged where nothing could have appeared, under a ceiling that all arms
share. Seeds that are added until a difference appears find one in the end; looks at part of the
seeds spend parts of the level that were stated before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from repro.spec.arm import require, require_choice

Measure = Literal["units", "of baseline", "of gain", "of shortfall", "ratio"]
AssayKind = Literal["headroom", "range", "control", "design"]
Unit = Literal["training seed", "rounding draw", "prompt", "timed repeat"]

# The metric whose mean is the gain in `of gain`.
GAIN = "gain_greedy"
# Level of all decisions about one target; its looks share it.
ALPHA = 0.05
_TENTH = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The size of a claimed effect, in a measure that carries over to another model.

    A point of accuracy means something else for a policy that gains 12 points and for one that
    gains 50. So sizes are shares, of what the baseline arm (of a difference the second one, of an
    order the lowest) shows in the same runs.

    Attributes
    ----------
    paper
        The paper's own effect, positive in the claimed direction; None where it has none.
    smallest
        The smallest effect that matters; a tenth of the paper's where it is not given.
    measure
        `units`: the metric's own; `of baseline`: share of the baseline's mean; `of gain`: share of
        what the baseline gains by training (`GAIN`); `of shortfall`: share of what the baseline
        leaves below the metric's ceiling, which for an area under a curve that saturates is the
        share of the time that is saved; `ratio`: the quotient of two arms, tenths of its logarithm.
    place
        Where the paper has it, and the arithmetic.
    because
        Why no smaller effect matters, where `smallest` is given.
    """

    paper: float | None = None
    smallest: float | None = None
    measure: Measure
    place: str = ""
    because: str = ""

    def __post_init__(self) -> None:
        require_choice("effect: measure", self.measure, Measure)
        floor = 1.0 if self.measure == "ratio" else 0.0
        sizes = [size for size in (self.paper, self.smallest) if size is not None]
        require(
            bool(sizes) and min(sizes, default=0.0) > floor,
            f"effect: paper is {self.paper} and smallest {self.smallest}; needs one of them, each "
            f"above {floor:g}",
        )
        require(
            (self.paper is None) == (not self.place),
            f"effect: the paper's size is {self.paper} and its place {self.place!r}; needs both or "
            "neither",
        )
        require(
            (self.smallest is None) == (not self.because),
            f"effect: the smallest that matters is {self.smallest} and its reason "
            f"{self.because!r}; needs both or neither",
        )

    @property
    def tenth(self) -> float | None:
        """A tenth of the paper's size, of a ratio by logarithms."""
        if self.paper is None:
            return None
        return self.paper**_TENTH if self.measure == "ratio" else _TENTH * self.paper

    @property
    def matters(self) -> float:
        """The smallest effect that matters."""
        size = self.tenth if self.smallest is None else self.smallest
        assert size is not None
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Assay:
    """What must hold in the same records before a claim is judged at all.

    Attributes
    ----------
    kind
        `headroom`: the claim's metric has room above the baseline arm for the effect to be seen.
        `range`: the mean of `metric` of `arm` lies from `at_least` to `at_most` (a prior, a share
        of informative groups). `control`: the claim named `claim` of the same target, a positive
        control, is reproduced. `design`: known from the design to fail, with the reason.
    because
        What could not be seen otherwise.
    """

    kind: AssayKind
    because: str
    arm: str = ""
    metric: str = ""
    at_least: float | None = None
    at_most: float | None = None
    claim: str = ""

    def __post_init__(self) -> None:
        require_choice("assay: kind", self.kind, AssayKind)
        require(bool(self.because), "assay: it has no reason; fill `because`")
        ranged = bool(self.arm and self.metric) and (self.at_least, self.at_most) != (None, None)
        require(
            ranged == (self.kind == "range"),
            f"assay {self.kind}: arm {self.arm!r}, metric {self.metric!r}, from {self.at_least} to "
            f"{self.at_most}; a range needs arm, metric and a bound, other kinds none of them",
        )
        require(
            bool(self.claim) == (self.kind == "control"),
            f"assay {self.kind}: claim {self.claim!r}; a control names one, other kinds none",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InterimAnalysis:
    """One time at which a target is judged.

    Attributes
    ----------
    seeds
        How many of the planned seeds, from the first on.
    alpha
        The part of the level that is spent at it.
    """

    seeds: int
    alpha: float


def require_looks(where: str, looks: Sequence[InterimAnalysis]) -> None:
    """Raise `ValueError` for looks that do not grow, or that spend more than the level."""
    counts = [look.seeds for look in looks]
    require(counts == sorted(set(counts)), f"{where}: looks at {counts} seeds; needs growing ones")
    require(
        all(look.alpha > 0 for look in looks), f"{where}: each look needs a positive alpha; {looks}"
    )
    spent = sum(look.alpha for look in looks)
    require(spent <= ALPHA + 1e-12, f"{where}: looks spend a level of {spent:g}; at most {ALPHA:g}")
