"""How large an effect the paper has, and the smallest that matters.

Both are declared with a claim, before the runs. A claim without a size can only be shown or not
shown: "not shown" then covers *far smaller than the paper's* and *too noisy to say* alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Measure = Literal["units", "of baseline", "of gain", "of shortfall", "ratio"]

# The metric whose mean is the gain in `of gain`.
GAIN = "gain_greedy"
# Level of all decisions about one target.
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
