"""Records that are no evidence, or of another run than they say: what `check` makes of them."""

import dataclasses
import shutil

import pytest

from repro.evidence.record import failed_record
from repro.judge.check import check_selection, exit_status, mixed_versions
from repro.judge.gathering import gather
from repro.report.ending import ending
from repro.run.places import expected_folder
from repro.run.select import Selection, select
from repro.spec.config import digest_of
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import resealed, with_accuracy
from tests.repro.recorded_smoke import SELECTION, place

TABLE1 = find("table1")


def not_blessed(runs):
    """Return the expectations without the blessed ones, which made-up records need not meet."""
    folder = runs.parent / "expected"
    if not folder.exists():
        shutil.copytree(expected_folder(None), folder, ignore=shutil.ignore_patterns("records"))
    return folder


def checked(runs):
    selection = Selection(target=TABLE1, tier=Tier.SMOKE)
    return check_selection(selection, runs, not_blessed(runs))


def on_arm(arm, change):
    return lambda record: change(record) if record.arm == arm else record


def with_facts(**facts):
    return lambda record: dataclasses.replace(record, facts={**record.facts, **facts})


def longer(record):
    config = record.config | {"scale": record.config["scale"] | {"steps": 300}}
    return dataclasses.replace(record, config=config, digest=digest_of(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (longer, "scale.steps is 300, needed 30"),
        (lambda record: dataclasses.replace(record, inputs={}), "inputs.checkpoint is missing"),
        (with_facts(linears={"bf16": 21}), "no projection was nvfp4"),
    ],
)
def test_an_arm_without_evidence_is_refused(change, words, table1_records, tmp_path):
    table1_records(tmp_path, on_arm("nvfp4_lora", change))
    outcome = checked(tmp_path)
    assert {path.parent.name for path, _ in outcome.evidence.refused} == {"nvfp4_lora"}
    assert len({path for path, _ in outcome.evidence.refused}) == 5
    assert any(words in why for _, why in outcome.evidence.refused)
    assert exit_status([outcome]) == 1
    claims = {claim.name for claim in TABLE1.claims if "nvfp4_lora" in claim.arms}
    judged = [v for v in outcome.verdicts if v.name in claims and v.about == "mechanism"]
    assert judged
    assert all("refused" in verdict.sentence for verdict in judged)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda raw: raw["facts"].update(grades="all"), "no run leaves"),
        (lambda raw: raw["facts"].update(noise=[]), "facts.noise"),
        (lambda raw: raw["facts"].update(answers="all"), "no metrics follow"),
        (lambda raw: raw["series"].update(tokens_sampled=[2.0]), "no metrics follow"),
        (lambda raw: raw["config"]["scale"].update(steps=1), "digest"),
        (lambda raw: raw.update(arm="bf16"), "lies elsewhere"),
    ],
)
def test_a_record_that_another_hand_sealed_is_one_refusal(edit, words, smoke_runs, tmp_path):
    runs = shutil.copytree(smoke_runs, tmp_path / "runs")
    resealed(place(runs), edit)
    evidence = gather(SELECTION, runs, expected_folder(None))
    assert {path for path, _ in evidence.refused} == {place(runs)}
    assert any(words in why for _, why in evidence.refused), evidence.refused
    assert evidence.count == 3


def test_arms_that_saw_other_problems_are_not_compared(table1_records, tmp_path):
    def other_problems(record):
        return dataclasses.replace(record, inputs={**record.inputs, "test_problems": "0" * 64})

    table1_records(tmp_path, on_arm("nvfp4_lora_aqn", other_problems))
    outcome = checked(tmp_path)
    refused = {v.name for v in outcome.verdicts if "different test problems" in v.sentence}
    assert refused == {"qerl_beats_lora", "qerl_beats_qlora", "aqn_helps", "qerl_matches_full"}
    assert not outcome.sound
    assert exit_status([outcome]) == 1
    assert ending([outcome]).startswith("Fault: 4 records refused (table1).")


CONTROL = "bf16_lora_random_reward"


