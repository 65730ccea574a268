"""Receipts of the metrics: formed again from series, answers and grades, by the rules in use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from statistics import fmean
from typing import Any

from repro.evidence.derived import (
    at_k_metrics,
    derived_metrics,
    distinct_metrics,
    gain,
    share_of,
    training_metrics,
    whole_series,
)
from repro.evidence.receipts.required import ASKED, TRAINED, close
from repro.evidence.record import Estimate, Record
from repro.spec.claim import Metric

# Of a set's problems, those whose gold could not be read or whose grader failed.
DROPPED_MOST = 0.01
DERIVED = (
    "gain_greedy",
    "heldout_area",
    "heldout_last",
    "take_off_steps",
    "take_off_tokens",
    "took_off",
    "train_area",
    "heldout_rise",
    "train_rise",
    "informative_first",
    "collapsed",
    "entropy_start",
    "entropy_early",
    "accuracy_start",
)
# Times are written to the second, at both ends.
_CLOCK_SECONDS = 2.0
# Of an answer's tallies: the metric of the plain evaluation that each one gives.
_SHARES = {
    "right_lenient": "accuracy_lenient",
    "format": "format_rate",
    "working": "working_rate",
    "truncated": "truncation_rate",
}


def units(record: Record, metrics: Mapping[str, Metric]) -> Iterator[str]:
    """Yield which numbers are not finite, not of their metric's unit, or beyond its bounds."""
    for name, estimate in record.metrics.items():
        metric = metrics.get(name)
        value, low = estimate.value, -100 if metric is not None and metric.change else 0
        if metric is not None and estimate.unit != metric.unit:
            yield f"metrics.{name}.unit is {estimate.unit!r}; the target's is {metric.unit!r}"
        if value is None:
            yield f"metric {name} is not a finite number"
        elif estimate.unit == "percent" and not low - 1e-9 <= value <= 100 + 1e-9:
            yield f"metric {name} is {value} percent; it must lie between {low} and 100"


def derived(record: Record) -> Iterator[str]:
    """Yield which metrics are not what the record's series and other metrics give."""
    implied = _derived(record)
    for name, needed in implied.items():
        yield from _compared(record, name, needed, "its series give")
    for name in DERIVED:
        if name in record.metrics and name not in implied:
            yield f"metrics.{name} is there without the numbers that it follows from"


def _derived(record: Record) -> dict[str, Estimate]:
    evaluation = record.config["scale"]["evaluation"]
    budget, series = evaluation.get("token_budget", 0), whole_series(record)
    try:
        implied = derived_metrics(series, budget)
    except (KeyError, ValueError):
        implied = {}  # the series of evaluations are refused by themselves
    if record.procedure == "train":
        try:
            implied |= training_metrics(series, record.effects, evaluation)
        except ValueError:  # the training curve is refused by itself
            implied |= training_metrics(series, record.effects, {})
    if record.procedure in TRAINED:
        start, end = (
            record.metrics.get(name) for name in ("accuracy_greedy_start", "accuracy_greedy")
        )
        if start and end and start.value is not None and end.value is not None:
            implied["gain_greedy"] = gain(start, end)["gain_greedy"]
    return implied


def _compared(record: Record, name: str, needed: Estimate, because: str) -> Iterator[str]:
    given = record.metrics.get(name)
    if given is None:
        yield f"metrics.{name} is missing; {because} {needed.value}"
        return
    for part in ("value", "low", "high"):
        if not close(getattr(given, part), getattr(needed, part)):
            yield (
                f"metrics.{name}.{part} is {getattr(given, part)}; "
                f"{because} {getattr(needed, part)}"
            )
    if given.n != needed.n:
        yield f"metrics.{name}.n is {given.n}; {because} {needed.n}"


