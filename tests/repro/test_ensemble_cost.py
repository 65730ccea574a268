"""The prediction of GPU time: what is counted, and that it is linear where it says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.ensemble_cost import (
    DYNAMIC_STEPS,
    asked_of,
    ensemble_seconds,
    likely_groups,
    queue_seconds,
)
from repro.spec.target import TogetherCost, plan
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.proxy import PROXY

COST = TogetherCost(
    start_seconds=10.0,
    step_seconds=0.5,
    step_seconds_per_run=0.01,
    pass_seconds=0.0,
    question_seconds=0.0,
    memory_bytes=1,
)


def test_questions_are_those_that_a_run_is_asked() -> None:
    untrained, trained = plan(find("table1"), Tier.PROXY, 1, ["bf16", "bf16_lora"])
    further = sum(item.data.test_problems for item in PROXY.test_sets)
    end = 2 * PROXY.data.test_problems + further
    assert asked_of(untrained).completions == end + PROXY.data.test_problems
    during = 6 * PROXY.data.development_problems  # at steps 0, 20, ..., 100
    assert asked_of(trained).completions == end + PROXY.data.test_problems + during


def test_an_ensemble_costs_its_steps_once_and_its_runs_each() -> None:
    (run,) = plan(find("table1"), Tier.PROXY, 1, ["bf16_lora"])
    assert ensemble_seconds([run], COST) == pytest.approx(10 + 100 * 0.51)
    assert ensemble_seconds([run] * 40, COST) == pytest.approx(10 + 100 * 0.9)
    asking = dataclasses.replace(COST, pass_seconds=2.0, question_seconds=0.001)
    more = ensemble_seconds([run] * 40, asking) - ensemble_seconds([run] * 40, COST)
    asked = asked_of(run)
    assert more == pytest.approx(2 * asked.passes + 40 * 0.001 * asked.completions)
    (dapo,) = plan(find("table2"), Tier.PROXY, 1, ["bf16_lora"])
    assert ensemble_seconds([dapo], COST) == pytest.approx(10 + DYNAMIC_STEPS * 100 * 0.51)


def test_untrained_runs_take_no_steps() -> None:
    (run,) = plan(find("table1"), Tier.PROXY, 1, ["bf16"])
    assert ensemble_seconds([run] * 5, COST) == 10


def test_a_queue_ends_when_its_last_device_does() -> None:
    assert queue_seconds([4, 3, 3], 1) == 10
    assert queue_seconds([3, 3, 4], 2) == 6
    assert queue_seconds([], 4) == 0


def test_without_the_policy_likely_groups_hold_every_run_once() -> None:
    runs = plan(find("table1"), Tier.PROXY)
    groups = likely_groups(runs, 60)
    assert sorted(run.digest() for group in groups for run in group) == sorted(
        run.digest() for run in runs
    )
    assert max(len(group) for group in groups) <= 60
    assert all(len({run.arm.training == "full" for run in group}) == 1 for group in groups)


def test_a_plan_names_gpu_minutes_and_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPRO_POLICIES", str(tmp_path))
    assert main(["plan", "table1", "--tier", "proxy", "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "GPU minutes; ensembles of 55, 55, 10 runs" in text
    assert "It needs the policy proxy-30m" in text
