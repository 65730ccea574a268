"""Numbers of a run that follow from its other numbers, formed in one place for every procedure.

`heldout_area` is what "grows faster" means here: the mean of the held-out accuracy over the first
`budget` sampled training tokens, the curve drawn straight between evaluations and held after the
last. Tokens rather than steps, because a policy that answers at greater length sees and computes
more a step; an area rather than the time to a threshold, because a threshold can be chosen to suit.

`accuracy_human` is the plain mean over the human-written sets, each counting once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean

from repro.evidence.record import Estimate

HUMAN_METRICS = ("accuracy_mawps", "accuracy_svamp", "accuracy_gsm8k")


def derived_metrics(
    metrics: Mapping[str, Estimate],
    series: Mapping[str, Sequence[float | None]],
    token_budget: int,
) -> dict[str, Estimate]:
    """Return `heldout_area`, `heldout_last` and `accuracy_human`, as far as they are defined.

    Parameters
    ----------
    series
        `evaluation_tokens` (from 0) and `evaluation_accuracy` (percent) give the first two.
    token_budget
        0 asks for no area.
    """
    found = {}
    if token_budget and series.get("evaluation_accuracy"):
        tokens = [float(value or 0.0) for value in series["evaluation_tokens"]]
        accuracy = [float(value or 0.0) for value in series["evaluation_accuracy"]]
        found["heldout_area"] = Estimate(
            value=mean_height(tokens, accuracy, float(token_budget)),
            unit="percent",
            n=len(tokens),
            method=f"mean of the held-out accuracy over the first {token_budget} sampled tokens; "
            "straight between evaluations, held after the last",
        )
        found["heldout_last"] = Estimate(
            value=accuracy[-1], unit="percent", method="held-out accuracy at the last evaluation"
        )
    human = [metrics[name].value for name in HUMAN_METRICS if name in metrics]
    present = [value for value in human if value is not None]
    if len(present) == len(HUMAN_METRICS):
        found["accuracy_human"] = Estimate(
            value=fmean(present), unit="percent", n=len(present), method="mean of the sets"
        )
    return found


def mean_height(places: Sequence[float], heights: Sequence[float], end: float) -> float:
    """Return the mean height of a polyline over [0, end], held level after its last place.

    Parameters
    ----------
    places
        Rising, from 0.

    Raises
    ------
    ValueError
        If the places do not start at 0 or do not rise.
    """
    if not places or places[0] != 0 or len(places) != len(heights):
        raise ValueError(f"the curve needs a height at each place, from place 0; found {places}")
    if any(b <= a for a, b in itertools.pairwise(places)):
        raise ValueError(f"the curve's places must rise; found {places}")
    area = 0.0
    points = list(zip(places, heights, strict=True))
    for (left, low), (right, high) in itertools.pairwise(points):
        if left >= end:
            break
        stop = min(right, end)
        at_stop = low + (high - low) * (stop - left) / (right - left)
        area += (stop - left) * (low + at_stop) / 2
    area += max(0.0, end - places[-1]) * heights[-1]
    return area / end
