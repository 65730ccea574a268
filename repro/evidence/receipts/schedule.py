"""Receipts of the series: as long as training was, and what the configuration asks of each step."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from repro.evidence.derived import whole_series
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
# Of a training run whose record was checked whole when it was blessed, these may be left out of
# what is stored, by name in `effects.series_left_out`: nothing that is stored follows from them. So
# may series that follow from what is stored (`repro.evidence.derived.implied_series`).
MAY_BE_LEFT_OUT = frozenset({"loss", "sampler_trainer_kl"})
SHARES = (
    "accuracy",
    "accuracy_sampled",
    "format",
    "truncation_rate",
    "clip_fraction_low",
    "clip_fraction_high",
    "dual_clip_fraction",
    "zero_variance_groups",
    "informative_groups",
)
NOT_NEGATIVE = (
    "entropy",
    "grad_norm",
    "learning_rate",
    "sigma",
    "sigma_realised",
    "tokens_sampled",
)


def lengths(record: Record) -> Iterator[str]:
    """Yield which series are missing, or not as long as there were steps or evaluations."""
    steps = record.config["scale"]["steps"]
    needed = COMMON + (OF_ROLLOUTS if record.procedure == "train" else ("tokens",))
    evaluation = record.config["scale"]["evaluation"]
    if record.procedure == "train" and evaluation.get("threshold"):
        needed += OF_CURVES
    left_out: frozenset[str] = frozenset()
    if record.procedure == "train":
        left_out = MAY_BE_LEFT_OUT.intersection(record.effects.get("series_left_out", ()))
    present = whole_series(record)
    for name in needed:
        if name not in present and name not in left_out:
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


def bounds(record: Record) -> Iterator[str]:
    """Yield the first value of each series that no step can have."""
    for name in (*SHARES, *NOT_NEGATIVE):
        most = 1.0 if name in SHARES else float("inf")
        for step, value in enumerate(record.series.get(name, ())):
            if value is not None and not 0 <= value <= most * (1 + 1e-9):
                yield f"series.{name} at step {step} is {value}; it must lie between 0 and {most}"
                break
    if not any(record.series.get("grad_norm", [1.0])):
        yield "series.grad_norm is 0 at every step: there was no gradient"


def first_updates(record: Record) -> Iterator[str]:
    """Yield why a rollout's first update moved a ratio that is exactly 1 there, or clipped it."""
    if record.config["arm"]["loss"]["old_policy"] != "trainer":
        return
    firsts = set(rollouts(record))
    for name, right in (("ratio", 1.0), ("clip_fraction_low", 0.0), ("clip_fraction_high", 0.0)):
        values = record.series.get(name, ())
        needed = [
            right if step in firsts and value is not None else value
            for step, value in enumerate(values)
        ]
        yield from differences(record, name, needed, "in a rollout's first update it is")


def consumed(record: Record) -> Iterator[str]:
    """Yield why the prompts that were drawn are not those of the run's number of rollouts."""
    scale, series = record.config["scale"], record.series.get("prompts_consumed", [])
    if record.config["arm"]["loss"]["dynamic_sampling"]:
        drawn = (record.effects.get("rows") or {}).get("groups_drawn")
        if series and series[-1] != drawn:
            yield f"series.prompts_consumed ends with {series[-1]}; {drawn} groups were drawn"
        return
    per_rollout, updates = scale["prompts_per_rollout"], scale["updates_per_rollout"]
    needed = [per_rollout * (step // updates + 1) for step in range(scale["steps"])]
    yield from differences(record, "prompts_consumed", needed, "so many rollouts take")
