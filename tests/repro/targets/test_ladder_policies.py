"""The needle over four pre-training seeds: whose runs, and what is compared."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from pathlib import Path
from unittest import mock

import pytest

from repro.evidence.bless import BlessError, bless
from repro.evidence.receipts.weights import precision
from repro.evidence.record import Estimate
from repro.evidence.store import Blessed
from repro.judge.blessed import blessed_checks
from repro.judge.check import Checked, check_selection
from repro.models.proxy_names import seeded, size_of
from repro.run.places import expected_folder
from repro.run.select import select
from repro.spec.shapes import shape_by_name
from repro.spec.target import differing_fields, plan
from repro.spec.tier import Tier
from repro.targets import TARGETS
from repro.targets.ladder import LADDER, OVER_POLICIES
from repro.targets.ladder.needle import NEEDLE_4
from repro.targets.ladder.policies import NEEDLE_POLICIES
from tests.repro.made_up import honest_proxy_record
from tests.repro.targets.test_ladder import runs_of

POLICIES = range(4)


def test_the_policies_are_the_needle_from_four_seeds_and_differ_in_nothing_else() -> None:
    runs = plan(NEEDLE_POLICIES, Tier.PROXY)
    own = NEEDLE_4.scales[Tier.PROXY].checkpoint
    names = dict.fromkeys(run.scale.checkpoint for run in runs)
    assert list(names) == [seeded(own, seed) for seed in POLICIES]
    assert NEEDLE_POLICIES.needs_at(Tier.PROXY).policies == tuple(names)
    for name in names:
        assert f"proxy-{size_of(name)}" == name
        assert shape_by_name(name) is not None
    scales = [dataclasses.replace(run.scale, seeds=()) for run in runs]
    assert all(differing_fields(scale, scales[0]) <= {"checkpoint"} for scale in scales)
    assert {run.seed for run in runs} == set(NEEDLE_POLICIES.scales[Tier.PROXY].seeds)
    assert len({run.digest() for run in runs}) == len(runs) == 4 * 4 * 8


def test_seed_0_runs_are_the_rungs_own_and_the_rest_stays_apart_from_the_ladder() -> None:
    runs = {run.digest() for run in plan(NEEDLE_POLICIES, Tier.PROXY)}
    rung = {run.digest() for run in plan(NEEDLE_4, Tier.PROXY)}
    assert len(runs & rung) == len(runs) / len(POLICIES)
    apart = {target.name for target in OVER_POLICIES}
    assert not apart & {target.name for target in LADDER}
    assert apart <= {target.name for target in TARGETS}
    ladder = {run.digest() for run in runs_of(*LADDER)}
    assert not (runs - rung) & ladder


def test_each_key_statement_is_the_rungs_own_over_policies() -> None:
    rung = {claim.name: claim for claim in NEEDLE_4.claims}
    names = [claim.name for claim in NEEDLE_POLICIES.claims]
    assert names == ["nvfp4_sooner", "aqn_sooner", "qerl_sooner", "opening_colder_later"]
    for claim in NEEDLE_POLICIES.claims:
        of_rung = rung[claim.name]
        assert claim.unit_of_replication == "pre-training seed"
        assert claim.effect == of_rung.effect
        assert claim.factor == ("checkpoint", *of_rung.factor)
        assert len(claim.paired_arms) == len(POLICIES)
        for policy, arms in zip(POLICIES, claim.paired_arms, strict=True):
            homes = [NEEDLE_POLICIES.home(arm) for arm in arms]
            assert tuple(arm for _, arm in homes) == of_rung.arms
            assert len({home.name for home, _ in homes}) == 1
            checkpoint = homes[0][0].scales[Tier.PROXY].checkpoint
            assert checkpoint == seeded("proxy-30m-needle4", policy)
        kinds = [(assay.kind, assay.metric or assay.claim) for assay in of_rung.assays]
        asked = [(assay.kind, assay.metric or assay.claim) for assay in claim.assays]
        for kind in kinds:
            assert asked.count(kind) == kinds.count(kind) * (4 if kind[0] == "range" else 1)
    assert NEEDLE_POLICIES.claims[0].effect is not None
    assert NEEDLE_POLICIES.claims[0].effect.paper == pytest.approx(2.31, abs=0.01)


def test_a_record_on_a_policy_of_another_seed_shows_its_rounding() -> None:
    (run,) = [
        run
        for run in plan(NEEDLE_POLICIES, Tier.PROXY, [216])
        if (run.target, run.arm.name) == ("needle_4_seed2", "nvfp4_lora")
    ]
    record = honest_proxy_record(run)
    assert list(precision(record)) == []
    effects = dict(record.effects)
    del effects["relative_weight_error_mean"]
    (reason,) = precision(dataclasses.replace(record, effects=effects))
    assert reason.endswith("nothing shows the rounding")


def write_policies(folder: Path, quotients: dict[str, list[float]], *, weights: int = 4) -> None:
    """Write records: of each arm BF16's steps over its own, by policy; so many differ."""
    with mock.patch("os.fsync"):
        for run in plan(NEEDLE_POLICIES, Tier.PROXY):
            record = honest_proxy_record(run)
            _, _, suffix = run.scale.checkpoint.partition("-seed")
            policy = int(suffix or 0)
            wobble = 1 + 0.02 * random.Random(run.digest()).random()
            steps = 60 * wobble / quotients.get(run.arm.name, [1.0] * 4)[policy]
            numbers = {
                "take_off_steps": Estimate(value=steps, unit="steps"),
                "took_off": Estimate(value=1.0, unit="share"),
                "informative_first": Estimate(value=30.0, unit="percent"),
            }
            digest = hashlib.sha256(str(min(policy, weights - 1)).encode()).hexdigest()
            dataclasses.replace(
                record,
                metrics=record.metrics | numbers,
                inputs=record.inputs | {"checkpoint": digest},
            ).write(folder)