@pytest.mark.parametrize(
    ("arm", "points", "own"),
    [("bf16_lora", 0.0, set()), (CONTROL, 40, {f"{CONTROL}_does_not_gain"})],
)
def test_training_that_teaches_nothing_is_contradicted(arm, points, own, table1_records, tmp_path):
    def gains(record):
        start = record.value("accuracy_greedy_start") or 0.0
        return with_accuracy(record, accuracy_greedy=start + points + (record.seed - 2) / 3)

    table1_records(tmp_path, on_arm(arm, gains))
    outcome = checked(tmp_path)
    assert {v.name for v in outcome.verdicts if v.worse} == {f"{arm}.gain_greedy"}
    assert {v.name for v in outcome.verdicts if v.own_fault} == own
    assert exit_status([outcome]) == 1
    assert "Worse than before: 1 " in ending([outcome])


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "missing"])
def test_a_run_that_failed_or_is_missing_takes_success_away(table1_records, tmp_path, fails):
    table1_records(tmp_path, seeds=8)
    (tmp_path / "smoke/table1/bf16_full/seed-2.json").unlink()
    if fails:
        run = plan(TABLE1, Tier.SMOKE, [2], ["bf16_full"])[0]
        failed_record(run, "OutOfMemoryError: 3 GiB", {}).write(tmp_path)
    outcome = checked(tmp_path)
    assert outcome.evidence.planned == (0, 1, 2)
    reasons = [reason for _, reason in outcome.evidence.failed.values()]
    assert [reason.endswith("OutOfMemoryError: 3 GiB") for reason in reasons] == [True] * fails
    verdict = next(v for v in outcome.verdicts if v.name == "bf16_full_gains")
    assert (verdict.status, verdict.n) == ("inconclusive", 7)
    assert ("1 run(s) of bf16_full failed" if fails else "of bf16_full") in verdict.sentence
    others = {v.status for v in outcome.verdicts if v.name.endswith("lora_gains")}
    assert others == {"reproduced"}
    assert outcome.sound


@pytest.mark.parametrize(("seeds", "status"), [(2, "inconclusive"), (3, "reproduced")])
def test_the_smoke_tier_is_decided_on_its_three_seeds(table1_records, tmp_path, seeds, status):
    table1_records(tmp_path, seeds=seeds)
    outcome = checked(tmp_path)
    assert {v.status for v in outcome.verdicts if v.name.endswith("_gains")} == {status}
    claims = {claim.name: claim for claim in TABLE1.claims}
    for verdict in outcome.verdicts:
        if verdict.name in claims:
            addressed = verdict.status != "not addressed"
            assert addressed == claims[verdict.name].mechanism
            assert seeds == 2 or addressed == (verdict.p is not None)


def test_results_of_another_seed_are_not_compared(table1_records, tmp_path):
    def of_order(record, seed):
        order = digest_of(["the order of seed", seed])
        return dataclasses.replace(record, inputs=record.inputs | {"order_of_problems": order})

    def rotated(record):
        if record.procedure != "train":
            return record
        return of_order(record, record.seed + (record.arm == "nvfp4_lora_aqn"))

    table1_records(tmp_path / "rotated", rotated)
    outcome = checked(tmp_path / "rotated")
    assert any("order of problems" in why for _, why in outcome.evidence.refused)

    table1_records(tmp_path / "repeated", on_arm("bf16_lora", lambda item: of_order(item, 0)))
    refused = [why for _, why in checked(tmp_path / "repeated").evidence.refused]
    assert any("seed 0 of bf16_lora" in why for why in refused)


def test_arms_of_other_versions_of_a_library_are_compared_with_a_mark(table1_records, tmp_path):
    def newer(record):
        packages = {"packages": {"torch": "9.9", "numpy": "9.9"}}
        return dataclasses.replace(record, environment=record.environment | packages)

    table1_records(tmp_path, on_arm("nvfp4_lora_aqn", newer))
    (selection,) = select(["table1"], tier="smoke")
    claims = {claim.name: claim for claim in selection.target.claims}
    evidence = gather(selection, tmp_path, expected_folder(None))
    marked = {name for name, claim in claims.items() if mixed_versions(claim, evidence)}
    assert marked == {"qerl_beats_lora", "qerl_beats_qlora", "aqn_helps", "qerl_matches_full"}
    assert mixed_versions(claims["aqn_helps"], evidence).endswith("torch 9.9 and None")
