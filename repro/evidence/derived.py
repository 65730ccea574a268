"""Metrics as a function of the observations of a run: series, tallies of answers, seconds.

`derive` computes the metrics of a record whenever it is read. So metrics never disagree with the
observations, and a new metric is also available for old runs. Blessed records are stored with fewer
digits and series; for them the metrics computed at blessing are read (`repro.evidence.store`).
Means of a series over all or the first steps (`train_<series>_mean`, `train_<series>_to_<N>`) are
`Record.value`'s own.

A run's last checkpoint is one draw of where it drifts; the mean of several late tests is a
measurement. The tests along the run are the series `test_steps`, `test_accuracy` (sampled) and
`test_accuracy_greedy`, in percent; the test at the end is the run's accuracy.

`heldout_area` measures how fast accuracy grows: it is the mean of the held-out accuracy over the
first `budget` sampled training tokens, interpolated linearly between evaluations and constant after
the last. Tokens rather than steps, because a policy with longer answers computes more per step. An
area rather than the time to a threshold, because the choice of threshold could favour an arm.

If a scale has a threshold, the training curve is the share of correct completions in each rollout,
at the temperature of rollouts (1, Table 4) and with the arm's added noise. It needs no extra
evaluation, has a point per rollout, and is what the paper's Figures 7 and 12 show.

Easy to get wrong: a moving mean is known only after its last rollout, so the time to a threshold
includes that rollout.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from statistics import fmean
from typing import Any

from repro.evidence.at_k import VOTING_SAMPLES, majority_at_k, pass_at_k
from repro.evidence.estimate import Estimate, mean_interval
from repro.spec.facts import Facts

Series = Mapping[str, Sequence[float | None]]
EDGE_STEPS = 5
# Share of a run's steps after which a test is a late one.
LATE = Fraction(2, 3)
_MOST_PROBLEMS = 1_000_000
# Metrics besides the accuracy, each computed from one tally of the answers.
SHARES = {
    "right_lenient": "accuracy_lenient",
    "format": "format_rate",
    "working": "working_rate",
    "truncated": "truncation_rate",
}
# Those that are also computed for further test sets.
BESIDE_A_SET = ("accuracy_lenient", "truncation_rate")
# Width of the moving mean. With 64 completions per rollout and an accuracy near one half its
# standard error is 3 points; it delays a rise, which takes tens of rollouts, by two.
MOVING_ROLLOUTS = 5
# Width of the means for `collapsed`: twice as wide, so that one bad rollout is not a collapse.
COLLAPSE_ROLLOUTS = 10
COLLAPSED_BELOW = 0.5
# Share of truncated completions, tokens per completion, and entropy over its initial value.
COLLAPSED_CUT, COLLAPSED_TOKENS, COLLAPSED_ENTROPY = 0.3, 60.0, 2.0
# Samples of an attempt for which pass@k is formed after training, where there are as many.
EXPLORED_KS = (1, 4, 16, 64)
# Percent: blessing rounds series to six digits, and a mean may equal the threshold exactly.
_ROUNDING = 1e-4


def derive(
    procedure: str, scale: Mapping[str, Any], series: Series, facts: Facts
) -> dict[str, Estimate]:
    """Return all metrics that can be computed from the observations of a run.

    They depend on tallies of answers, series, seconds and the scale of the configuration. Empty
    for procedures that measure their metrics.

    Raises `ValueError` if observations contradict each other: cumulative counts that fall, or more
    votes than samples.
    """
    metrics: dict[str, Estimate] = {}
    try:
        for part in parts(procedure, scale, series, facts):
            metrics |= part()
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    # Leave out metrics without a value.
    return {name: metric for name, metric in metrics.items() if metric.value is not None}


def parts(
    procedure: str, scale: Mapping[str, Any], series: Series, facts: Facts
) -> list[Callable[[], dict[str, Estimate]]]:
    """Return what forms the metrics of `derive`, each from observations of its own."""
    if procedure not in ("train", "evaluate", "dose"):
        return []
    evaluation = scale["evaluation"]

    def of_answers() -> dict[str, Estimate]:
        return _answered(facts.get("answers") or {}, scale)

    found: list[Callable[[], dict[str, Estimate]]] = [of_answers]
    if procedure != "dose":
        found.append(lambda: derived_metrics(series, evaluation.get("token_budget", 0)))
        found.append(lambda: explored(facts))
    if procedure == "train":
        found.append(lambda: training_metrics(series, facts, evaluation))
        found.append(lambda: along(series, scale.get("steps", 0), of_answers()))
    return found


def set_names(scale: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the data of each further test set of a scale, by the name of its accuracy metric."""
    return {f"accuracy_{item['name']}": item["data"] for item in scale.get("test_sets", ())}


