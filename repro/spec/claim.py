"""Metrics and claims: what a run yields, and how the arms of a target relate in it.

A claim is a contrast: a sum of arms with weights, in one metric, on a linear or a logarithmic
scale, and the side of a bound on which it lies. `{a: 1, b: -1}` above 0 says that a has more than
b; above -1.5, that it is no worse by more than that; on a logarithmic scale above 2, that it has
more than twice as much; `{a: 1}` below 15, that a's own value stays small. What numbers should be
is an expectation's business (`repro.evidence.verdicts.expectation`).

How large an effect the paper has, and the smallest that matters, are declared with a claim, before
the runs. A claim without a size can only be shown or not shown: "not shown" then covers *far
smaller than the paper's* and *too noisy to say* alike.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from repro.spec.checks import require
from repro.spec.settings import plain_values
from repro.spec.tier import Tier

Side = Literal["above", "below", "within"]
Test = Literal["t", "tost", "sign_flip", "page"]
Secondary = Literal["iqm", "improvement"]
Better = Literal["lower", "higher", "neither"]
Measure = Literal["units", "of baseline", "of gain", "of shortfall", "ratio"]

# Units of what belongs to the machine, and which way is better.
BETTER_OF_UNIT: dict[str, Better] = {
    "seconds": "lower",
    "bytes": "lower",
    "tokens per second": "higher",
}
# The metric whose mean is the gain in `of gain`.
GAIN = "gain_greedy"
# The source of claims that are bars of this suite rather than the paper's.
OWN_BAR = "this suite's bar"
# Level of all decisions about one target.
ALPHA = 0.05
_TENTH = 0.1
# A contrast's weights sum to zero, but for the rounding of floats.
_ROUNDING = 1e-9
# Fields that say nothing of how a claim is judged.
_WORDING = ("statement", "source", "because")


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
    quantity, model, point, batch
        What is measured, of which model's size (`0.5b`), at which point of a scale (`batch 8`,
        `16x8`) and, of rollouts and linear layers alone, with how many rows at once; empty, or 0,
        where pages need none. `rollout` is the rate of a rollout alone; other quantities are spelt
        as at the beginning of the name.
    change
        Whether a percent is a change, which may be negative, and no share of a whole.
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
    quantity: str = ""
    model: str = ""
    point: str = ""
    batch: int = 0
    change: bool = False
    better: Better | None = None
    ceiling: float | None = None
    tiers: tuple[Tier, ...] = ()

    @property
    def most(self) -> float | None:
        """The largest value that it can have; None where there is none."""
        percent = self.unit == "percent" and not self.change
        return 100.0 if self.ceiling is None and percent else self.ceiling

    def direction(self) -> Better | None:
        """Return which way is better; None where neither the metric nor its unit says."""
        return self.better or BETTER_OF_UNIT.get(self.unit)


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
    because
        Why no smaller effect matters, where `smallest` is given.
    """

    paper: float | None = None
    smallest: float | None = None
    measure: Measure
    place: str = ""
    because: str = ""

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


