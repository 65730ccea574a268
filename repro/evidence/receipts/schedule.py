"""Receipts of the series: as long as training was, and what the configuration asks of each step."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from repro.evidence.receipts.required import arm_of, differences, optimizer_of, rollouts
from repro.evidence.record import Record
from repro.spec.schedule import learning_rate_of_step, sigma_of_stage, stage_of_step

EVALUATED = ("evaluation_step", "evaluation_accuracy", "evaluation_tokens")
COMMON = ("loss", "entropy", "grad_norm", "learning_rate", "sigma", "sigma_realised", "noise_stage")
OF_ROLLOUTS = (
    "reward",
    "accuracy",
    "format",
    "completion_tokens",
    "truncation_rate",
    "ratio",
    "kl",
    "clip_fraction_low",
    "clip_fraction_high",
    "zero_variance_groups",
    "informative_groups",
    "prompts_consumed",
    "sampler_trainer_kl",
)
# Where the scale names a threshold.
OF_CURVES = ("accuracy_sampled", "tokens_sampled")


def lengths(record: Record) -> Iterator[str]:
    """Yield which series are missing, or not as long as there were steps or evaluations."""
    steps = record.config["scale"]["steps"]
    needed = COMMON + (OF_ROLLOUTS if record.procedure == "train" else ("tokens",))
    evaluation = record.config["scale"]["evaluation"]
    if record.procedure == "train" and evaluation.get("threshold"):
        needed += OF_CURVES
    left_out = record.effects.get("series_left_out", ())
    for name in needed:
        if name not in record.series and name not in left_out:
            yield f"series.{name} is missing"
    asked = _evaluations(record)
    for name, values in record.series.items():
        count, what = (asked, "evaluations") if name in EVALUATED else (steps, "steps")
        if len(values) != count:
            yield f"series.{name} has {len(values)} values; {count} {what} were made"


def _evaluations(record: Record) -> int:
    """Return how many evaluations the scale asks for during training."""
    evaluation, steps = record.config["scale"]["evaluation"], record.config["scale"]["steps"]
    every = evaluation["every"]
    if not every:
        return 0
    ends = [*rollouts(record)[1:], steps]
    begins = rollouts(record)
    due = sum(1 for begin, end in zip(begins, ends, strict=True) if begin // every != end // every)
    return due + bool(evaluation.get("token_budget", 0))


def rates(record: Record) -> Iterator[str]:
    """Yield the first step whose learning rate differs from the schedule's."""
    arm, optimizer = arm_of(record), optimizer_of(record)
    peak, steps = optimizer.learning_rates.of(arm), record.config["scale"]["steps"]
    needed = [learning_rate_of_step(optimizer, peak, step, steps) for step in range(steps)]
    yield from differences(record, "learning_rate", needed, "the schedule has")


def sigmas(record: Record) -> Iterator[str]:
    """Yield the first step with another stage or deviation of the added noise."""
    noise, steps = arm_of(record).noise, record.config["scale"]["steps"]
    starts = rollouts(record)
    of_step = [starts[bisect.bisect_right(starts, step) - 1] for step in range(steps)]
    stages = [0 if noise is None else stage_of_step(noise, step, steps) for step in of_step]
    deviations = [0.0 if noise is None else sigma_of_stage(noise, stage) for stage in stages]
    yield from differences(record, "noise_stage", stages, "the schedule has")
    yield from differences(record, "sigma", deviations, "the schedule has")
