"""Deliberate cheats: records of runs that did not do what they claim. `check` must catch each.

Each cheat spoils honest made-up records in one way, and must be caught for that reason.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from repro.evidence.receipts import violations
from repro.evidence.record import Estimate, Record, failed_record
from repro.judge.check import Checked, check_selection
from repro.report.console import conclusion, main_check
from repro.run.places import expected_folder
from repro.run.select import Selection
from repro.spec.claim import Metric
from repro.spec.config import RunConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from tests.repro.made_up import with_accuracy, with_gain

Spoil = Callable[[Record], Record]
TABLE1 = find("table1")


def not_blessed(runs: Path) -> Path:
    """Return the expectations without the blessed ones, which made-up records need not meet."""
    folder = runs.parent / "expected"
    if not folder.exists():
        shutil.copytree(
            expected_folder(None),
            folder,
            ignore=shutil.ignore_patterns("records"),
        )
    return folder


def checked(runs: Path) -> Checked:
    selection = Selection(target=TABLE1, source=TABLE1, tier=Tier.SMOKE)
    return check_selection(selection, runs, not_blessed(runs))


def on_arm(arm: str, change: Spoil) -> Spoil:
    return lambda record: change(record) if record.arm == arm else record


def with_effects(**effects: Any) -> Spoil:
    return lambda record: dataclasses.replace(record, effects={**record.effects, **effects})


def with_series(**series: float) -> Spoil:
    def spoil(record: Record) -> Record:
        steps = len(record.series["sigma"])
        constant = {name: [value] * steps for name, value in series.items()}
        return dataclasses.replace(record, series={**record.series, **constant})

    return spoil


NO_NOISE = {"modules": 0, "channels_changed": 0, "rollouts_asked": 27, "rollouts_perturbed": 0}

CHEATS: dict[str, tuple[str, Spoil, str]] = {
    "nothing quantised": (
        "nvfp4_lora",
        with_effects(linears={"bf16": 21}),
        "no projection was nvfp4",
    ),
    "some layers left in sixteen bits": (
        "nvfp4_lora",
        with_effects(linears={"nvfp4": 20, "bf16": 1}),
        "some projections were not nvfp4",
    ),
    "called quantised, weights unchanged": (
        "mxfp4",
        with_effects(relative_weight_error_mean=0.0),
        "a 4-bit format gives",
    ),
    "no receipt at all": ("nf4_lora", with_effects(linears={}), "effects.linears is missing"),
    "noise never added": (
        "nvfp4_lora_aqn",
        with_effects(noise=NO_NOISE),
        "the added noise touched nothing",
    ),
    "noise added in some rollouts only": (
        "nvfp4_lora_aqn",
        with_effects(
            noise={
                "modules": 6,
                "channels_changed": 9,
                "rollouts_asked": 27,
                "rollouts_perturbed": 3,
            }
        ),
        "3 of 27 noisy rollouts",
    ),
    "noise swallowed by rounding": (
        "nvfp4_lora_aqn",
        with_series(sigma=5e-4, sigma_realised=2e-5),
        "added noise had a deviation of 2e-05",
    ),
    "noise in an arm that has none": (
        "nvfp4_lora",
        with_effects(noise={"modules": 6, "channels_changed": 10}),
        "an arm without added noise perturbed 6 norms",
    ),
    "advantages not centred": (
        "bf16_lora",
        with_effects(advantage_group_mean_max=0.41),
        "advantages were not centred",
    ),
    "advantages without a receipt": (
        "bf16_lora",
        with_effects(advantage_group_mean_max=None),
        "advantages were not centred",
    ),
    "constant reward": (
        "bf16_lora",
        with_series(zero_variance_groups=1.0),
        "there was nothing to learn",
    ),
    "adapter never attached": (
        "bf16_lora",
        with_effects(adapter_modules=0),
        "no adapter was attached",
    ),
    "optimiser never stepped": (
        "bf16_full",
        with_effects(trained_change_l2=0.0),
        "training changed no parameter",
    ),
    "half of the steps": ("bf16_lora", with_effects(optimizer_steps=15), "15 optimiser steps"),
}


@pytest.mark.parametrize("name", sorted(CHEATS))
def test_a_cheat_is_refused_for_its_own_reason(
    name: str, table1_records: Callable[..., None], tmp_path: Path
) -> None:
    arm, spoil, words = CHEATS[name]
    table1_records(tmp_path, on_arm(arm, spoil))
    outcome = checked(tmp_path)
    refused = outcome.evidence.refused
    assert len({path for path, _ in refused}) == 5
    assert all(any(words in why for p, why in refused if p == path) for path, _ in refused)
    assert {path.parent.name for path, _ in outcome.evidence.refused} == {arm}
    assert not outcome.sound
    about_the_arm = [v for v in outcome.verdicts if _names(v, arm) and v.about == "mechanism"]
    assert about_the_arm or arm in {a for c in TABLE1.claims for a in c.arms}
    assert all("refused" in verdict.sentence for verdict in about_the_arm)


def _names(verdict: Any, arm: str) -> bool:
    return any(claim.name == verdict.name and arm in claim.arms for claim in TABLE1.claims)


def test_honest_records_are_not_refused(
    table1_records: Callable[..., None], tmp_path: Path
) -> None:
    table1_records(tmp_path)
    outcome = checked(tmp_path)
    assert outcome.evidence.refused == []
    assert outcome.sound
    assert outcome.evidence.count == 60


def test_a_record_of_another_configuration_is_refused(
    made_up_record: Callable[[RunConfig], Record], tmp_path: Path
) -> None:
    for run in plan(TABLE1, Tier.SMOKE):
        scale = run.scale
        if run.arm.name == "nvfp4_lora":
            scale = dataclasses.replace(scale, steps=300)
        made_up_record(dataclasses.replace(run, scale=scale)).write(tmp_path)
    outcome = checked(tmp_path)
    assert len(outcome.evidence.refused) == 3
    assert "scale.steps is 300, needed 30" in outcome.evidence.refused[0][1]


def test_a_record_copied_to_another_arms_place_is_refused(
    table1_records: Callable[..., None], tmp_path: Path
) -> None:
    table1_records(tmp_path)
    arms = tmp_path / "smoke/table1"
    (arms / "nf4_lora/seed-0.json").write_text((arms / "nvfp4_lora/seed-0.json").read_text())
    assert "lies elsewhere" in checked(tmp_path).evidence.refused[0][1]


def test_arms_that_saw_other_problems_are_not_compared(
    table1_records: Callable[..., None], tmp_path: Path
) -> None:
    def other_problems(record: Record) -> Record:
        return dataclasses.replace(record, inputs={**record.inputs, "test_problems": "0" * 64})

    table1_records(tmp_path, on_arm("nvfp4_lora_aqn", other_problems))
    outcome = checked(tmp_path)
    refused = {v.name for v in outcome.verdicts if "different test problems" in v.sentence}
    assert refused == {"qerl_beats_lora", "qerl_beats_qlora", "aqn_helps", "qerl_matches_full"}
    assert not outcome.sound
    assert conclusion([outcome]).endswith("; records were refused of table1.")


def test_training_that_teaches_nothing_is_contradicted(
    table1_records: Callable[..., None], tmp_path: Path
) -> None:
    def no_gain(record: Record) -> Record:
        return with_gain(record, (record.seed - 2) / 3)

    table1_records(tmp_path, on_arm("bf16_lora", no_gain))
    outcome = checked(tmp_path)
    broken = {v.name for v in outcome.verdicts if v.own_fault}
    assert broken == {"bf16_lora.gain_greedy"}
    assert not outcome.sound
    assert conclusion([outcome]).endswith("; this suite is at fault in table1.")


def test_a_control_that_gains_is_contradicted(
    table1_records: Callable[..., None], tmp_path: Path
) -> None:
    def gains(record: Record) -> Record:
        return with_gain(record, 40.0 + record.seed)

    table1_records(tmp_path, on_arm("bf16_lora_random_reward", gains))
    broken = {v.name for v in checked(tmp_path).verdicts if v.own_fault}
    assert broken == {
        "bf16_lora_random_reward_does_not_gain",
        "bf16_lora_random_reward.gain_greedy",
    }


def test_a_failed_run_is_named_and_takes_success_away(
    table1_records: Callable[..., None], tmp_path: Path
) -> None:
    table1_records(tmp_path)
    (tmp_path / "smoke/table1/bf16_full/seed-3.json").unlink()
    run = plan(TABLE1, Tier.SMOKE, [3], ["bf16_full"])[0]
    failed_record(run, "OutOfMemoryError: 3 GiB", {}).write(tmp_path)
    outcome = checked(tmp_path)
    assert [reason for _, reason in outcome.evidence.failed] == [
        "the run failed: OutOfMemoryError: 3 GiB"
    ]
    verdict = next(v for v in outcome.verdicts if v.name == "bf16_full_gains")
    assert verdict.status == "inconclusive"
    assert "1 run(s) of bf16_full failed" in verdict.sentence
    assert outcome.sound


def test_a_planned_seed_without_a_record_is_a_failed_one(
    table1_records: Callable[..., None], tmp_path: Path
) -> None:
    table1_records(tmp_path, seeds=8)
    assert checked(tmp_path).evidence.planned == (0, 1, 2)
    (tmp_path / "smoke/table1/bf16_full/seed-2.json").unlink()
    outcome = checked(tmp_path)
    verdict = next(v for v in outcome.verdicts if v.name == "bf16_full_gains")
    assert (verdict.status, verdict.n) == ("inconclusive", 7)
    assert "1 of 3 planned seeds of bf16_full have no record (2)" in verdict.sentence
    others = {v.status for v in outcome.verdicts if v.name.endswith("lora_gains")}
    assert others == {"reproduced"}


@pytest.mark.parametrize(("seeds", "status"), [(2, "inconclusive"), (3, "reproduced")])
def test_the_smoke_tier_is_decided_on_the_three_seeds_that_it_plans(
    table1_records: Callable[..., None], tmp_path: Path, seeds: int, status: str
) -> None:
    table1_records(tmp_path, seeds=seeds)
    outcome = checked(tmp_path)
    assert {v.status for v in outcome.verdicts if v.name.endswith("_gains")} == {status}


def test_the_smoke_tier_says_nothing_of_the_papers_claims(
    table1_records: Callable[..., None], tmp_path: Path
) -> None:
    table1_records(tmp_path)
    outcome = checked(tmp_path)
    claims = {claim.name: claim for claim in TABLE1.claims}
    for verdict in outcome.verdicts:
        if verdict.name in claims:
            addressed = verdict.status != "not addressed"
            assert addressed == claims[verdict.name].mechanism
            assert addressed == (verdict.p is not None)


@pytest.mark.parametrize(
    ("timing", "words"),
    [
        ({"method": "clock", "seconds": 1.0}, "timed by 'clock'"),
        (
            {
                "method": "synchronized_clock",
                "seconds": 1e-6,
                "bytes": 1e9,
                "bytes_per_second": 4.8e12,
            },
            "the timer did not wait",
        ),
        (
            {
                "method": "device_events",
                "seconds": 1e-6,
                "flops": 1e12,
                "flops_per_second": 9e14,
            },
            "the timer did not wait",
        ),
        ({"method": "device_events", "seconds": 1.0, "bytes": 1e9}, "own rate is not shown"),
        (
            {
                "method": "device_events",
                "seconds": 1e-3,
                "bytes": 3e9,
                "bytes_per_second": 4.8e12,
                "flops": 1e9,
                "flops_per_second": 9e14,
            },
            "",
        ),
    ],
)
def test_a_timer_that_did_not_wait_is_caught(
    timing: dict[str, Any], words: str, made_up_record: Callable[[RunConfig], Record]
) -> None:
    run = plan(TABLE1, Tier.SMOKE, 1, ["bf16"])[0]
    record = made_up_record(run)
    timed = dataclasses.replace(record, procedure="operation", effects={"timing": timing})
    reasons = violations(timed)
    assert bool(reasons) == bool(words)
    assert any(words in reason for reason in reasons) or not words


@pytest.mark.parametrize(
    ("value", "changes", "words"),
    [
        (-0.3, ("gain",), ""),
        (-0.3, (), "between 0 and 100"),
        (-101.0, ("gain",), "between -100 and 100"),
        (101.0, ("gain",), "between -100 and 100"),
    ],
)
def test_a_change_may_be_negative_and_a_share_may_not(
    value: float,
    changes: tuple[str, ...],
    words: str,
    made_up_record: Callable[[RunConfig], Record],
) -> None:
    record = dataclasses.replace(
        made_up_record(plan(TABLE1, Tier.SMOKE, 1, ["bf16"])[0]),
        procedure="operation",
        metrics={"gain": Estimate(value=value, unit="percent")},
    )
    metric = Metric(name="gain", unit="percent", title="gain", change="gain" in changes)
    reasons = violations(record, [metric])
    assert (reasons == []) == (words == "")
    assert all(words in reason for reason in reasons)


def test_the_exit_status_tells_a_cheat_from_a_finding(
    table1_records: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from repro.__main__ import build_parser

    def finding(record: Record) -> Record:
        return with_accuracy(record, "accuracy", 60.0 + record.seed)

    table1_records(tmp_path / "honest", on_arm("nvfp4_lora_aqn", finding))
    table1_records(tmp_path / "cheat", on_arm("nvfp4", with_effects(linears={"bf16": 21})))
    expected = str(not_blessed(tmp_path / "honest"))
    line = ["check", "table1", "figure5", "--tier", "smoke", "--json"]
    line += ["--expected", expected, "--runs"]
    parser = build_parser()
    assert main_check(parser.parse_args([*line, str(tmp_path / "honest")])) == 0
    assert '"not addressed"' in capsys.readouterr().out
    assert main_check(parser.parse_args([*line, str(tmp_path / "cheat")])) == 1
