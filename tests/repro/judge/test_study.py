"""What a page shows of a study: the verdict of the planned look, the estimate of all seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import pytest

from repro.evidence.statistics import mean_interval
from repro.evidence.store import blessed_sources
from repro.evidence.verdict import Verdict
from repro.judge.check import Checked, check_selection
from repro.judge.study import with_all_seeds
from repro.run.places import expected_folder
from repro.run.select import select
from repro.spec.tier import Tier

EXPECTED = expected_folder(None)


@pytest.fixture(scope="module")
def judged() -> Checked:
    """Return the blessed rung of 4 %, which has two looks and all of its seeds."""
    (selection,) = select(["needle_4"], tier="proxy")
    return check_selection(selection, blessed_sources(EXPECTED, Tier.PROXY)[0], EXPECTED)


def by_name(checked: Checked) -> Mapping[str, Verdict]:
    return {verdict.name: verdict for _, verdict in checked.statements()}


def test_an_early_looks_verdict_keeps_its_numbers_beside_those_of_all_seeds(
    judged: Checked,
) -> None:
    first, last = judged.selection.target.looks
    before, after = by_name(judged), by_name(with_all_seeds(judged))
    early = [name for name, verdict in before.items() if verdict.n == first.seeds]
    assert {"nvfp4_sooner", "opening_colder_later"} <= set(early)
    steps = judged.evidence.values("take_off_steps")
    claims = {claim.name: claim for claim, _ in judged.statements()}
    for name in early:
        same = dataclasses.replace(after[name], all_seeds=None, sentence=before[name].sentence)
        assert same == before[name]
        every = after[name].all_seeds
        assert every is not None
        assert every.n == last.seeds == len(steps["bf16_lora"])
        slower, faster = (steps[arm] for arm in claims[name].arms)
        logarithms = [math.log(slower[seed] / faster[seed]) for seed in slower]
        level = 1 - last.alpha / len(before)
        interval = mean_interval(logarithms, level)
        assert interval.low is not None
        assert interval.high is not None
        assert every.effect == pytest.approx(math.exp(interval.value))
        # Where Holm decides, the interval ends at no difference at the least.
        lows = (math.exp(interval.low), max(1.0, math.exp(interval.low)))
        assert every.low in [pytest.approx(low) for low in lows]
        assert every.high == pytest.approx(math.exp(interval.high))
        assert f"All {every.n} seeds" in after[name].sentence


def test_what_the_last_look_decided_or_left_open_has_no_second_estimate(judged: Checked) -> None:
    after = by_name(with_all_seeds(judged))
    late = [
        verdict
        for verdict in after.values()
        if verdict.n == judged.selection.target.looks[-1].seeds
    ]
    assert late
    assert all(verdict.all_seeds is None for verdict in late)


def test_with_the_first_looks_seeds_alone_there_is_nothing_to_add(judged: Checked) -> None:
    first = judged.selection.target.looks[0].seeds
    part = judged.evidence.at(judged.evidence.planned[:first])
    early = [verdict for verdict in judged.verdicts if verdict.n == first]
    checked = dataclasses.replace(judged, evidence=part, verdicts=early)
    assert with_all_seeds(checked) == checked


def test_a_target_without_looks_stays_as_it_is(judged: Checked) -> None:
    target = dataclasses.replace(judged.selection.target, looks=())
    selection = dataclasses.replace(judged.selection, target=target)
    checked = dataclasses.replace(judged, selection=selection)
    assert with_all_seeds(checked) is checked
