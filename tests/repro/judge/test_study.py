"""What a page shows of a study: the verdict of the planned look, the estimate of all seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import pytest

from repro.evidence.verdicts.statistics import mean_interval
from repro.evidence.verdicts.verdict import Verdict
from repro.judge.check import Checked, check_selection
from repro.judge.study import with_all_seeds
from repro.run.select import select
from repro.spec.effect import InterimAnalysis
from repro.spec.tier import Tier
from tests.repro.made_up import planned_record
from tests.repro.planned import STUDY, registered

LOOKS = (InterimAnalysis(seeds=5, alpha=0.01), InterimAnalysis(seeds=10, alpha=0.04))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    """Yield a made-up study with two looks and all of its seeds: QeRL ends ten points above."""
    folder = tmp_path_factory.mktemp("study")
    with registered(dataclasses.replace(STUDY, looks=LOOKS)):
        (selection,) = select([STUDY.name], tier=Tier.MINI.value)
        for run in selection.plan():
            planned_record(run, 10.0 * (run.arm.noise is not None)).write(folder)
        yield check_selection(selection, folder, folder)


def by_name(checked: Checked) -> Mapping[str, Verdict]:
    return {verdict.name: verdict for _, verdict in checked.statements()}


def test_an_early_looks_verdict_keeps_its_numbers_beside_those_of_all_seeds(
    judged: Checked,
) -> None:
    first, last = judged.selection.target.looks
    before, after = by_name(judged), by_name(with_all_seeds(judged))
    early = [name for name, verdict in before.items() if verdict.n == first.seeds]
    assert {"qerl_beats_lora", "aqn_helps"} <= set(early)
    values = judged.evidence.values("accuracy")
    claims = {claim.name: claim for claim, _ in judged.statements()}
    together = [
        claim
        for claim, verdict in judged.statements()
        if not claim.mechanism and verdict.status != "not testable"
    ]
    for name in ("qerl_beats_lora", "aqn_helps"):
        same = dataclasses.replace(after[name], all_seeds=None, sentence=before[name].sentence)
        assert same == before[name]
        every = after[name].all_seeds
        assert every is not None
        better, worse = (values[arm] for arm in claims[name].arms)
        assert every.n == last.seeds == len(better)
        level = 1 - last.alpha / len(together)
        interval = mean_interval([better[seed] - worse[seed] for seed in better], level)
        assert every.effect == pytest.approx(interval.value)
        assert interval.low is not None
        # Where Holm decides, the interval ends at no difference at the least.
        assert every.low in [pytest.approx(low) for low in (interval.low, max(0.0, interval.low))]
        assert every.high == pytest.approx(interval.high)
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