def _answered(tallies: Mapping[str, Any], scale: Mapping[str, Any]) -> dict[str, Estimate]:
    """Return the metrics of graded answers.

    A further test set has strict and lenient accuracy, truncation rate and estimates at k. Without
    a test split, accuracy and its companions are unweighted means over the further sets. The gain
    of greedy accuracy is there where both ends are known.
    """
    sets, at = set_names(scale), scale["evaluation"].get("at", ())
    metrics: dict[str, Estimate] = {}
    by_set = []
    for name, tally in tallies.items():
        if not sum(tally["right"]):
            continue  # nothing could be graded
        accuracy = share_of(tuple(tally["right"]))
        metrics[name] = accuracy
        if name != "accuracy" and name not in sets:
            continue
        beside = {metric: share_of(tuple(tally[part])) for part, metric in SHARES.items()}
        several = at_k_metrics(tally, at)
        if name == "accuracy":
            metrics |= beside | several
            continue
        by_set.append({"accuracy": accuracy} | beside | several)
        kept = several | {metric: beside[metric] for metric in BESIDE_A_SET}
        ending = name.removeprefix("accuracy")
        metrics |= {f"{metric}{ending}": estimate for metric, estimate in kept.items()}
    if by_set and "accuracy" not in tallies:
        for metric, first in by_set[0].items():
            metrics[metric] = Estimate(
                value=fmean([one[metric].value or 0.0 for one in by_set]),
                unit=first.unit,
                n=len(by_set),
                method=f"plain mean over {len(by_set)} sets",
            )
    start, end = (metrics.get(name) for name in ("accuracy_greedy_start", "accuracy_greedy"))
    if start and end:
        metrics["gain_greedy"] = Estimate(
            value=(end.value or 0.0) - (start.value or 0.0),
            unit="points",
            n=end.n,
            method="greedy accuracy after training minus before, same problems and weights",
        )
    return metrics


def derived_metrics(series: Series, token_budget: int) -> dict[str, Estimate]:
    """Return `heldout_area` and `heldout_last`; empty without a budget (0) or evaluations.

    Read are the series `evaluation_tokens` (from 0) and `evaluation_accuracy` (percent).
    """
    if not token_budget or not series.get("evaluation_accuracy"):
        return {}
    tokens = [float(value or 0.0) for value in series["evaluation_tokens"]]
    accuracy = [float(value or 0.0) for value in series["evaluation_accuracy"]]
    area = Estimate(
        value=mean_height(tokens, accuracy, float(token_budget)),
        unit="percent",
        n=len(tokens),
        method=f"mean of the held-out accuracy over the first {token_budget} sampled tokens; "
        "straight between evaluations, held after the last",
    )
    how = "held-out accuracy at the last evaluation"
    last = Estimate(value=accuracy[-1], unit="percent", method=how)
    return {"heldout_area": area, "heldout_last": last}


