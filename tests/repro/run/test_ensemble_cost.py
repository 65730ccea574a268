"""The prediction of GPU time: what is counted, and that it is linear where it says so."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.evidence.store import blessed_records
from repro.pretrain.recipes import PROXIES
from repro.rl.stacked import grouping
from repro.run.device_queue import ensemble_tasks
from repro.run.ensemble_cost import (
    DYNAMIC_STEPS,
    UPDATE_SHARE,
    asked_of,
    ensemble_seconds,
    likely_groups,
    queue_seconds,
)
from repro.run.places import expected_folder
from repro.spec.target import TogetherCost, plan
from repro.spec.tier import Tier
from repro.targets import TARGETS, find
from repro.targets.proxy import COST as COST_MEASURED
from repro.targets.proxy import COST_LARGE, PROXY
from tests.repro.recorded_ensembles import recorded_ensembles

_H200_BYTES = 143_771 * 2**20  # as its driver says
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
    # At steps 0, 20, ..., 120.
    during = (PROXY.steps // PROXY.evaluation.every + 1) * PROXY.data.development_problems
    assert asked_of(trained).completions == end + PROXY.data.test_problems + during


def test_an_ensemble_costs_its_steps_once_and_its_runs_each() -> None:
    (run,) = plan(find("table1"), Tier.PROXY, 1, ["bf16_lora"])
    fixed = 10 + PROXY.steps * 0.5
    assert ensemble_seconds([run], COST) == pytest.approx(fixed + PROXY.steps * 0.01)
    assert ensemble_seconds([run] * 40, COST) == pytest.approx(fixed + PROXY.steps * 0.4)
    asking = dataclasses.replace(COST, pass_seconds=2.0, question_seconds=0.001)
    more = ensemble_seconds([run] * 40, asking) - ensemble_seconds([run] * 40, COST)
    asked = asked_of(run)
    assert more == pytest.approx(2 * asked.passes + 40 * 0.001 * asked.completions)
    (dapo,) = plan(find("table2"), Tier.PROXY, 1, ["bf16_lora"])
    assert ensemble_seconds([dapo], COST) == pytest.approx(10 + DYNAMIC_STEPS * PROXY.steps * 0.51)
    (tuned,) = plan(find("noise_in_sft"), Tier.PROXY, 1, ["bf16_sft"])
    assert ensemble_seconds([tuned], COST) == pytest.approx(10 + UPDATE_SHARE * PROXY.steps * 0.51)


def test_recorded_runs_spend_the_stated_share_of_a_step_on_their_update() -> None:
    # Seeds from 10 on ran beside ranks up to 128, whose updates take longer.
    recorded = [
        record.effects["seconds"]
        for record in blessed_records(expected_folder(None), Tier.PROXY, "table1")
        if "seconds" in record.effects and record.seed < 10
    ]
    update, rollout = (
        sum(seconds[f"{name}_seconds"] for seconds in recorded) for name in ("update", "rollout")
    )
    assert update / (update + rollout) == pytest.approx(UPDATE_SHARE, abs=0.03)


def test_recorded_ensembles_are_predicted_within_a_quarter() -> None:
    ensembles = recorded_ensembles()
    assert sum(len(ensemble.runs) for ensemble in ensembles) >= 75
    for ensemble in ensembles:
        together = find(ensemble.runs[0].target).costs[Tier.PROXY].together
        assert together is not None
        # Records keep whole seconds, and an evaluation of ten untrained runs takes 13.
        predicted = ensemble_seconds(ensemble.runs, together)
        assert predicted == pytest.approx(ensemble.seconds, rel=0.25, abs=5)


# Wall seconds of commands on two H200s of one host (d36c27d), as the shell's clock had them; a
# command's runs are those that earlier ones had not made.
@pytest.mark.parametrize(
    ("names", "earlier", "seeds", "seconds"),
    [
        (["table1", "aqn_factorial"], [], range(5, 10), 224),
        (["noise_reach", "matched_noise"], ["table1"], range(5, 10), 142),
        (["figure9", "figure16", "figure17", "answer_reward"], ["table1"], range(5, 10), 186),
        (["table2", "norms", "as_published"], ["table1"], range(5, 10), 305),
        (["figure4_dapo", "figure10", "table1"], ["table1"], range(5, 15), 525),
    ],
)
def test_whole_commands_are_predicted_within_a_quarter(
    names: list[str], earlier: list[str], seeds: range, seconds: float
) -> None:
    together = COST_MEASURED.together
    assert together is not None
    made, asked = (
        {run.digest(): run for name in target_names for run in plan(find(name), Tier.PROXY, which)}
        for target_names, which in ((earlier, range(5, 10)), (names, seeds))
    )
    tasks = ensemble_tasks(
        [run for digest, run in asked.items() if digest not in made],
        Path(),
        devices=2,
        costs={PROXY.checkpoint: together},
        grouping=lambda runs, _: likely_groups(runs, together.runs_together),
    )
    times = [ensemble_seconds(task.every, together) for task in tasks]
    assert together.begin_seconds + queue_seconds(times, 2) == pytest.approx(seconds, rel=0.25)


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
    assert "the policy proxy-30m; first: python -m repro run pretrain-proxy --size 30m\n" in text


def test_a_plan_names_arms_of_several_targets_with_their_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPRO_POLICIES", str(tmp_path))
    assert main(["plan", "needle_policies", "--tier", "proxy", "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for policy in ("", "_seed1", "_seed2", "_seed3"):
        assert text.count(f"needle_4{policy}.bf16_lora ") == 1
    assert "pretrain-proxy --size 30m-needle4-seed3" in text
    assert "13 GPU minutes; ensembles of 32, 32, 32, 32 runs" in text


def test_a_plan_says_what_is_a_prediction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPRO_POLICIES", str(tmp_path))
    records_folder = Path("records", "proxy", "nvidia_h200")
    (tmp_path / records_folder).mkdir(parents=True)
    (tmp_path / "paper").mkdir()
    for path in (expected_folder(None) / records_folder).glob("table1.*"):
        shutil.copy(path, tmp_path / records_folder)
    said = {}
    for name in ("table1", "figure9", "table2", "entropy_start", "noise_in_sft"):
        line = ["plan", name, "--tier", "proxy", "--runs", str(tmp_path / "runs")]
        assert main([*line, "--expected", str(tmp_path)]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "a prediction" in line]
        said[name] = lines[0].strip() if lines else ""
    assert said["table1"] == ""
    nowhere = "a prediction: no blessed run of "
    assert said["figure9"] == f"{nowhere}aqn_linear, aqn_cosine, aqn_logarithmic"
    assert said["table2"] == f"{nowhere}all arms; a step with dynamic sampling counts as 2"
    assert said["entropy_start"] == f"{nowhere}all arms"
    assert said["noise_in_sft"] == f"{nowhere}all arms"


def test_every_target_of_the_tier_has_an_estimate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPRO_POLICIES", str(tmp_path))
    for target in TARGETS:
        if Tier.PROXY in target.scales:
            assert main(["plan", target.name, "--tier", "proxy", "--runs", str(tmp_path)]) == 0
            text = capsys.readouterr().out
            assert "time      not known" not in text, target.name
            assert "time      0 s" not in text, target.name


def config_of(policy: str, vocabulary: int = 3072) -> dict[str, int]:
    """Return of a policy's configuration what memory depends on."""
    recipe = PROXIES[policy]
    return {
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.key_value_heads,
        "vocab_size": vocabulary,
    }


