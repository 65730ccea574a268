"""A study: all statements that are judged at one tier on one kind of device.

Holm's correction is over the statements of one target. Over a whole page of targets some of the
small p values are luck; the false-discovery rate says how many of those shown to expect.

A statement that an early look decides keeps that look's verdict, and the runs go on for the others.
A page also shows the estimate over all seeds (`repro.evidence.verdicts.verdict.AllSeeds`), whose
interval is at the level of the last look: with the earlier looks' it makes up the level of the
whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from repro.evidence.verdicts.claim_verdicts import judge
from repro.evidence.verdicts.verdict import AllSeeds, Verdict, with_discovery_rate
from repro.judge.check import Checked, device_name


def with_study(checks: Sequence[Checked]) -> list[Checked]:
    """Return the checks in their order, as a page shows them.

    Each verdict has its false-discovery rate over tier and device, and each of an earlier look the
    estimate over all seeds.
    """
    studies: dict[tuple[str, str | None], list[int]] = {}
    for index, checked in enumerate(checks):
        place = (checked.selection.tier.value, device_name(checked.evidence))
        studies.setdefault(place, []).append(index)
    final = [with_all_seeds(checked) for checked in checks]
    for indices in studies.values():
        rated = iter(with_discovery_rate([v for i in indices for v in final[i].verdicts]))
        for i in indices:
            own = [next(rated) for _ in final[i].verdicts]
            final[i] = dataclasses.replace(final[i], verdicts=own)
    return final


def with_all_seeds(checked: Checked) -> Checked:
    """Return a check whose verdicts of earlier looks have the estimate over all seeds."""
    target, evidence = checked.selection.target, checked.evidence
    judged = [
        (claim, verdict) for claim, verdict in checked.statements() if verdict.effect is not None
    ]
    if not target.looks or not judged:
        return checked
    metrics = {metric.name: metric for metric in target.metrics_at(checked.selection.tier)}
    last = judge(
        [claim for claim, _ in judged],
        metrics,
        {name: evidence.values(name) for name in metrics},
        {},
        {},
        {name: evidence.values_by_prompt(name) for name in metrics},
        target.looks[-1].alpha,
        [verdict.name for _, verdict in judged if verdict.status == "reproduced"],
    )
    by_name = {verdict.name: verdict for verdict in last}
    verdicts = [_with(verdict, by_name.get(verdict.name)) for verdict in checked.verdicts]
    return dataclasses.replace(checked, verdicts=verdicts)


def _with(verdict: Verdict, last: Verdict | None) -> Verdict:
    """Return an earlier look's verdict with the estimate of the last, any other as it is."""
    if last is None or last.effect is None or last.n <= verdict.n:
        return verdict
    every = AllSeeds(effect=last.effect, low=last.low, high=last.high, n=last.n)
    sign = "" if verdict.unit == "x" else "+"
    words = f"All {every.n} seeds: {every.effect:{sign}.3g} {verdict.unit}"
    if every.low is not None and every.high is not None:
        words += f", {every.low:{sign}.3g} to {every.high:{sign}.3g}"
    sentence = f"{verdict.sentence}. {words}; the verdict is that of the look at {verdict.n}"
    return dataclasses.replace(verdict, all_seeds=every, sentence=sentence)