def along(series: Series, steps: int, end: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Return `test_late` and `test_area`, of sampled and (`_greedy`) of greedy answers.

    The first is the mean over the tests of the last third, the end among them; the second the mean
    height of the curve from the first test to the end, straight between tests. Both in percent;
    empty without tests along the run. `steps` are those of the whole run, `end` the metrics
    `accuracy` and `accuracy_greedy` of the final policy.

    Raises `ValueError` if the tests are not as many as their steps, or the steps do not rise.
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


def training_metrics(
    series: Series, facts: Facts, evaluation: Mapping[str, Any]
) -> dict[str, Estimate]:
    """Return the metrics of a training run that summarise a series or an effect in one number.

    The series are `reward` and `entropy` (nats), a value per step; the fact is `seconds`, of
    rollouts and of updates. Raises `ValueError` when the tokens sampled do not rise.
    """
    seconds = facts.get("seconds", {})
    timed = [seconds.get(name) for name in ("rollout_seconds", "update_seconds")]
    more: dict[str, Estimate] = {}
    if evaluation.get("threshold"):
        more |= curve_metrics(series, evaluation["threshold"])
        shares = series.get("informative_groups", ())
        teaching = [100.0 * share for share in shares if share is not None]
        more |= {
            "informative_first": _over({"percent": teaching}, "percent", "percent"),
            # Of completions that were not truncated: truncated ones are often repetitions.
            "entropy_start": _over(series, "entropy_finished", "nats"),
            "accuracy_start": _over(series, "accuracy_sampled", "share"),
        }
    return more | {
        "entropy_first": _over(series, "entropy", "nats"),
        "entropy_last": _over(series, "entropy", "nats", end="last"),
        "train_seconds": Estimate(
            value=None if None in timed else sum(timed),
            unit="seconds",
            method="rollouts and updates, by the clock",
        ),
    }


def curve_metrics(series: Series, threshold: float) -> dict[str, Estimate]:
    """Return when the curve reached a threshold in percent, and whether the run collapsed.

    The series are `accuracy_sampled` (share) and `tokens_sampled` (so far), a value per step; steps
    of one rollout repeat them. Raises `ValueError` when the tokens sampled do not rise.
    """
    steps, heights = _training_curve(series)
    smooth = _moving_means(heights, MOVING_ROLLOUTS)
    smoothed = f"moving mean over {MOVING_ROLLOUTS} rollouts of the training accuracy"
    place = _first_reaching(steps[MOVING_ROLLOUTS - 1 :], smooth, threshold)
    total = steps[-1] if steps else 0.0
    censored = f"; not reached: censored at the run's {total:.0f}" if place is None else ""
    return {
        "take_off_steps": Estimate(
            value=total if place is None else place,
            unit="steps",
            n=len(heights),
            method=f"steps of training until the {smoothed} reached {threshold:g} %, straight "
            f"between rollouts{censored}",
        ),
        "took_off": Estimate(
            value=float(place is not None),
            unit="share",
            n=len(heights),
            method=f"1 where the {smoothed} reached {threshold:g} %, else 0",
        ),
        "collapsed": _collapsed(series, heights),
    }


def _training_curve(series: Series) -> tuple[list[float], list[float]]:
    """Return each rollout's first step and its accuracy in percent.

    Rollouts without a graded completion are left out.
    """
    steps: list[float] = []
    heights: list[float] = []
    last = 0.0
    pairs = zip(series.get("tokens_sampled", ()), series.get("accuracy_sampled", ()), strict=True)
    for step, (tokens, accuracy) in enumerate(pairs, start=1):
        tokens = float(tokens or 0.0)
        if tokens < last:
            raise ValueError(f"series.tokens_sampled falls from {last} to {tokens}")
        if accuracy is not None and tokens > last:
            steps.append(float(step))
            heights.append(100.0 * accuracy)
        last = tokens
    return steps, heights


def _moving_means(heights: Sequence[float], width: int) -> list[float]:
    """Return the means of each `width` heights in a row; none where there are fewer."""
    return [fmean(heights[end - width : end]) for end in range(width, len(heights) + 1)]


def _first_reaching(
    places: Sequence[float], heights: Sequence[float], threshold: float
) -> float | None:
    """Return where a polyline first reaches a height, or None."""
    if heights and heights[0] >= threshold - _ROUNDING:
        return places[0]
    for (left, low), (right, high) in itertools.pairwise(zip(places, heights, strict=True)):
        if high >= threshold - _ROUNDING:
            return left + (right - left) * min(1.0, (threshold - low) / (high - low))
    return None


def _collapsed(series: Series, heights: Sequence[float]) -> Estimate:
    """Return whether a run collapsed: any of four signs in means over `COLLAPSE_ROLLOUTS` rollouts.

    The last accuracy is below half of the best; more than 30 % of completions were truncated, and
    more than at the start; completions of fewer than 60 tokens are less accurate than at the
    start; or entropy was above twice its initial value.
    """
    width = min(COLLAPSE_ROLLOUTS, len(heights))
    means = _moving_means(heights, width) if width else []
    signs = [means[-1] < COLLAPSED_BELOW * max(means) - _ROUNDING] if means else []
    cut, tokens, entropy = (
        _moving_means([value or 0.0 for value in series.get(name, ())], COLLAPSE_ROLLOUTS)
        for name in ("truncation_rate", "completion_tokens", "entropy")
    )
    if cut:
        signs.append(max(cut[1:], default=0.0) > max(COLLAPSED_CUT, cut[0]))
    if tokens and means:
        signs.append(tokens[-1] < COLLAPSED_TOKENS and means[-1] < means[0] - _ROUNDING)
    if entropy and series["entropy"][0]:
        signs.append(max(entropy) > COLLAPSED_ENTROPY * float(series["entropy"][0]))
    return Estimate(
        value=float(any(signs)) if means else None,
        unit="share",
        n=len(heights),
        method=f"over {width} rollouts: 1 where the last training accuracy is below "
        f"{COLLAPSED_BELOW:g} of the best, or over {100 * COLLAPSED_CUT:g} % are cut, or fewer "
        f"than {COLLAPSED_TOKENS:g} tokens earn less than at the start, or entropy is above "
        f"{COLLAPSED_ENTROPY:g} times its start; else 0",
    )


def at_k_metrics(tally: Mapping[str, Any], ks: Sequence[int]) -> dict[str, Estimate]:
    """Return mean@n, and pass@k and maj@k of each k, by both readings, of n samples per problem.

    The tally of sampled answers has `right` and `right_lenient`, the numbers of problems with 0, 1,
    ... n correct samples, and `votes` and `votes_lenient` (see `repro.evaluation.grades`). There is
    no maj@k of n above `VOTING_SAMPLES`.

    Raises `KeyError` or `ValueError` if votes are missing or exceed the number of samples, or if k
    is not in [1, n].
    """
    metrics: dict[str, Estimate] = {}
    if not ks or not sum(tally["right"]):
        return metrics
    for ending in ("", "_lenient"):
        hits = tally[f"right{ending}"]
        n = len(hits) - 1
        means = [(right / n, count) for right, count in enumerate(hits)]
        metrics[f"mean_at_{n}{ending}"] = _share_at(means, f"mean of {n} samples")
        for k in ks:
            of_k = {"pass": _pass_shares(hits, k)}
            if n == 1:  # the only vote, which wins if it is right
                of_k["maj"] = of_k["pass"]
            elif n <= VOTING_SAMPLES:
                votes = tally[f"votes{ending}"]
                of_k["maj"] = [
                    (majority_at_k(one["right"], one["wrong"], n, k), one["problems"])
                    for one in votes
                ]
            for name, shares in of_k.items():
                how = f"{name}@{k}, unbiased from {n} samples"
                metrics[f"{name}_at_{k}{ending}"] = _share_at(shares, how)
    return metrics


def explored(facts: Facts) -> dict[str, Estimate]:
    """Return `pass_at_<k>_explored` in percent and `entropy_explored` in nats a token.

    They are of what the trained policy samples at the rollouts' temperature. Raises `KeyError` if a
    part of what was observed is missing.
    """
    metrics: dict[str, Estimate] = {}
    tally = (facts.get("answers") or {}).get("accuracy_explored")
    if tally and sum(tally["right"]):
        n = len(tally["right"]) - 1
        for k in (k for k in EXPLORED_KS if k <= n):
            shares, how = _pass_shares(tally["right"], k), f"pass@{k}, unbiased from {n} samples"
            metrics[f"pass_at_{k}_explored"] = _share_at(shares, how)
    if observed := facts.get("explored"):
        metrics["entropy_explored"] = Estimate(
            value=observed["entropy_sum"] / observed["tokens"],
            unit="nats",
            n=observed["tokens"],
            method="mean over the tokens that the trained policy sampled",
        )
    return metrics


def _pass_shares(hits: Sequence[int], k: int) -> list[tuple[float, int]]:
    """Return pass@k and the number of problems, for each number of correct samples."""
    return [(pass_at_k(len(hits) - 1, right, k), count) for right, count in enumerate(hits)]


def _share_at(shares: Sequence[tuple[float, int]], how: str) -> Estimate:
    """Return the mean percentage of shares, weighted by their numbers of problems."""
    percents = [(100.0 * share, count) for share, count in shares]
    return mean_of_problems(
        _each(percents), "percent", f"{how}; mean over problems, 95 % t interval"
    )


def _over(series: Series, name: str, unit: str, end: str = "first") -> Estimate:
    """Return the mean of a series over the `first` or the `last` steps."""
    part = slice(EDGE_STEPS) if end == "first" else slice(-EDGE_STEPS, None)
    values = [value for value in series.get(name, ())[part] if value is not None]
    value, how = fmean(values) if values else None, f"mean over the {end} {EDGE_STEPS} steps"
    return Estimate(value=value, unit=unit, n=len(values), method=how)


# Cached: each target that reads a record needs it, and an exact deviation takes a millisecond.
@functools.lru_cache(maxsize=4096)
def share_of(tally: tuple[int, ...]) -> Estimate:
    """Return a mean percentage over problems with its 95 % t interval.

    The tally has the number of problems for which 0, 1, ... samples have the property.
    """
    samples = max(1, len(tally) - 1)  # none of a problem whose gold can be read
    return mean_of_problems(
        _each([(100.0 * n / samples, c) for n, c in enumerate(tally)]), "percent"
    )


def _each(percents: Sequence[tuple[float, int]]) -> list[float]:
    """Return the percentage of each problem; `ValueError` for more than any set has."""
    problems = sum(abs(count) for _, count in percents)
    if problems > _MOST_PROBLEMS:
        raise ValueError(f"a tally is of {problems:.3g} problems; needs {_MOST_PROBLEMS} or fewer")
    return [percent for percent, count in percents for _ in range(count)]


def mean_of_problems(
    values: Sequence[float], unit: str, method: str = "mean over problems, 95 % t interval"
) -> Estimate:
    """Return the mean of one value per problem with its 95 % t interval; None of no problem."""
    if not values:
        return Estimate(value=None, unit=unit, n=0, method=method)
    return Estimate(**asdict(mean_interval(values)), unit=unit, method=method)