# Wall seconds of commands with three workers on one H200 (5b2729b, a9b0dfe).
@pytest.mark.parametrize(
    ("name", "seeds", "sizes", "seconds"),
    [
        ("learning_rates_skill", range(300, 302), [10, 10, 8], 187),
        ("skill", range(216, 224), [16, 16, 8, 8], 236),
    ],
)
def test_commands_whose_workers_share_a_card_are_predicted_within_a_quarter(
    name: str, seeds: range, sizes: list[int], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The policy had been pre-trained without human-written problems, whose words take most tokens.
    monkeypatch.setattr(grouping, "_config", functools.partial(config_of, vocabulary=896))
    target, workers = find(name), 3
    together = target.costs[Tier.PROXY].together
    assert together is not None
    runs = plan(target, Tier.PROXY, seeds)
    tasks = ensemble_tasks(
        runs,
        Path(),
        devices=1,
        costs={run.scale.checkpoint: together for run in runs},
        grouping=lambda some, _: grouping.group_runs(some, _H200_BYTES // workers),
        shared_by=workers,
    )
    assert [len(task.every) for task in tasks] == sizes
    times = [ensemble_seconds(task.every, together, workers) for task in tasks]
    assert together.begin_seconds + queue_seconds(times, workers) == pytest.approx(
        seconds, rel=0.25
    )


def test_the_larger_policys_runs_fit_together_where_they_are_planned_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouping, "_config", config_of)
    runs = plan(find("figure13"), Tier.PROXY)
    together = COST_LARGE.together
    assert together is not None
    assert together.memory_bytes < _H200_BYTES
    assert grouping.footprint(runs).runs_in(together.memory_bytes) >= len(runs)
    assert together.runs_together == len(runs)
