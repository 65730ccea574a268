"""Receipts of grading: all test sets were evaluated, and nearly all answers could be graded."""

from __future__ import annotations

from collections.abc import Iterator

from repro.evidence.derived import set_names
from repro.evidence.record import Record

# Largest share of a set's problems whose gold could not be read or whose grader failed.
DROPPED_MOST = 0.01


def answers(record: Record) -> Iterator[str]:
    """Yield the test sets that were not evaluated, or of which too many answers were dropped."""
    tallies = record.facts.get("answers")
    if tallies is None:
        if "answers" not in record.facts.get("not_kept", ()):
            yield "facts.answers is missing: nothing shows the grades behind the accuracies"
        return
    for name in _asked(record):
        if name not in tallies:
            yield f"facts.answers.{name} is missing"
    for name, tally in tallies.items():
        problems, dropped = sum(tally["right"]), tally["dropped"]
        if not problems or dropped > DROPPED_MOST * (problems + dropped):
            yield f"facts.answers.{name}.dropped is {dropped} beside {problems} graded"


def _asked(record: Record) -> list[str]:
    scale = record.config["scale"]
    left_out = {f"accuracy_{name}" for name in record.facts.get("test_sets_left_out") or ()}
    # A mean over further sets has no answers of its own.
    names = [] if scale.get("accuracy_over") == "sets" else ["accuracy"]
    names += ["accuracy_greedy", *(["accuracy_greedy_start"] * (record.procedure == "train"))]
    return names + [name for name in set_names(scale) if name not in left_out]


def grades(record: Record) -> Iterator[str]:
    """Yield why too many grades were dropped or given too late."""
    given = record.facts.get("grades")
    if not given:
        yield "facts.grades is missing: nothing shows that answers were graded"
        return
    total, late = sum(given.values()), given.get("timeout", 0)
    dropped = given.get("unparsable_gold", 0) + given.get("error", 0)
    if dropped > DROPPED_MOST * total:
        yield f"facts.grades: {dropped} of {total} were dropped; at most 1 % may be"
    if late > DROPPED_MOST * total:
        yield f"facts.grades: {late} of {total} were over the time limit; at most 1 % may be"
