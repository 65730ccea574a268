"""Receipts of numbers: in their range, as the schedules have them, and as their own tallies give.

A stored record keeps the metrics that were formed before its series were rounded. Whatever its
tallies and series still give must be what it says.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from statistics import fmean, median

from repro.evidence.derived import parts
from repro.evidence.record import Record
from repro.spec.config import RunConfig
from repro.spec.schedule import learning_rate_of_run, sigma_of_stage, stage_of_step
from repro.spec.shapes import shape_by_name

# Of a checkpoint whose shape is not known: more than any has.
_MOST_TOKENS = 1_000_000
# Nats: an estimate of a divergence by samples may fall below 0 by its error.
_BELOW_ZERO = 0.05
# Relative: series are stored with six digits.
_DIGITS = 1e-4
_ZERO = 1e-9
# Ending of a dose's series with a value per prompt, of which the metric is the mean.
_BY_PROMPT = "_by_prompt"
# Entropies are stored with two; a sign of collapse may turn by that.
_COARSE = {"entropy_first": 0.05, "entropy_last": 0.05, "collapsed": math.inf}


def inputs(record: Record) -> Iterator[str]:
    """Yield the inputs without a digest, which nothing could be compared by."""
    problems = {"train": ("train_problems", "test_problems"), "evaluate": ("test_problems",)}
    own = problems.get(record.procedure, ("development_problems",))
    for name in ("checkpoint", "prompt_template", *own):
        if not record.inputs.get(name):
            yield f"inputs.{name} is missing"


def nats(record: Record) -> Iterator[str]:
    """Yield entropies and divergences, a token, that no distribution over the vocabulary has."""
    shape = shape_by_name(record.config["scale"].get("checkpoint", ""))
    most = math.log(shape.vocabulary if shape else _MOST_TOKENS)
    stated = [
        (f"metrics.{name}", [item.value])
        for name, item in record.metrics.items()
        if item.unit == "nats"
    ]
    series = [
        (f"series.{name}", values)
        for name, values in record.series.items()
        if name.startswith("entropy") or name == "sampler_trainer_kl"
    ]
    for name, values in (*stated, *series):
        least = 0.0 if "entropy" in name else -_BELOW_ZERO
        for value in values:
            if value is not None and not least <= value <= most:
                yield f"{name} is {value:.4g}; it must lie in [{least:g}, {most:.3g}] nats"
                break


def formed(record: Record) -> Iterator[str]:
    """Yield the metrics that are not what the record's own tallies and series give."""
    given: dict[str, float | None] = {}
    for part in parts(record.procedure, record.config["scale"], record.series, record.facts):
        # What was left out at blessing gives nothing.
        with contextlib.suppress(KeyError, IndexError, ValueError, ZeroDivisionError):
            given |= {name: item.value for name, item in part().items()}
    for name, values in record.series.items():
        known = [value for value in values if value is not None]
        if name.endswith(_BY_PROMPT) and known:
            given[name.removesuffix(_BY_PROMPT)] = fmean(known)
    yield from _unlike_given(record, given)


def steps(record: Record) -> Iterator[str]:
    """Yield the metrics of timed steps that are not the median of their own repeats."""
    known = {name: [v for v in record.series[name] if v is not None] for name in record.series}
    yield from _unlike_given(record, {name: median(of) for name, of in known.items() if of})


def memory(record: Record) -> Iterator[str]:
    """Yield the peaks of steps, planned and measured, that the facts of their points do not give.

    A measured peak is what the allocator reserved and the driver's context; a planned one the
    larger sum of the plan's two phases.
    """
    given: dict[str, float | None] = {}
    for point, ways in record.facts.get("points", {}).items():
        peak, planned = (f"{of}_bytes_{point}" for of in ("peak", "predicted"))
        measured, predicted = record.value(peak), record.value(planned)
        # Of the arm's own way of training, and of its baseline's.
        taken = [own for own in ways.values() if own.get("peak_bytes") == measured]
        if measured and not taken:
            given[peak] = next((own.get("peak_bytes") for own in ways.values()), None)
        for own in taken[:1]:
            if "reserved_bytes" in own:  # a CPU counts none
                given[peak] = own["reserved_bytes"] + own["context_bytes"]
            if "plan" in own:
                phases = [own["plan"][phase].values() for phase in ("rollout", "update")]
                given[planned] = max(map(sum, phases))
        if measured and predicted is not None:
            given[f"prediction_error_{point}"] = 100 * abs(predicted - measured) / measured
    yield from _unlike_given(record, given)


def ratios(record: Record) -> Iterator[str]:
    """Yield the ratios of linear layers over bfloat16 that their own seconds do not give."""
    given: dict[str, float | None] = {}
    scale = record.config["scale"]
    for place in (f"{block}_{rows}" for block in scale["blocks"] for rows in scale["rows"]):
        ours, plain = (record.value(f"seconds_{who}_{place}") for who in ("ours", "bf16"))
        if ours and plain is not None:
            given[f"ratio_{place}"] = plain / ours
    yield from _unlike_given(record, given)


def rates(record: Record) -> Iterator[str]:
    """Yield the rates of rollouts that their own seconds do not give.

    A rollout of N new tokens a row is its prefill and N - 1 steps.
    """
    given: dict[str, float | None] = {}
    for point in record.config["scale"]["points"]:
        new = point["new_tokens"]
        for batch in point["batches"]:
            place = f"{point['name']}_{batch}"
            prefill, step = (record.value(f"{of}_seconds_{place}") for of in ("prefill", "step"))
            if prefill is not None and step is not None:
                given[f"tokens_per_second_{place}"] = batch * new / (prefill + (new - 1) * step)
    yield from _unlike_given(record, given)


def _unlike_given(record: Record, given: Mapping[str, float | None]) -> Iterator[str]:
    for name, goal in given.items():
        value = record.value(name)
        if value is None or goal is None:
            continue
        if abs(value - goal) > _COARSE.get(name, _DIGITS) * abs(goal) + _ZERO:
            yield f"metrics.{name} is {value:.6g}; what it was formed of gives {goal:.6g}"


def schedules(record: Record, run: RunConfig) -> Iterator[str]:
    """Yield the first step whose rate, or added noise, is not that of the run's schedule."""
    if record.procedure != "train":
        return
    scale, noise = run.scale, run.arm.noise
    every = scale.updates_per_rollout
    rates = [learning_rate_of_run(run, step) for step in range(scale.steps)]
    sigmas = [0.0] * scale.steps
    if noise is not None:
        firsts = (step - step % every for step in range(scale.steps))
        sigmas = [sigma_of_stage(noise, stage_of_step(noise, step, scale.steps)) for step in firsts]
    for name, planned in (("learning_rate", rates), ("sigma", sigmas)):
        values = record.series.get(name)
        if values is None or len(values) != len(planned):
            yield f"series.{name} has {len(values or ())} values; the run has {len(planned)} steps"
            continue
        for step, (value, goal) in enumerate(zip(values, planned, strict=True)):
            if value is None or abs(value - goal) > _DIGITS * abs(goal):
                yield f"step {step}: {name} was {value}; the schedule has {goal:.6g}"
                break
