"""Receipts of learning: parameters moved, on rewarded rows, with the arm's added noise.

Grades have them, too: all test sets were evaluated, and nearly all answers could be graded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.evidence.derived import set_names
from repro.evidence.record import Record
from repro.spec.shapes import shape_by_name

# Centred advantages average to float32's rounding of values of order 1.
ADVANTAGE_MEAN_MOST = 1e-3
# Largest share, of a run's rows or a set's problems, whose gold could not be read or whose grader
# failed.
DROPPED_MOST = 0.01
# Realised sigma over hundreds of channels; five standard errors at 400 channels are 18 %.
SIGMA_RATIO = (0.75, 1.25)
# float32 draws are hardly ever 0; rounded to bfloat16, most of them may leave a gain unchanged.
CHANNELS_LEAST = 0.99


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
    scale, series = record.config["scale"], record.series
    needed, until = int(scale["steps"]), scale["evaluation"].get("until")
    if until:  # the run ends at the first test with this accuracy
        heights = series.get("test_accuracy_greedy", ())
        tests = zip(series.get("test_steps", ()), heights, strict=False)
        needed = next((int(at or 0) for at, height in tests if (height or 0.0) >= until), needed)
    steps = record.facts.get("optimizer_steps")
    if steps != needed:
        yield f"{steps} optimiser steps were made; the scale has {needed}"


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
    if without > DROPPED_MOST * trained:
        yield f"facts.rows.without_reward is {without} of {trained} rows; at most 1 % may be"


def noise(record: Record) -> Iterator[str]:
    """Yield why the noise of rollouts was not what its form adds: to how much, and how strong."""
    done, planned = record.facts.get("noise") or {}, record.config["arm"]["noise"] or {}
    form, rollouts = planned.get("form", "none"), done.get("rollouts_asked") or 0
    inert = form in ("none", "as_published")
    if not inert and not (done.get("modules") and done.get("channels_changed")):
        yield f"the added noise touched nothing: facts.noise is {done}"
        return
    norms = 0
    if not inert and rollouts:
        norms = (record.facts.get("norms_wrapped") or 1) - (form != "as_released")
    if done.get("modules") != norms:
        yield f"facts.noise.modules is {done.get('modules')}; the form perturbs {norms}"
    shape = shape_by_name(record.config["scale"]["checkpoint"])
    most = rollouts * norms * shape.hidden if shape is not None else math.inf
    least = CHANNELS_LEAST * most if shape is not None and form == "as_described" else 0
    if not least <= (done.get("channels_changed") or 0) <= most:
        yield (
            f"facts.noise.channels_changed is {done.get('channels_changed')}; {rollouts} rollouts "
            f"with {norms} norms have {most}"
        )
    if form == "as_described" and done.get("rollouts_perturbed") != rollouts:
        yield f"{done.get('rollouts_perturbed')} of {rollouts} noisy rollouts were really perturbed"
    yield from _strength(record, form, inert=inert)


def _strength(record: Record, form: str, *, inert: bool) -> Iterator[str]:
    """Yield why no noise of the asked strength was drawn, or some where there should be none."""
    asked, realised = (
        [value or 0.0 for value in record.series.get(name, [])]
        for name in ("sigma", "sigma_realised")
    )
    if inert:
        if any(realised):
            yield "series sigma_realised shows noise in an arm that adds none"
    elif not any(asked) or len(asked) != len(realised):
        yield "series sigma and sigma_realised do not show the added noise step by step"
    elif form == "as_described":
        low, high = SIGMA_RATIO
        for step, (planned, drawn) in enumerate(zip(asked, realised, strict=True)):
            if planned and not low <= drawn / planned <= high:
                yield (
                    f"step {step}: added noise had a deviation of {drawn:.3g}; "
                    f"asked for {planned:.3g}"
                )
                return


def at_start(record: Record) -> Iterator[str]:
    """Yield why noise of an arm that is measured before training was not there."""
    done = record.facts.get("noise_at_start") or {}
    if record.config["arm"]["noise"] and not done.get("channels_changed"):
        yield "the added noise touched nothing (facts.noise_at_start)"


def answers(record: Record) -> Iterator[str]:
    """Yield the test sets that were not evaluated, or of which too many answers were dropped.

    Any number may be dropped where nothing needs golds (`_needs_golds`).
    """
    tallies = record.facts.get("answers")
    if tallies is None:
        if "answers" not in record.facts.get("not_kept", ()):
            yield "facts.answers is missing: nothing shows the grades behind the accuracies"
        return
    scale = record.config["scale"]
    left_out = {f"accuracy_{name}" for name in record.facts.get("test_sets_left_out") or ()}
    # A mean over further sets has no answers of its own.
    names = [] if scale.get("accuracy_over") == "sets" else ["accuracy"]
    names += ["accuracy_greedy", *(["accuracy_greedy_start"] * (record.procedure == "train"))]
    for name in (*names, *(name for name in set_names(scale) if name not in left_out)):
        if name not in tallies:
            yield f"facts.answers.{name} is missing"
    for name, tally in tallies.items():
        problems, dropped = sum(tally["right"]), tally["dropped"]
        graded = problems and dropped <= DROPPED_MOST * (problems + dropped)
        if not graded and _needs_golds(record):
            yield f"facts.answers.{name}.dropped is {dropped} beside {problems} graded"


def _needs_golds(record: Record) -> bool:
    """Whether grades pay, or decide over a run as it goes; a user's own reward needs no golds."""
    tests = record.config["scale"]["evaluation"]
    decided = any(tests.get(name) for name in ("every", "until", "test_at"))
    return decided or not record.config["arm"].get("reward_function")


def grades(record: Record) -> Iterator[str]:
    """Yield why too many grades were dropped or given too late."""
    given = record.facts.get("grades")
    if not given:
        yield "facts.grades is missing: nothing shows that answers were graded"
        return
    total, late = sum(given.values()), given.get("timeout", 0)
    dropped = given.get("unparsable_gold", 0) + given.get("error", 0)
    if dropped > DROPPED_MOST * total and _needs_golds(record):
        yield f"facts.grades: {dropped} of {total} were dropped; at most 1 % may be"
    if late > DROPPED_MOST * total:
        yield f"facts.grades: {late} of {total} were over the time limit; at most 1 % may be"
