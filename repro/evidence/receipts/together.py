"""What several records of a target say of each other: no run twice, and the same inputs for all.

A run's entropies and gradient norms are drawn from its seed and its arm: two runs that have them
equal, digit for digit, are one run under two names. Runs that only ask have their completions'
tokens instead. Within a seed two arms may be equal where their difference does nothing: noise as
the published code adds it is none.

Easy to get wrong: an arm that two names share is one record, met twice, and no copy; and a policy
that has collapsed answers every problem in the same words, whatever numbers are drawn, so that two
such runs may well agree. That its sampled completions are its greedy ones shows it; its entropies
and gradient norms on the way there are still its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from repro.evidence.derived import set_names
from repro.evidence.origins import PLAN_INPUT
from repro.evidence.record import Record
from repro.spec.config import digest_of

Records = Mapping[str, Mapping[int, Record]]
Place = tuple[str, int]
# Of a run: no two of them agree to the last digit over several steps.
TRACES = ("grad_norm", "entropy")
_STEPS_LEAST = 3
# Arms of one seed share random numbers, and policies that differ little may answer a few alike.
_COMPLETIONS_LEAST = 100


def refusals_together(records: Records) -> dict[Place, str]:
    """Return {(arm, seed): sentence} of the records that do not stand beside the others.

    Parameters
    ----------
    records
        Those that stand by themselves, by arm and seed.
    """
    sentences: dict[Place, str] = {}
    for place, sentence in (*_other_inputs(records), *_copies(records)):
        sentences.setdefault(place, sentence)
    return sentences


def _other_inputs(records: Records) -> Iterator[tuple[Place, str]]:
    """Yield the seeds of an arm whose inputs are not those of most of its seeds."""
    for arm, by_seed in records.items():
        names = {name for record in by_seed.values() for name in record.inputs}
        for name in sorted(names):
            if name.startswith(PLAN_INPUT):
                continue
            values = {seed: by_seed[seed].inputs.get(name) for seed in sorted(by_seed)}
            usual = Counter(values.values()).most_common(1)[0][0]
            for seed, value in values.items():
                if value != usual:
                    sentence = f"inputs.{name}: another {name.replace('_', ' ')} than most seeds of"
                    yield (arm, seed), f"{sentence} {arm} had ({(value or 'none')[:12]})"


def _copies(records: Records) -> Iterator[tuple[Place, str]]:
    """Yield the records that repeat another's numbers where runs of chance must differ."""
    first: dict[str, tuple[Place, Record]] = {}
    for arm, by_seed in sorted(records.items()):
        for seed, record in sorted(by_seed.items()):
            for name, trace in traces(record):
                place, other = first.setdefault(trace, ((arm, seed), record))
                if not _may_be_equal(record, other):
                    yield (arm, seed), f"{name} equals that of {place[0]}, seed {place[1]}"
                    yield place, f"{name} equals that of {arm}, seed {seed}"


def traces(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the name and a digest of each part of a record that chance makes its own."""
    for name in TRACES:
        values = record.series.get(name, [])
        if len(values) >= _STEPS_LEAST and len(set(values)) > 1:
            yield f"series.{name}", digest_of([name, values])
    tallies = record.effects.get("answers", {})
    names = (
        ["accuracy"]
        if "accuracy" in tallies
        else sorted(set_names(record.config["scale"]).keys() & tallies)
    )
    asked = sum(_asked(tallies[name]) for name in names)
    if asked >= _COMPLETIONS_LEAST and _sampled(record) and not _left_nothing_to_chance(tallies):
        tokens = [str(tallies[name]["completions"]) for name in names]
        yield f"effects.answers.{names[0]}.completions", digest_of(tokens)


def _asked(tally: Mapping[str, Any]) -> int:
    """Return the completions behind a tally: problems times samples of each."""
    problems_by_hits: list[int] = tally["right"]
    return sum(problems_by_hits) * (len(problems_by_hits) - 1)


def _left_nothing_to_chance(tallies: Mapping[str, Any]) -> bool:
    """Whether a policy's completions, one of each problem, are those that it gives greedily."""
    sampled, greedy = (tallies.get(name) for name in ("accuracy", "accuracy_greedy"))
    if not sampled or not greedy:
        return False
    return bool(sampled["completions"] == greedy["completions"])


def _sampled(record: Record) -> bool:
    return bool(record.config["scale"]["evaluation"]["sampling"]["temperature"])


def _may_be_equal(first: Record, second: Record) -> bool:
    """Whether two runs differ in nothing that acts."""
    return first.seed == second.seed and _acting(first) == _acting(second)


def _acting(record: Record) -> dict[str, Any]:
    """Return the arm without its names, and without noise where that touches nothing."""
    arm = {key: v for key, v in record.config["arm"].items() if key not in ("name", "label")}
    noise = arm.get("noise")
    return arm | ({"noise": None} if noise and noise["form"] == "as_published" else {})
