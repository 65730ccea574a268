"""Receipts of training: that something could move, did, and by what it was paid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from repro.evidence.derived import implied_series, rows_of_step, tokens_of_steps, whole_series
from repro.evidence.receipts.required import close, differences, rollouts
from repro.evidence.record import Record

# Centred advantages average to float32's rounding of values of order 1.
ADVANTAGE_MEAN_MOST = 1e-3
# Of a run's rows, those whose gold could not be read or whose grader failed.
WITHOUT_REWARD_MOST = 0.01


def training(record: Record) -> list[str]:
    """Return why nothing could be trained, nothing was, or not for as long as the scale says."""
    arm, scale = record.config["arm"], record.config["scale"]
    faults = []
    adapters = record.effects.get("adapter_modules")
    if arm["training"] == "lora" and not adapters:
        faults.append(f"no adapter was attached (effects.adapter_modules is {adapters})")
    if arm["training"] == "full" and adapters:
        faults.append(f"a fully trained arm carries {adapters} adapter modules")
    if not record.effects.get("parameters_trainable"):
        faults.append("effects.parameters_trainable is 0 or missing: nothing could be trained")
    if not record.effects.get("trained_change_l2"):
        faults.append("effects.trained_change_l2 is 0 or missing: training changed no parameter")
    steps = record.effects.get("optimizer_steps")
    if steps != scale["steps"]:
        faults.append(f"{steps} optimiser steps were made; the scale has {scale['steps']}")
    return faults


def advantages(record: Record) -> list[str]:
    """Return why advantages were not centred within their groups."""
    offset = record.effects.get("advantage_group_mean_max")
    if offset is None or not 0 <= offset <= ADVANTAGE_MEAN_MOST:
        return [
            "advantages were not centred within their groups (effects.advantage_group_mean_max is "
            f"{offset}; at most {ADVANTAGE_MEAN_MOST})"
        ]
    return []


def rewards(record: Record) -> list[str]:
    """Return why there was nothing to learn from the rewards."""
    equal = record.series.get("zero_variance_groups")
    if not equal:
        return ["series zero_variance_groups is missing: nothing shows that rewards differed"]
    if all(value is not None and value >= 1 for value in equal):
        return ["all rewards of every group were equal in every step: there was nothing to learn"]
    return []


def rows(record: Record) -> Iterator[str]:
    """Yield which counts of a run's rows are not those of its scale and series."""
    scale, done = record.config["scale"], record.effects.get("rows") or {}
    per_rollout = scale["prompts_per_rollout"] * scale["group_size"]
    most = per_rollout * len(rollouts(record))
    drawn = (done.get("groups_drawn") or 0) * scale["group_size"]
    refill = record.config["arm"]["loss"]["dynamic_sampling"]
    if drawn < most or drawn > most * max(refill, 1) or (not refill and drawn != most):
        yield f"effects.rows.groups_drawn is {done.get('groups_drawn')}; {most} rows were due"
    trained = done.get("trained_on", 0)
    if not 0 < trained <= most or (not refill and trained != most):
        yield f"effects.rows.trained_on is {trained}; the rollouts had {most} rows"
    without = done.get("without_reward", 0)
    if without > WITHOUT_REWARD_MOST * max(trained, 1):
        yield f"effects.rows.without_reward is {without} of {trained} rows; at most 1 % may be"
    if not refill:
        yield from _lengths(record)


def _lengths(record: Record) -> Iterator[str]:
    """Yield why tokens and truncated rows are not the sums of what the steps say."""
    done, scale = record.effects.get("rows") or {}, record.config["scale"]
    lengths = tokens_of_steps(record)
    if len(lengths) != scale["steps"] or scale["steps"] % scale["updates_per_rollout"]:
        return
    tokens = sum(lengths)
    compared = (record.effects.get("sampler_trainer_by_quarter") or {}).get("tokens", ())
    # Lengths that were blessed are rounded.
    slack = 1 + 1e-5 * tokens
    if "tokens_sampled" in done and abs(done["tokens_sampled"] - tokens) > slack:
        yield (
            f"effects.rows.tokens_sampled is {done['tokens_sampled']}; "
            f"series.completion_tokens adds up to {tokens:.0f}"
        )
    if abs(sum(compared) - tokens) > slack:
        yield (
            f"effects.sampler_trainer_by_quarter compares {sum(compared)} tokens; "
            f"series.completion_tokens adds up to {tokens:.0f}"
        )
    shares = [value or 0.0 for value in record.series.get("truncation_rate", ())]
    if abs(done.get("truncated", 0) - rows_of_step(record) * sum(shares)) > 0.5:
        yield f"effects.rows.truncated is {done.get('truncated')}; series.truncation_rate differs"


def curve(record: Record) -> Iterator[str]:
    """Yield why the training curve is not that of the rollouts that were trained on."""
    series, done = whole_series(record), record.effects.get("rows") or {}
    tokens = series.get("tokens_sampled", [])
    if not tokens or "accuracy_sampled" not in series:
        return
    if any((b or 0) < (a or 0) for a, b in itertools.pairwise(tokens)):
        yield "series.tokens_sampled falls; it counts all tokens so far"
    if not close(tokens[-1], done.get("tokens_sampled")):
        yield (
            f"series.tokens_sampled ends with {tokens[-1]}; effects.rows.tokens_sampled is "
            f"{done.get('tokens_sampled')}"
        )
    scale = record.config["scale"]
    if record.config["arm"]["loss"]["dynamic_sampling"] or scale["updates_per_rollout"] > 1:
        return  # what was trained on in a step is a part of what was sampled
    yield from differences(
        record, "accuracy_sampled", series.get("accuracy", ()), "all that was sampled earned"
    )
    sums = implied_series(record)["tokens_sampled"]
    yield from differences(record, "tokens_sampled", sums, "series.completion_tokens adds up to")


def paid(record: Record) -> Iterator[str]:
    """Yield why a step's mean reward is not what its answers and formats earn."""
    needed = implied_series(record).get("reward", ())
    yield from differences(record, "reward", needed, "its answers and formats earn")
