"""Timed repeats stand in for seeds where a workload is deterministic: in verdicts and in bless."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.evidence.bless import BlessError, bless
from repro.evidence.record import Estimate, record_of
from repro.evidence.verdicts.measured import load_expectations
from repro.evidence.verdicts.verdict import Verdict
from repro.judge.check import Checked, check_selection
from repro.judge.gathering import gather
from repro.report.tables import bar_rows
from repro.run.places import expected_folder
from repro.run.plan import timed_runs
from repro.run.select import Selection
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets.steps import TABLE3
from tests.repro.made_up import at_commit

SELECTION = Selection(target=TABLE3, source=TABLE3, tier=Tier.SYSTEMS)
SLOW, FAST = (17.9, 18.0, 18.1), (10.1, 10.0, 10.0)


def write(
    runs: Path,
    times: Mapping[str, tuple[float, ...]] | None = None,
    *,
    device: str = "NVIDIA H200",
    seconds: float = 0.0,
) -> None:
    """Write made-up records of Table 3: step times by arm, the same at every point.

    `seconds` is how long each run is said to have taken.
    """
    for run in plan(TABLE3, Tier.SYSTEMS):
        own = (times or {"nvfp4_lora": FAST, "bf16_lora": SLOW})[run.arm.name]
        series: dict[str, list[float | None]] = {}
        for point in run.scale.points:
            series[f"step_seconds_{point.name}"] = list(own)
            if run.arm.name == "nvfp4_lora":
                pairs = zip(SLOW, own, strict=False)
                series[f"speedup_{point.name}"] = [slow / fast for slow, fast in pairs]
        metrics = {
            name: Estimate(
                value=sorted(values)[len(values) // 2],  # type: ignore[type-var]
                unit="seconds" if "seconds" in name else "ratio",
                n=len(values),
            )
            for name, values in series.items()
        }
        record = record_of(
            run,
            metrics=metrics,
            series=series,
            environment={"gpu": [{"name": device}]},
            started=datetime.now(UTC) - timedelta(seconds=seconds),
        )
        at_commit(record).write(runs)


def checked(runs: Path, expected: Path | None = None) -> Checked:
    return check_selection(SELECTION, runs, expected or expected_folder(None))


def test_three_repeats_of_one_seed_decide_a_claim_about_time(tmp_path: Path) -> None:
    write(tmp_path)
    claims = [v for v in checked(tmp_path).verdicts if v.about == "claim"]
    assert {v.status for v in claims} == {"reproduced"}
    assert {v.n for v in claims} == {3}
    assert claims[0].effect == pytest.approx(1.794, abs=0.01)


def test_a_slower_arm_is_contradicted_and_a_noisy_one_inconclusive(tmp_path: Path) -> None:
    write(tmp_path / "slow", {"nvfp4_lora": (20.1, 20.0, 20.2), "bf16_lora": SLOW})
    claims = [v for v in checked(tmp_path / "slow").verdicts if v.about == "claim"]
    assert {v.status for v in claims} == {"contradicted"}
    write(tmp_path / "noisy", {"nvfp4_lora": (10.0, 30.0, 17.0), "bf16_lora": SLOW})
    claims = [v for v in checked(tmp_path / "noisy").verdicts if v.about == "claim"]
    assert {v.status for v in claims} == {"inconclusive"}


def test_two_repeats_are_too_few_and_the_sentence_says_so(tmp_path: Path) -> None:
    write(tmp_path, {"nvfp4_lora": FAST[:2], "bf16_lora": SLOW[:2]})
    claims = [v for v in checked(tmp_path).verdicts if v.about == "claim"]
    assert {v.status for v in claims} == {"inconclusive"}
    assert "2 paired repeat(s); a verdict needs 3" in claims[0].sentence
    assert claims[0].effect == pytest.approx(1.79, abs=0.02)
    assert claims[0].sentence.endswith(f"Point estimate {claims[0].effect:.3g} x")


def stated(runs: Path) -> dict[str, Verdict]:
    """Return the verdicts on the suite's stated bars; blessed values may have their names."""
    return {v.name: v for v in checked(runs).verdicts if v.source.startswith("derived")}


def test_a_bar_must_hold_in_every_repeat(tmp_path: Path) -> None:
    write(tmp_path)
    bars = stated(tmp_path)
    assert bars["nvfp4_lora.speedup_7b_b8"].status == "reproduced"
    assert "3 of 3 inside" in bars["nvfp4_lora.speedup_7b_b8"].sentence
    write(tmp_path / "b", {"nvfp4_lora": (10.1, 12.5, 10.0), "bf16_lora": SLOW})
    bars = stated(tmp_path / "b")
    assert bars["nvfp4_lora.speedup_7b_b8"].status == "contradicted"
    assert "2 of 3 inside" in bars["nvfp4_lora.speedup_7b_b8"].sentence


def blessed(runs: Path, expected: Path) -> Path:
    records = gather(SELECTION, runs).records
    return bless(TABLE3, Tier.SYSTEMS, records, problems=[], expected=expected)[0]


