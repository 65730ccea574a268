"""The analysis plan: fixed before the runs, carried by their records, held to by check."""

import dataclasses
import json
import re

import pytest

from repro.evidence import derived
from repro.evidence.plans import KeptPlan, keep_plans, read_plans
from repro.evidence.record import failed_record
from repro.evidence.verdicts import claim_verdicts, sizes, statistics
from repro.evidence.verdicts.rules import rules
from repro.judge.check import check_selection
from repro.judge.gathering import gather
from repro.report.ending import ending
from repro.report.verdict_words import Kind, counted, of_kind
from repro.run import analysis_plan as plans
from repro.run.places import expected_folder
from repro.run.select import Changes, select
from repro.spec.claim import planned
from repro.spec.config import digest_of
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import planned_record

pytestmark = pytest.mark.usefixtures("planned_targets")


def selected(name):
    (selection,) = select([name], tier="mini")
    return selection


def write(name, runs, maker=planned_record, seeds=None):
    for run in selected(name).plan(seeds):
        maker(run).write(runs)


def test_a_record_carries_the_plan_of_every_target_that_reads_it(tmp_path):
    (run,) = selected("study").plan(1, ["nvfp4_lora_aqn"])
    carried = {key.removeprefix("plan:") for key in plans.plan_inputs(run)}
    assert carried == {"study", "study_schedules"}


def test_claims_and_seeds_are_part_of_a_plan():
    figure = find("study_schedules")
    first = plans.analysis_plan(figure, Tier.MINI)
    fewer_claims = dataclasses.replace(figure, claims=figure.claims[1:])
    assert plans.analysis_plan(fewer_claims, Tier.MINI) != first
    fewer = {Tier.MINI: dataclasses.replace(figure.scales[Tier.MINI], seeds=(0, 1))}
    assert plans.analysis_plan(dataclasses.replace(figure, scales=fewer), Tier.MINI) != first


def test_check_refuses_records_of_another_plan_or_of_none(tmp_path):
    write("study_schedules", tmp_path)
    evidence = gather(selected("study_schedules"), tmp_path, expected_folder(None))
    assert evidence.count == 20
    assert not evidence.refused
    (run,) = selected("study_schedules").plan([5], ["aqn_linear"])
    path = tmp_path / "mini" / "study_schedules" / "aqn_linear" / "seed-5.json"
    for inputs, words in (
        ({"plan:study_schedules": "0" * 64}, "plan of study_schedules"),
        ({}, "before study_schedules had an analysis plan"),
    ):
        path.unlink()
        record = planned_record(run)
        others = {key: value for key, value in record.inputs.items() if not key.startswith("plan:")}
        dataclasses.replace(record, inputs=others | inputs).write(tmp_path)
        checked = check_selection(selected("study_schedules"), tmp_path, expected_folder(None))
        assert not checked.sound
        assert words in checked.evidence.refused[0][1]


def test_check_refuses_seeds_that_were_not_planned(tmp_path):
    for run in selected("study_schedules").plan([5, 77], ["aqn_linear"]):
        planned_record(run).write(tmp_path)
    evidence = gather(selected("study_schedules"), tmp_path, expected_folder(None))
    assert "seed 77" in evidence.refused[0][1]


def test_plans_are_written_once_before_the_runs(tmp_path):
    runs = selected("study_schedules").plan(1)
    paths = plans.write_plans(runs, tmp_path)
    assert {path.name.split("-")[0] for path in paths} >= {"study_schedules", "study"}
    assert plans.write_plans(runs, tmp_path) == []
    written = json.loads(paths[0].read_text(encoding="utf-8"))
    assert written["digest"][:12] in paths[0].name
    assert written["plan"]["rules"] == rules()
    (smoke,) = select(["table1"], tier="smoke")
    assert plans.write_plans(smoke.plan(1), tmp_path) == []


def plan_on_record(**changes):
    """Return an earlier plan of Figure 9 with other parts."""
    plan = plans.analysis_plan(find("study_schedules"), Tier.MINI) | {"version": 0} | changes
    return KeptPlan(
        made="2026-01-02T03:04:05+00:00",
        commit="0" * 40, dirty=False, digest=digest_of(plan), plan=plan,
    )  # fmt: skip


def test_records_of_an_earlier_kept_plan_are_judged_post_hoc(tmp_path):
    earlier_plan = plan_on_record(rules=rules() | {"all arms: above": "reproduced 1"})
    for run in selected("study_schedules").plan():
        record = planned_record(run)
        inputs = record.inputs | {"plan:study_schedules": earlier_plan.digest}
        dataclasses.replace(record, inputs=inputs).write(tmp_path / "runs")
    (tmp_path / "expected").mkdir()
    keep_plans({earlier_plan.digest: earlier_plan}, tmp_path / "expected")
    checked = check_selection(selected("study_schedules"), tmp_path / "runs", tmp_path / "expected")
    assert not checked.evidence.refused
    for verdict in checked.verdicts:
        digest = earlier_plan.digest[:12]
        late = f"Post hoc: the plan of these runs ({digest}) has other rules or seeds"
        assert verdict.marks == {"post hoc": late}
        assert verdict.sentence.endswith(late)


