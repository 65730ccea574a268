"""Numbers of a run that follow from its other numbers, formed in one place for every procedure.

Procedures form them here, and so does `repro.evidence.receipts`, which refuses a record whose
numbers are not what its series and answers give.

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
from typing import Any

from repro.evidence.record import Estimate
from repro.evidence.statistics import mean_interval

Series = Mapping[str, Sequence[float | None]]
EDGE_STEPS = 5
HUMAN_METRICS = ("accuracy_mawps", "accuracy_svamp", "accuracy_gsm8k")


def derived_metrics(
    metrics: Mapping[str, Estimate],
    series: Series,
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


def training_metrics(series: Series, effects: Mapping[str, Any]) -> dict[str, Estimate]:
    """Return what the series and receipts of a run that trained by rewards say in one number each.

    Parameters
    ----------
    series
        `reward` and `entropy` (nats), one value a step.
    effects
        `seconds`, of rollouts and of updates.
    """
    first, last = slice(0, EDGE_STEPS), slice(-EDGE_STEPS, None)
    return {
        "train_reward_mean": _over(series, "reward", slice(None), "reward", "all steps"),
        "entropy_first": _over(series, "entropy", first, "nats", f"the first {EDGE_STEPS} steps"),
        "entropy_last": _over(series, "entropy", last, "nats", f"the last {EDGE_STEPS} steps"),
        "train_seconds": _seconds(
            effects, ("rollout_seconds", "update_seconds"), "rollouts and updates, by the clock"
        ),
    }


def tuning_metrics(series: Series, effects: Mapping[str, Any]) -> dict[str, Estimate]:
    """Return the same of a run that trained on worked solutions.

    Parameters
    ----------
    series
        `loss`, nats a token, one value a step.
    effects
        `seconds` of updates.
    """
    first, last = slice(0, EDGE_STEPS), slice(-EDGE_STEPS, None)
    return {
        "train_loss_first": _over(series, "loss", first, "nats", f"the first {EDGE_STEPS} steps"),
        "train_loss_last": _over(series, "loss", last, "nats", f"the last {EDGE_STEPS} steps"),
        "train_seconds": _seconds(effects, ("update_seconds",), "updates, by the clock"),
    }


def _over(series: Series, name: str, part: slice, unit: str, where: str) -> Estimate:
    values = [value for value in list(series.get(name, ()))[part] if value is not None]
    return Estimate(
        value=fmean(values) if values else None,
        unit=unit,
        n=len(values),
        method=f"mean over {where}",
    )


def _seconds(effects: Mapping[str, Any], names: Sequence[str], method: str) -> Estimate:
    seconds = effects.get("seconds", {})
    known = all(name in seconds for name in names)
    total = sum(seconds[name] for name in names) if known else None
    return Estimate(value=total, unit="seconds", method=method)


def gain(start: Estimate, end: Estimate) -> dict[str, Estimate]:
    """Return the greedy accuracy before training and the gain over it.

    Raises
    ------
    ValueError
        When one of the two has no value.
    """
    if start.value is None or end.value is None:
        raise ValueError("no test problem could be graded; the gain has no value")
    difference = Estimate(
        value=end.value - start.value,
        unit="points",
        n=end.n,
        method="greedy accuracy after training minus before, same problems and weights",
    )
    return {"accuracy_greedy_start": start, "gain_greedy": difference}


def share_of(tally: Sequence[int]) -> Estimate:
    """Return a mean percentage over problems with its 95 % t interval.

    Parameters
    ----------
    tally
        How many problems had 0, 1, ... of their samples so.
    """
    samples = len(tally) - 1
    values = [100.0 * hits / samples for hits, count in enumerate(tally) for _ in range(count)]
    return mean_of_problems(values, "percent")


def mean_of_problems(
    values: Sequence[float], unit: str, method: str = "mean over problems, 95 % t interval"
) -> Estimate:
    """Return the mean of one value a problem with its 95 % t interval."""
    interval = mean_interval(values)
    return Estimate(
        value=interval.value,
        unit=unit,
        low=interval.low,
        high=interval.high,
        n=len(values),
        method=method,
    )


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