@dataclass(frozen=True, slots=True)
class Dose:
    """What a slope is over: the line, within each seed, through the values of its arms.

    `metric` is how strong the treatment of an arm is, `size` the change of it that the slope is
    given for, in its unit. The metrics `given` are held fixed beside it, by linear regression.
    """

    metric: str
    size: float
    given: tuple[str, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of the regression: the dose, then those held fixed."""
        return (self.metric, *self.given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence of the paper (or about this suite's machinery), as a contrast of arms.

    Attributes
    ----------
    contrast
        {arm: weight}. Weights of several arms sum to 0; an arm alone has the weight 1; of a slope
        over a dose, whose weights follow from what is measured, each is 0.
    factor
        Fields of `Arm` in which the arms may differ, or `learning_rate`, which the scale sets.
    log
        Whether logarithms are compared, so that the contrast is a quotient.
    side, bound
        `above` the bound, `below` it, or `within` it to both sides; in the metric's unit, of a
        quotient the quotient itself.
    because
        The reason of a bound other than none at all (0, or of a quotient 1).
    effect
        How large the paper's effect is, and the smallest that matters; what lies above 0 needs one
        unless it is about the machinery.
    headroom
        Whether the claim is judged only where the effect fits below the metric's ceiling.
    confounded
        What else the design varies, so that the claim cannot be judged; empty for nothing.
    draws
        How many roundings the design draws, of a statement about a rounding; None where each pair
        is a draw. On one draw such a statement is not testable, however many seeds sample from it.
    test
        `t`: Student's t. `sign_flip`: the exact test of the claimed side alone, with the median,
        where a run may collapse and one outlier would hide it. `page`: Page's L of arms listed from
        the lowest to the highest, whose contrast is the slope (`slope`). `tost`: of a claim within
        its bound, two one-sided tests; it holds where the (1 - 2 alpha) interval lies within.
    widest
        Largest half-width of the interval with which the claim is judged, in the metric's unit, of
        a quotient a quotient; None for any.
    unpaired_below
        Of two arms, the correlation within pairs below which they are compared by Welch's test as
        if not paired; None for never.
    secondary
        What is shown beside the means of two arms, with bootstrap intervals: `iqm`, how far apart
        their interquartile means are; `improvement`, how probably a run of the first is better.
    dose
        Of a slope, what it is over.
    mechanism
        True for what must hold if the machinery works (training gains, controls do not). A
        contradicted mechanism claim is this suite's fault; a contradicted claim of the paper's is
        a finding.
    """

    name: str
    statement: str
    source: str
    contrast: Mapping[str, float]
    metric: str
    factor: tuple[str, ...] = ()
    log: bool = False
    side: Side = "above"
    bound: float = 0.0
    because: str = ""
    effect: Effect | None = None
    headroom: bool = False
    confounded: str = ""
    draws: int | None = None
    test: Test = "t"
    mechanism: bool = False
    dose: Dose | None = None
    widest: float | None = None
    unpaired_below: float | None = None
    secondary: tuple[Secondary, ...] = ()

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms, as the contrast lists them."""
        return tuple(self.contrast)

    @property
    def baseline(self) -> str:
        """The arm that sizes are shares of: the one subtracted, the lowest, or the first listed."""
        return min(self.contrast, key=self.contrast.__getitem__)

    @property
    def steps(self) -> int:
        """Steps from the lowest arm to the highest, over which a slope spreads an effect."""
        return len(self.contrast) - 1 if self.test == "page" else 1

    @property
    def is_bounded(self) -> bool:
        """Whether its bound is another than none at all."""
        return self.bound != (1.0 if self.log else 0.0)

    def __post_init__(self) -> None:
        where = f"claim {self.name}"
        weights = list(self.contrast.values())
        total = sum(weights) - (1.0 if len(weights) == 1 else 0.0)
        require(
            bool(weights) and abs(total) < _ROUNDING,
            f"{where}: the weights are {dict(self.contrast)}; those of several arms must sum to 0, "
            "and that of one arm must be 1",
        )
        require(
            bool(self.because) or not self.is_bounded,
            f"{where}: its bound of {self.bound:g} has no reason; fill `because`",
        )
        require(
            (self.test != "tost" or self.side == "within")
            and (self.side != "within" or self.test in ("t", "tost")),
            f"{where}: the test {self.test} does not fit the side {self.side!r}",
        )
        floor = 1.0 if self.log else 0.0
        require(
            self.widest is None or self.widest > floor,
            f"{where}: widest is {self.widest}; it must be above {floor:g}",
        )
        pair = len(weights) == 2 and self.dose is None
        require(
            pair or (self.unpaired_below is None and not self.secondary),
            f"{where}: unpaired_below and secondary need two arms; it has {len(weights)}",
        )
        require(
            self.unpaired_below is None or self.test in ("t", "tost"),
            f"{where}: the test {self.test} knows no unpaired values",
        )
        sized = self.side == "above" and not self.is_bounded and not self.log
        require(
            self.effect is not None or self.mechanism or not sized,
            f"{where}: it has no `effect`; a claim above 0 needs the paper's size, or the smallest "
            "that matters",
        )


def slope(arms: tuple[str, ...]) -> dict[str, float]:
    """Return the contrast of arms in an order that is their least-squares slope, units a place."""
    centre = (len(arms) - 1) / 2
    square = sum((place - centre) ** 2 for place in range(len(arms)))
    return {arm: (place - centre) / square for place, arm in enumerate(arms)}


def planned(claim: Claim) -> dict[str, Any]:
    """Return a claim without its wording, as an analysis plan spells it: in JSON values.

    Fields at their defaults are left out, so that a plan does not change with a new field.
    """
    stated = {
        item.name: value
        for item in dataclasses.fields(claim)
        if item.name not in _WORDING and (value := getattr(claim, item.name)) != item.default
    }
    # The order of arms says which of them is the baseline; canonical JSON would sort them.
    stated["contrast"] = list(claim.contrast.items())
    if claim.effect is not None:
        sizes = dataclasses.asdict(claim.effect)
        stated["effect"] = {name: sizes[name] for name in ("paper", "smallest", "measure")}
    plain: dict[str, Any] = json.loads(json.dumps(plain_values(stated)))
    return plain