def evaluations(record: Record) -> Iterator[str]:
    """Yield why the curve of held-out accuracy is not one over the steps of training."""
    steps, tokens = (record.series.get(f"evaluation_{name}", []) for name in ("step", "tokens"))
    for name, places in (("step", steps), ("tokens", tokens)):
        if any((b or 0) <= (a or 0) for a, b in itertools.pairwise(places)):
            yield f"series.evaluation_{name} does not rise: {places[:4]}..."
    if any(not 0 <= (value or 0) <= 100 for value in record.series.get("evaluation_accuracy", ())):
        yield "series.evaluation_accuracy leaves 0 to 100 percent"
    if steps and (steps[-1] or 0) > record.config["scale"]["steps"]:
        yield f"series.evaluation_step ends with {steps[-1]}; training had fewer steps"


def over_sets(record: Record) -> bool:
    """Whether a record's accuracy is the mean over its further test sets."""
    return bool(record.config["scale"].get("accuracy_over") == "sets")


def asked(record: Record) -> tuple[str, ...]:
    """Return the names of the metrics for which a run of its configuration asks questions."""
    scale, effects = record.config["scale"], record.effects
    left_out = effects.get("test_sets_left_out") or ()
    names = ["accuracy", "accuracy_greedy"]
    names += [
        f"accuracy_{item['name']}"
        for item in scale.get("test_sets", ())
        if item["name"] not in left_out
    ]
    return (*names, "accuracy_greedy_start") if record.procedure in TRAINED else tuple(names)


def all_asked(record: Record) -> Iterator[str]:
    """Yield which accuracies a run must have measured and has not."""
    for name in asked(record):
        if name not in record.metrics:
            yield f"metrics.{name} is missing; a run of this procedure measures it"


def answers(record: Record) -> Iterator[str]:
    """Yield which accuracies are not those of the answers that were graded."""
    tallies = record.effects.get("answers")
    if tallies is None:
        yield "effects.answers is missing: nothing shows the grades behind the accuracies"
        return
    for name in asked(record):
        # Over several sets an accuracy is a mean of theirs: nobody was asked for it alone.
        if name not in tallies and not (name == "accuracy" and over_sets(record)):
            yield f"effects.answers.{name} is missing"
    for name, tally in tallies.items():
        yield from _of_tally(record, name, tally)
    if over_sets(record):
        yield from _of_sets(record, tallies)
    yield from _right_problems(record, tallies)


def _of_sets(record: Record, tallies: Mapping[str, Any]) -> Iterator[str]:
    """Yield which metrics are not the plain means over the further test sets."""
    sets = [tally for name, tally in tallies.items() if name in set_sizes(record)]
    if not sets or not all(sum(tally["right"]) for tally in sets):
        return  # refused by itself
    for part, metric in {"right": "accuracy", **_SHARES}.items():
        shares = [share_of(tally[part]).value for tally in sets]
        yield from _mean_of_sets(record, metric, [share or 0.0 for share in shares])
    for metric, values in _several_of_sets(record, sets).items():
        yield from _mean_of_sets(record, metric, values)
    lengths = [tally["tokens"] / _samples(tally) for tally in sets]
    yield from _mean_of_sets(record, "completion_tokens_mean", lengths)