def test_a_timed_target_is_blessed_on_its_declared_repeats_of_one_seed(
    tmp_path: Path, expected: Path
) -> None:
    write(tmp_path / "runs")
    blessed(tmp_path / "runs", expected)
    items = load_expectations(expected, Tier.SYSTEMS, TABLE3, "nvidia_h200")
    by_name = {(item.arm, item.metric): item for item in items}
    item = by_name["nvfp4_lora", "step_seconds_7b_b2"]
    assert item.values == {"0.0": 10.1, "0.1": 10.0, "0.2": 10.0}
    assert "3 timed repeats" in item.because
    low, high = item.accept
    assert low is not None
    assert high is not None
    assert low < 10.0 < high < 12.5
    again = checked(tmp_path / "runs", expected)
    measured = [v for v in again.verdicts if v.source.startswith("measured")]
    assert {v.status for v in measured} == {"reproduced"}


def test_a_plans_time_is_that_of_records_of_the_same_version(
    tmp_path: Path, expected: Path
) -> None:
    write(tmp_path / "runs")
    blessed(tmp_path / "runs", expected)
    runs = plan(TABLE3, Tier.SYSTEMS)
    timed = timed_runs(Tier.SYSTEMS, runs, expected)
    assert timed.basis == "median of 2 blessed records of nvidia_h200 at 0000000"
    later = plan(dataclasses.replace(TABLE3, version=TABLE3.version + 1), Tier.SYSTEMS)
    timed = timed_runs(Tier.SYSTEMS, later, expected)
    assert (timed.seconds, timed.basis) == ({}, "no blessed record of these arms")


def test_a_plans_time_is_that_of_this_kind_of_device_where_it_has_records(
    tmp_path: Path, expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = {"NVIDIA H200": 100.0, "NVIDIA H100": 160.0}
    for device, seconds in taken.items():
        write(tmp_path / device, device=device, seconds=seconds)
        blessed(tmp_path / device, expected)
    runs, arm = plan(TABLE3, Tier.SYSTEMS), ("table3", "nvfp4_lora")
    for device, seconds in taken.items():
        gpu = {"gpu": [{"name": device}]}
        monkeypatch.setattr("repro.run.plan.capture_environment", lambda gpu=gpu: gpu)
        timed = timed_runs(Tier.SYSTEMS, runs, expected)
        assert timed.seconds[arm] == (pytest.approx(seconds, abs=2), 1)
    monkeypatch.setattr("repro.run.plan.capture_environment", dict)
    timed = timed_runs(Tier.SYSTEMS, runs, expected)
    assert timed.seconds[arm] == (pytest.approx(100.0, abs=2), 1)
    assert " nvidia_h100, nvidia_h200 at " in timed.basis


def test_a_regression_is_what_left_the_values_blessed_on_the_same_device(
    tmp_path: Path, expected: Path
) -> None:
    def judged(name: str) -> int:
        where = ["table3", "--tier", "systems", "--expected", str(expected)]
        return main(["compare", "blessed", str(tmp_path / name), *where])

    write(tmp_path / "slow", {"nvfp4_lora": SLOW, "bf16_lora": SLOW})
    assert judged("slow") == 2
    blessed(tmp_path / "slow", expected)
    # Its stated bar is missed, as it was when the values were blessed.
    assert judged("slow") == 0
    write(tmp_path / "slower", {"nvfp4_lora": (30.1, 30.0, 30.2), "bf16_lora": SLOW})
    assert judged("slower") == 1


def test_a_timed_target_with_too_few_repeats_is_not_blessed(tmp_path: Path, expected: Path) -> None:
    write(tmp_path, {"nvfp4_lora": FAST[:2], "bf16_lora": SLOW})
    target = dataclasses.replace(TABLE3, timed_repeats=3)
    records = gather(SELECTION, tmp_path).records
    with pytest.raises(BlessError, match="fewer than 3 timed repeats of"):
        bless(target, Tier.SYSTEMS, records, problems=[], expected=expected)


def test_bars_are_counted_and_those_missed_listed(tmp_path: Path) -> None:
    write(tmp_path / "fast")
    fast = bar_rows(checked(tmp_path / "fast"), expected_folder(None))
    write(tmp_path / "slow", {"nvfp4_lora": SLOW, "bf16_lora": SLOW})
    slow = bar_rows(checked(tmp_path / "slow"), expected_folder(None))
    (line,) = [row for row in slow if "step against 16-bit LoRA, 7b_b8" in row]
    assert "| at least 1.5 x | 1 x |" in line
    assert not any("7b_b8" in row for row in fast)
    assert re.fullmatch(r"Stated bars: \d+ met\.", fast[0])
    assert re.fullmatch(r"Stated bars: \d+ missed\.", slow[0])


def test_a_bar_is_judged_by_its_own_interval_where_a_blessed_value_lies_below_it(
    tmp_path: Path, expected: Path
) -> None:
    shutil.copytree(expected_folder(None) / "bars", expected / "bars")
    write(tmp_path / "runs", {"nvfp4_lora": SLOW, "bf16_lora": SLOW})
    blessed(tmp_path / "runs", expected)
    again = checked(tmp_path / "runs", expected)
    name = "nvfp4_lora.speedup_7b_b8"
    assert {v.status for v in again.verdicts if v.name == name} == {"contradicted", "reproduced"}
    rows = bar_rows(again, expected)
    assert any("7b_b8 | at least 1.5 x | 1 x |" in row for row in rows)