def checked(folder: Path) -> Checked:
    (selection,) = select(["needle_policies"], tier="proxy")
    return check_selection(selection, folder, expected_folder(None))


@pytest.fixture(autouse=True)
def _made_up_numbers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is made up here are the numbers that are compared, not the runs behind them.
    monkeypatch.setattr("repro.judge.gathering.refusals", lambda *_: [])


def test_the_contrasts_are_judged_with_policies_as_the_unit(tmp_path: Path) -> None:
    helps = {
        "opening_colder": [1 / 1.9, 1 / 2.1, 1 / 2.0, 1 / 2.2],
        "nvfp4_lora": [2.3, 1.0, 1.0, 1.0],
        "nvfp4_lora_aqn": [2.2, 2.4, 2.0, 2.3],
    }
    write_policies(tmp_path, helps)
    outcome = checked(tmp_path)
    assert not outcome.evidence.refused
    verdicts = {verdict.name: verdict for verdict in outcome.verdicts}
    assert {verdict.n for verdict in verdicts.values()} == {4}
    assert verdicts["opening_colder_later"].status == "reproduced"
    assert verdicts["qerl_sooner"].status == "reproduced"
    assert verdicts["qerl_sooner"].paper == pytest.approx(2.16)
    # One network alone, as the rung's own verdict has it, would have shown the paper's size.
    assert verdicts["nvfp4_sooner"].status == "inconclusive"
    assert "by pre-training seed 2.3" in verdicts["nvfp4_sooner"].sentence


def test_without_the_control_in_these_policies_nothing_is_judged(tmp_path: Path) -> None:
    write_policies(tmp_path, {"nvfp4_lora_aqn": [2.2, 2.4, 2.0, 2.3]})
    verdicts = {verdict.name: verdict for verdict in checked(tmp_path).verdicts}
    assert verdicts["qerl_sooner"].status == "not testable"


def test_one_policy_under_two_names_is_refused(tmp_path: Path) -> None:
    write_policies(tmp_path, {}, weights=3)
    outcome = checked(tmp_path)
    assert any("trained one checkpoint" in reason for _, reason in outcome.evidence.refused)
    assert {verdict.status for verdict in outcome.verdicts} == {"not run"}


def test_it_is_judged_once_the_runs_of_all_its_policies_are_blessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blessed = {"needle_4", "needle_4_seed1", "needle_4_seed2"}
    monkeypatch.setattr(Blessed, "has", lambda _, target: target in blessed)
    source = Blessed(tmp_path, "proxy", "nvidia_h200")
    monkeypatch.setattr("repro.judge.blessed.blessed_sources", lambda _: [source])
    assert blessed_checks(tmp_path, "needle_policies") == []
    blessed.add("needle_4_seed3")
    (outcome,) = blessed_checks(tmp_path, "needle_policies")
    assert outcome.selection.target.name == "needle_policies"


def test_it_has_no_runs_of_its_own_to_bless(tmp_path: Path) -> None:
    with pytest.raises(BlessError, match="no runs of its own; bless needle_4, needle_4_seed1"):
        bless(NEEDLE_POLICIES, Tier.PROXY, {}, problems=[], expected=tmp_path)