def test_a_claim_is_post_hoc_where_its_plan_has_another_claim_family_or_rule():
    study = find("study_schedules")
    claim = study.claims[0]
    stated = [planned(item) for item in study.claims]
    more = planned(dataclasses.replace(claim, name="another"))
    run = selected("study_schedules").plan(1, ["aqn_linear"])[0]
    record = failed_record(run, "-", {})
    without = {name: said for name, said in rules().items() if not name.startswith("three arms")}
    for changes, late in (
        ({}, False),
        ({"claims": stated[:1]}, False),
        ({"rules": without}, False),
        ({"claims": [*stated, more]}, True),
        ({"claims": [*stated, more | {"draws": 1}]}, False),
        ({"claims": [stated[0] | {"metric": "heldout_area"}, *stated[1:]]}, True),
        ({"claims": []}, True),
        ({"scale": {"seeds": [0, 1, 2, 3]}}, True),
        ({"rules": rules() | {"metric collapsed": "0"}}, True),
        ({"rules": rules() | {"a case that is gone": "1"}}, True),
    ):
        earlier_plan = plan_on_record(**changes)
        plan = plans.Plans(selected("study_schedules"), {earlier_plan.digest: earlier_plan})
        record = dataclasses.replace(record, inputs={"plan:study_schedules": earlier_plan.digest})
        assert bool(plan.post_hoc(claim, [record])) is late, changes


def test_a_changed_rule_of_judging_is_another_plan(monkeypatch):
    before, first = plans.analysis_plan(find("study"), Tier.MINI), rules()
    for module, name, other in (
        (statistics, "holm", list),
        (sizes, "undecidable", lambda claim: ""),
        (claim_verdicts, "ALPHA", 0.1),
        (claim_verdicts, "MINIMUM_SEEDS", 4),
        (derived, "MOVING_ROLLOUTS", 3),
        (derived, "COLLAPSED_BELOW", 0.3),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, other)
            if name == "MINIMUM_SEEDS":
                patch.setitem(claim_verdicts.judge.__kwdefaults__, "fewest", other)
            rules.cache_clear()
            assert rules() != first, name
            assert plans.analysis_plan(find("study"), Tier.MINI) != before
    rules.cache_clear()
    assert rules() == first


def test_today_s_code_judges_as_that_of_every_kept_plan_did():
    kept = read_plans(expected_folder(None)).values()
    assert kept
    assert all(item.plan["rules"].items() <= rules().items() for item in kept)


def test_shared_runs_count_for_each_target_that_names_them(tmp_path):
    write("study_schedules", tmp_path)
    assert gather(selected("study"), tmp_path, expected_folder(None)).records.keys() == {
        "nvfp4_lora_aqn"
    }
    # What was blessed is no expectation of made-up records.
    checked = check_selection(selected("study_schedules"), tmp_path, tmp_path / "nothing blessed")
    assert checked.sound
    assert {item.n for claim, item in checked.statements() if "aqn_exponential" in claim.arms} == {
        5
    }


def test_a_figure_asks_its_own_arms_of_a_table_and_no_others(tmp_path):
    write("study", tmp_path, seeds=1)
    evidence = gather(selected("study_rewards"), tmp_path, expected_folder(None))
    assert not evidence.refused
    assert evidence.records.keys() == {arm.name for arm in find("study_rewards").arms}


def test_verdicts_on_own_settings_are_exploratory(tmp_path):
    arms = ["bf16_lora", "nvfp4_lora", "nvfp4_lora_aqn"]
    for changes in (Changes(steps=12), Changes(limit=100), Changes(settings={"group_size": 4})):
        (selection,) = select(["study"], tier="mini", changes=changes)
        for run in selection.plan(arms=arms):
            planned_record(run).write(tmp_path)
        checked = check_selection(selection, tmp_path, expected_folder(None))
        judged = [item for item in checked.verdicts if item.status != "not run"]
        assert {"aqn_helps", "bf16_lora_gains"} <= {item.name for item in judged}
        assert all(set(item.marks) == {"exploratory"} for item in judged)
        paper = counted(of_kind(checked, Kind.PAPER))
        assert re.fullmatch(r"\d+ were not tested, \d+ are exploratory", paper)
        said = ending([checked])
        assert paper.split(", ")[1] in said
        assert " hold" not in said
