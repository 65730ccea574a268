"""Metrics of the test split along a run.

A run's last checkpoint is one draw of where it drifts; the mean of several late tests is a
measurement. The tests along the run are the series `test_steps`, `test_accuracy` (sampled) and
`test_accuracy_greedy`, in percent; the test at the end is the run's accuracy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from statistics import fmean

from repro.evidence.estimate import Estimate

# Share of a run's steps after which a test is a late one.
LATE = Fraction(2, 3)


def along(
    series: Mapping[str, Sequence[float | None]], steps: int, end: Mapping[str, Estimate]
) -> dict[str, Estimate]:
    """Return `test_late` and `test_area`, of sampled and (`_greedy`) of greedy answers.

    The first is the mean over the tests of the last third, the end among them; the second the mean
    height of the curve from the first test to the end, straight between tests. Both in percent;
    empty without tests along the run.

    Raises `ValueError` if the tests are not as many as their steps, or the steps do not rise.

    Parameters
    ----------
    steps
        Of the whole run.
    end
        Metrics of the final policy: `accuracy` and `accuracy_greedy`.
    """
    metrics: dict[str, Estimate] = {}
    for ending in ("", "_greedy"):
        heights = [float(value or 0.0) for value in series.get(f"test_accuracy{ending}", ())]
        places = [float(step or 0.0) for step in series.get("test_steps", ())]
        last = end.get(f"accuracy{ending}")
        if not heights or last is None or last.value is None:
            continue
        if len(places) != len(heights):
            raise ValueError(f"{len(heights)} tests at {len(places)} steps")
        places, heights = [*places, float(steps)], [*heights, last.value]
        late = [
            height for place, height in zip(places, heights, strict=True) if place >= LATE * steps
        ]
        from_first = [place - places[0] for place in places]
        metrics[f"test_late{ending}"] = Estimate(
            value=fmean(late),
            unit="percent",
            n=len(late),
            method="mean over the tests of the last third of the steps, the end among them",
        )
        metrics[f"test_area{ending}"] = Estimate(
            value=mean_height(from_first, heights, from_first[-1]),
            unit="percent",
            n=len(heights),
            method=f"mean height of the tests from step {places[0]:.0f} on, straight between them",
        )
    return metrics


def mean_height(places: Sequence[float], heights: Sequence[float], end: float) -> float:
    """Return the mean height of a polyline over [0, end]; it is constant after its last place.

    Raises `ValueError` if the places do not start at 0 or do not rise.

    Parameters
    ----------
    places
        Rising, from 0.
    """
    if not places or places[0] != 0 or any(b <= a for a, b in itertools.pairwise(places)):
        raise ValueError(f"the curve's places must rise from 0; found {places}")
    area = 0.0
    corners = [*zip(places, heights, strict=True), (max(end, places[-1]), heights[-1])]
    for (left, low), (right, high) in itertools.pairwise(corners):
        width = min(right, end) - left
        if width > 0:
            at_stop = low + (high - low) * width / (right - left)
            area += width * (low + at_stop) / 2
    return area / end
