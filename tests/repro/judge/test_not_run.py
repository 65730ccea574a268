"""A point that does not fit: claims and bars on it are not run, with the sentence; others stand."""

import dataclasses
from datetime import UTC, datetime

import pytest

from repro.evidence.not_run import reason
from repro.evidence.record import Estimate, Measured, record_of
from repro.evidence.store import blessed_records
from repro.judge.blessing import bless
from repro.judge.check import check_selection
from repro.run.places import expected_folder
from repro.run.select import Selection
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets.rollout_speed import ROLLOUT
from repro.targets.steps import TABLE3
from tests.repro.made_up import at_commit, on_device

SAID = "needs 95.8 of 79.2 GiB by the plan"
SELECTION = Selection(target=ROLLOUT, tier=Tier.SYSTEMS)


@pytest.fixture(scope="module")
def records():
    """Return what both arms would leave where the 16-bit one does not fit 256 rows at 32B."""
    return [made_up(run) for run in plan(ROLLOUT, Tier.SYSTEMS)]


def made_up(run):
    bf16 = run.arm.name == "bf16_lora"
    rate = Estimate(value=(1000.0 if bf16 else 3000.0) + run.seed, unit="tokens per second")
    metrics = {metric.name: rate for metric in ROLLOUT.metrics if metric.unit == rate.unit}
    if bf16:
        del metrics["tokens_per_second_32b_256"]
    facts = {"not_run": {"32b_256": SAID} if bf16 else {}, "timed_retries": {}}
    measured = Measured(metrics=metrics, facts=facts)
    record = record_of(run, measured, environment={}, started=datetime.now(UTC))
    return on_device(at_commit(record), "NVIDIA H200")


def checked(records, folder, expected=None):
    for record in records:
        record.write(folder)
    return check_selection(SELECTION, folder, expected or expected_folder(None))


def test_claims_on_a_point_that_does_not_fit_are_not_run(records, tmp_path):
    by_name = {verdict.name: verdict for verdict in checked(records, tmp_path).verdicts}
    for name in ("faster_32b_256", "bf16_lora.tokens_per_second_32b_256"):
        verdict = by_name[name]
        assert (verdict.status, verdict.worse) == ("not run", False)
        assert verdict.sentence == f"bf16_lora, 32b_256: {SAID}"
    assert by_name["faster_32b_64"].status == by_name["faster_7b_256"].status == "reproduced"
    assert by_name["bf16_lora.tokens_per_second_32b_64"].status != "not run"
    assert by_name["nvfp4_lora.tokens_per_second_32b_256"].status != "not run"


def test_records_with_a_point_left_out_are_blessed_with_the_others(records, tmp_path, expected):
    runs = tmp_path / "runs"
    evidence = checked(records, runs, expected).evidence
    bless(SELECTION, evidence, expected, runs=runs)
    again = check_selection(SELECTION, runs, expected).as_before
    blessed = {(row.arm, row.metric) for row in again.rows}
    assert ("bf16_lora", "tokens_per_second_32b_64") in blessed
    assert ("nvfp4_lora", "tokens_per_second_32b_256") in blessed
    assert ("bf16_lora", "tokens_per_second_32b_256") not in blessed
    stored = blessed_records(expected, Tier.SYSTEMS, "rollout")
    assert {"32b_256": SAID} in [record.facts["not_run"] for record in stored]


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("tokens_per_second_32b_256", True),
        ("prefill_seconds_32b_256", True),
        ("host_share_14b", True),
        ("parity_engine_error", True),
        ("tokens_per_second_2b_256", False),
        ("host_share_32b", False),
        ("trained_parity_error_ratio", False),
    ],
)
def test_a_reason_is_found_for_the_metrics_of_its_part_alone(records, metric, said):
    parts = {"32b_256": SAID, "14b": SAID, "parity": SAID}
    record = dataclasses.replace(records[0], facts={"not_run": parts})
    assert (reason(record, metric) is not None) is said


def test_measured_steps_that_ran_out_of_memory_say_so_for_their_point():
    run = plan(TABLE3, Tier.SYSTEMS)[0]
    lines = ["7b_b2 bf16: the weights alone do not fit", "7b_b2 nvfp4: does not fit with [2] rows"]
    measured = Measured(facts={"out_of_memory": lines})
    record = record_of(run, measured, environment={}, started=datetime.now(UTC))
    assert reason(record, "step_seconds_7b_b2") == "; ".join(lines)
    assert reason(record, "step_seconds_7b_b8") is None