def _several_of_sets(record: Record, sets: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return each set's estimates from several samples, by metric."""
    at = record.config["scale"]["evaluation"].get("at", ())
    try:
        by_set = [at_k_metrics(tally, at) | distinct_metrics(tally) for tally in sets]
    except (KeyError, ValueError):
        return {}  # each set is refused by itself
    return {name: [one[name].value or 0.0 for one in by_set if name in one] for name in by_set[0]}


def _mean_of_sets(record: Record, name: str, values: list[float]) -> Iterator[str]:
    needed = Estimate(value=fmean(values), unit="", n=len(values))
    yield from _compared(record, name, needed, "the answers of its sets give")


def set_sizes(record: Record) -> dict[str, Mapping[str, Any]]:
    """Return the data of each further test set by the name of its accuracy."""
    sets = record.config["scale"].get("test_sets", ())
    return {f"accuracy_{item['name']}": item["data"] for item in sets}


def _samples(tally: Mapping[str, Any]) -> int:
    """Return how many answers were graded."""
    return int(sum(tally["right"]) * (len(tally["right"]) - 1))


def _of_tally(record: Record, name: str, tally: Mapping[str, Any]) -> Iterator[str]:
    problems = sum(tally["right"])
    because = f"effects.answers.{name} gives"
    if not problems or tally["dropped"] > DROPPED_MOST * (problems + tally["dropped"]):
        yield f"effects.answers.{name}.dropped is {tally['dropped']} beside {problems} graded"
        return
    if any(sum(tally[part]) != problems for part in _SHARES):
        yield f"effects.answers.{name} counts different problems in its parts"
        return
    yield from _compared(record, name, share_of(tally["right"]), because)
    if name == "accuracy":
        for part, metric in _SHARES.items():
            yield from _compared(record, metric, share_of(tally[part]), because)
        mean = record.metrics.get("completion_tokens_mean")
        if mean is None or not close(mean.value, tally["tokens"] / _samples(tally)):
            yield f"metrics.completion_tokens_mean is not that of {tally['tokens']} tokens"
    yield from _beside(record, name, tally, because)


def _beside(record: Record, name: str, tally: Mapping[str, Any], because: str) -> Iterator[str]:
    """Yield which numbers of sampled answers, beside their accuracy, are not those of the grades.

    Of a further set: the lenient accuracy and the truncation rate; of all: the means at n samples.
    """
    if name != "accuracy" and name not in set_sizes(record):
        return
    ending = name.removeprefix("accuracy")
    mean = f"mean_at_{len(tally['right']) - 1}"
    needed = {f"{mean}{ending}": "right", f"{mean}_lenient{ending}": "right_lenient"}
    if ending:
        needed |= {f"accuracy_lenient{ending}": "right_lenient"}
        needed |= {f"truncation_rate{ending}": "truncated"}
    for metric, part in needed.items():
        if metric in record.metrics:
            yield from _compared(record, metric, share_of(tally[part]), because)
    yield from _of_several(record, name, tally, because)


def _of_several(record: Record, name: str, tally: Mapping[str, Any], because: str) -> Iterator[str]:
    """Yield which estimates from several samples per problem are not those of the grades."""
    at, ending = record.config["scale"]["evaluation"].get("at", ()), name.removeprefix("accuracy")
    odd = next(_odd_votes(record, tally), None)
    if odd is not None:
        yield f"effects.answers.{name}.{odd}"
        return
    try:
        needed = at_k_metrics(tally, at) | distinct_metrics(tally)
    except (KeyError, ValueError) as error:
        yield f"effects.answers.{name} gives no estimate at k = {list(at)}: {error}"
        return
    for metric, estimate in needed.items():
        yield from _compared(record, f"{metric}{ending}", estimate, because)
    if "distinct_correct" not in needed and f"distinct_correct{ending}" in record.metrics:
        yield f"metrics.distinct_correct{ending} is there; {because} none"


def _odd_votes(record: Record, tally: Mapping[str, Any]) -> Iterator[str]:
    """Yield which votes or different completions are not those of as many right answers."""
    right, distinct = tally["right"], tally.get("distinct_right", tally["right"])
    fits = len(distinct) == len(right) and distinct[0] == right[0]
    if not fits or sum(distinct) != sum(right) or _right(distinct) > _right(right):
        yield f"distinct_right is {distinct}; right is {right}"
    for part, hits in (("votes", right), ("votes_lenient", tally["right_lenient"])):
        if part not in tally:
            continue
        votes, samples = tally[part], len(hits) - 1
        most = max((sum(one["right"]) + sum(one["wrong"]) for one in votes), default=0)
        if most > samples:
            yield f"{part} has {most} votes of a problem; it has {samples} samples"
            return
        by_hits = [
            sum(one["problems"] for one in votes if sum(one["right"]) == number)
            for number in range(samples + 1)
        ]
        # A grader killed for being late may have graded one answer in two ways.
        late = record.effects.get("grader_workers_killed")
        if sum(by_hits) != sum(hits) or (by_hits != hits and not late):
            yield f"{part} has {by_hits} problems by right votes; the grades have {hits}"


def _right_problems(record: Record, tallies: Mapping[str, Any]) -> Iterator[str]:
    """Yield which sets are not as large as the scale says."""
    scale, sizes = record.config["scale"], set_sizes(record)
    for name, tally in tallies.items():
        if name not in sizes and over_sets(record):
            data = {"source": "sets", "test_problems": _in_all(sizes)}
        else:
            data = sizes.get(name, scale["data"])
        most, count = data["test_problems"], sum(tally["right"]) + tally["dropped"]
        if most and (count > most or (_makes_all(data) and count != most)):
            yield f"effects.answers.{name} has {count} problems; the scale asks {most}"


def _in_all(sizes: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many problems all sets have at most; 0 where one of them leaves it open."""
    counts = [int(data["test_problems"]) for data in sizes.values()]
    return sum(counts) if all(counts) else 0


def _makes_all(data: Mapping[str, Any]) -> bool:
    """Whether a source has as many problems as it is asked; a folder may have fewer."""
    return str(data["source"]).startswith("generated")


def grades(record: Record) -> Iterator[str]:
    """Yield why the grades given are not those of what was asked and sampled."""
    given, tallies = record.effects.get("grades"), record.effects.get("answers") or {}
    if not given:
        yield "effects.grades is missing: nothing shows that answers were graded"
        return
    total = sum(given.values())
    dropped = given.get("unparsable_gold", 0) + given.get("error", 0)
    if dropped > DROPPED_MOST * total:
        yield f"effects.grades: {dropped} of {total} were dropped; at most 1 % may be"
    late = given.get("timeout", 0)
    if late > DROPPED_MOST * total:
        yield f"effects.grades: {late} of {total} were over the time limit; at most 1 % may be"
    due = _grades_due(record, tallies)
    if total < due:
        yield f"effects.grades counts {total} grades; {due} were due"
    known = sum(_right(tally[part]) for tally in tallies.values() for part in _GRADED)
    known += _right_in_training(record)
    exact = record.procedure == "evaluate" and not dropped
    if given.get("ok", 0) < known or (exact and given.get("ok", 0) != known):
        yield f"effects.grades.ok is {given.get('ok', 0)}; the answers show {known} right"


_GRADED = ("right", "right_lenient")


def _right(tally: list[int]) -> int:
    return sum(count * number for number, count in enumerate(tally))


def _right_in_training(record: Record) -> int:
    """Return how many of the rows trained on were right, where every rollout was taken whole."""
    scale = record.config["scale"]
    if record.procedure != "train" or record.config["arm"]["loss"]["dynamic_sampling"]:
        return 0
    rows = scale["prompts_per_rollout"] * scale["group_size"] // scale["updates_per_rollout"]
    return int(rows * sum(min(1.0, value or 0.0) for value in record.series.get("accuracy", ())))


def _grades_due(record: Record, tallies: Mapping[str, Any]) -> int:
    """Return how many grades a run gives at least, a strict and a lenient one for an answer.

    One that was resumed asked some questions twice; a scale may not say how many are held out.
    """
    scale, evaluation = record.config["scale"], record.config["scale"]["evaluation"]
    due = sum(
        (sum(tally["right"]) + tally["dropped"]) * (len(tally["right"]) - 1)
        for tally in tallies.values()
    )
    if record.procedure in TRAINED and evaluation["every"]:
        held_out = scale["data"]["development_problems"] * _makes_all(scale["data"])
        due += held_out * len(record.series.get("evaluation_step", ()))
    if record.procedure == "train":
        groups = (record.effects.get("rows") or {}).get("groups_drawn", 0)
        due += groups * scale["group_size"]
    return len(_GRADED) * int(due)


def elapsed(record: Record) -> Iterator[str]:
    """Yield why a run's seconds are more than those between its start and its end."""
    spent = sum((record.effects.get("seconds") or {}).values())
    began, ended = (datetime.fromisoformat(time) for time in (record.started, record.finished))
    alone = record.procedure in ASKED and "together" not in record.effects
    if alone and spent > (ended - began).total_seconds() + _CLOCK_SECONDS:
        yield f"effects.seconds adds up to {spent:.0f}; {ended - began} passed"
