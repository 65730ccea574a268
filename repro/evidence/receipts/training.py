"""Receipts of training: there were trainable parameters, and they moved, on rewarded rows."""

from __future__ import annotations

from collections.abc import Iterator

from repro.evidence.record import Record

# Centred advantages average to float32's rounding of values of order 1.
ADVANTAGE_MEAN_MOST = 1e-3
# Largest share of a run's rows whose gold could not be read or whose grader failed.
WITHOUT_REWARD_MOST = 0.01


def training(record: Record) -> Iterator[str]:
    """Yield why nothing could be trained, nothing was, or not for as long as the scale says."""
    arm = record.config["arm"]
    adapters = record.facts.get("adapter_modules")
    if arm["training"] == "lora" and not adapters:
        yield f"no adapter was attached (facts.adapter_modules is {adapters})"
    if arm["training"] == "full" and adapters:
        yield f"a fully trained arm carries {adapters} adapter modules"
    if not record.facts.get("parameters_trainable"):
        yield "facts.parameters_trainable is 0 or missing: nothing could be trained"
    change = record.facts.get("trained_change_l2")
    if not change or change < 0:
        yield f"facts.trained_change_l2 is {change}: training changed no parameter"
    steps, needed = record.facts.get("optimizer_steps"), _steps_needed(record)
    if steps != needed:
        yield f"{steps} optimiser steps were made; the scale has {needed}"


def _steps_needed(record: Record) -> int:
    """Return the steps after which the run was to end: the scale's, or at a test's accuracy."""
    scale, series = record.config["scale"], record.series
    steps, until = int(scale["steps"]), scale["evaluation"].get("until")
    if not until:
        return steps
    tests = zip(series.get("test_steps", ()), series.get("test_accuracy_greedy", ()), strict=False)
    return next((int(at or 0) for at, accuracy in tests if (accuracy or 0.0) >= until), steps)


def advantages(record: Record) -> Iterator[str]:
    """Yield why advantages were not centred within their groups."""
    offset = record.facts.get("advantage_group_mean_max")
    if offset is None or not 0 <= offset <= ADVANTAGE_MEAN_MOST:
        yield (
            "advantages were not centred within their groups (facts.advantage_group_mean_max is "
            f"{offset}; at most {ADVANTAGE_MEAN_MOST})"
        )


def rewards(record: Record) -> Iterator[str]:
    """Yield why there was nothing to learn from the rewards."""
    equal = record.series.get("zero_variance_groups")
    if not equal:
        yield "series zero_variance_groups is missing: nothing shows that rewards differed"
    elif all(value is not None and value >= 1 for value in equal):
        yield "all rewards of every group were equal in every step: there was nothing to learn"


def rows(record: Record) -> Iterator[str]:
    """Yield why a run trained on no rows, or on too many without a reward."""
    done = record.facts.get("rows") or {}
    trained, without = done.get("trained_on", 0), done.get("without_reward", 0)
    if not trained:
        yield "facts.rows.trained_on is 0 or missing: nothing was trained on"
    if without > WITHOUT_REWARD_MOST * trained:
        yield f"facts.rows.without_reward is {without} of {trained} rows; at most 1 % may be"
