"""The proxy tier's targets: one scale, arms that coincide run once, controls one step away."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from repro.__main__ import main
from repro.data.load import load_problems
from repro.data.proxy_problems import UNSEEN_LEVELS
from repro.data.worked import worked_completion
from repro.evidence.record import Record
from repro.models.proxy_names import proxy_folder
from repro.run.select import select
from repro.spec.arm import NoiseConfig, WeightNoise
from repro.spec.config import LearningRates, RunConfig, TrainScale
from repro.spec.target import differing_fields, plan
from repro.spec.tier import Tier
from repro.targets import TARGETS, find, runs_of
from repro.targets.ladder import AGAIN, LADDER, OVER_POLICIES
from repro.targets.ladder.common import FRESH_SEEDS
from repro.targets.proxy import ORDER_SEEDS, PROXY, PROXY_SWEEP, TEST_SEEDS, TUNING_SEEDS
from repro.targets.supervised import NOISE_IN_SFT_DRAWS
from repro.targets.table1 import SMOKE, TABLE1

PROXY_TARGETS = [
    target for target in TARGETS if isinstance(target.scales.get(Tier.PROXY), TrainScale)
]
# Those of the second protocol; the ladder has its own scales and seeds (`test_ladder.py`).
LATER = (*LADDER, *AGAIN, *OVER_POLICIES, NOISE_IN_SFT_DRAWS)
SECOND_PROTOCOL = [target for target in PROXY_TARGETS if target not in LATER]


def planned(name: str) -> list[RunConfig]:
    (selection,) = select([name], tier="proxy")
    return selection.plan()


def test_every_learning_claim_of_the_paper_has_a_scale_here() -> None:
    figures = [f"figure{number}" for number in (4, 5, *range(7, 11), *range(12, 18))]
    for name in ("table1", "table2", "figure4_dapo", *figures):
        assert Tier.PROXY in runs_of(find(name)).scales, name


def test_the_targets_have_one_scale_but_for_data_policy_and_seeds() -> None:
    for target in SECOND_PROTOCOL:
        scale = target.scales[Tier.PROXY]
        same = dataclasses.replace(
            PROXY,
            seeds=scale.seeds,
            data=scale.data,
            test_sets=scale.test_sets,
            checkpoint=scale.checkpoint,
            optimizer=scale.optimizer,
        )
        assert scale == same, target.name


def test_tuning_seeds_are_not_test_seeds() -> None:
    assert not set(TUNING_SEEDS) & set(ORDER_SEEDS)
    assert {run.seed for run in planned("learning_rates")} == set(TUNING_SEEDS)
    assert PROXY_SWEEP.test_sets == ()
    assert PROXY_SWEEP.optimizer.learning_rates.chosen == ()


def test_no_run_of_the_first_protocol_is_one_of_this() -> None:
    """Its seeds 0 to 4 were looked at before steps and rates were changed."""
    for target in SECOND_PROTOCOL:
        scale = target.scales[Tier.PROXY]
        assert scale.steps == 2 * 60, target.name
        assert scale.evaluation.token_budget == 2 * 150_000, target.name
        if target.procedure != "entropy":
            assert not set(scale.seeds) & set(range(5)), target.name


def test_an_order_has_ten_seeds_and_the_rest_at_least_five() -> None:
    for target in TARGETS:
        source = runs_of(target)
        if source not in SECOND_PROTOCOL or source.name == "learning_rates":
            continue
        kinds = {claim.kind for claim in target.claims if claim.applies(Tier.PROXY)}
        if all(claim.paired_by == "prompt" for claim in target.claims):
            continue
        seeds = source.scales[Tier.PROXY].seeds
        if kinds & {"order", "trend"}:
            assert seeds == ORDER_SEEDS, target.name
        else:
            assert seeds in (TEST_SEEDS, ORDER_SEEDS), target.name


def test_shared_arms_are_planned_at_the_seeds_of_those_who_share_them() -> None:
    for target in PROXY_TARGETS:
        for home, _ in target.shared.values():
            own = set(target.scales[Tier.PROXY].seeds)
            assert own <= set(home.scales[Tier.PROXY].seeds), target.name


def test_arms_that_coincide_are_the_same_run() -> None:
    table = {run.digest() for run in planned("table1")}
    runs = {(run.target, run.arm.name) for run in planned("figure9")}
    assert ("table1", "nvfp4_lora_aqn") in runs
    assert ("figure9", "aqn_exponential") not in runs
    for name in ("figure9", "figure10", "figure17", "aqn_factorial", "matched_noise", "norms"):
        own = {run.digest() for run in planned(name)}
        assert own & table, name
        assert own - table, name


def test_figure_15_is_served_by_figure_9s_runs(
    tmp_path: Path, proxy_record: Callable[..., Record], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [run.digest() for run in planned("figure15")] == [
        run.digest() for run in planned("figure9")
    ]
    for run in planned("figure9"):
        record = proxy_record(run)
        assert not any("figure15" in key for key in record.inputs)
        record.write(tmp_path)
    line = ["figure15", "--tier", "proxy", "--runs", str(tmp_path)]
    assert main(["plan", *line]) == 0
    text = capsys.readouterr().out
    assert "20 runs (20 recorded, 0 to do)" in text
    assert "its runs serve both figures" in text
    assert main(["check", *line]) == 0
    assert "figure15, proxy tier, NVIDIA H200: 20 records" in capsys.readouterr().out


def test_no_two_targets_run_the_same_arm_twice() -> None:
    seen: dict[str, tuple[str, str]] = {}
    for target in PROXY_TARGETS:
        for run in plan(target, Tier.PROXY, 1):
            place = (run.target, run.arm.name)
            arm = dataclasses.replace(run.arm, name="arm", label="")
            # A sweep has its arms at the scale that they are compared at, on tuning seeds; and
            # what is asked again, or shares such runs, is asked of seeds of its own.
            tuning = target.name.startswith("learning_rates")
            fresh = run.seed in FRESH_SEEDS
            scale = dataclasses.replace(run.scale, seeds=())
            key = repr((run.procedure, arm, scale, tuning, fresh))
            assert seen.setdefault(key, place) == place


def test_a_shared_arm_must_be_the_same_arm_at_the_same_scale() -> None:
    figure = find("figure9")
    with pytest.raises(ValueError, match=r"aqn_linear shared with .* differs in noise"):
        dataclasses.replace(figure, shared={"aqn_linear": (TABLE1, "nvfp4_lora_aqn")})
    longer = {Tier.PROXY: dataclasses.replace(PROXY, steps=200)}
    with pytest.raises(ValueError, match="another scale at the proxy tier"):
        dataclasses.replace(figure, scales=longer)


def test_controls_are_one_step_from_an_arm_of_the_table() -> None:
    reach = find("noise_reach")
    assert differing_fields(reach.arm("aqn_shared"), reach.arm("nvfp4_lora_aqn")) == {"noise"}
    assert reach.arm("aqn_shared").noise == NoiseConfig(reach="shared")
    assert reach.arm("aqn_corrected").loss.importance_cap == 2.0
    matched = find("matched_noise").arm("bf16_lora_noise_as_nvfp4")
    assert matched.weight_noise == WeightNoise(matched_to="nvfp4")
    assert differing_fields(matched, TABLE1.arm("bf16_lora")) == {"weight_noise"}
    factorial = find("aqn_factorial")
    assert sum(arm.noise is not None for arm in factorial.arms) == len(factorial.arms) / 2
    assert find("answer_reward").arm("bf16_lora_answer").reward == "answer"
    assert find("as_published").arm("as_published").norms_trained


def test_noise_on_quantised_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="stands in for rounding"):
        dataclasses.replace(TABLE1.arm("nvfp4_lora"), weight_noise=WeightNoise(matched_to="nf4"))
    with pytest.raises(ValueError, match="rounds nothing"):
        WeightNoise(matched_to="bf16")


def test_supervised_fine_tuning_has_something_to_teach() -> None:
    scale = find("noise_in_sft").scales[Tier.PROXY]
    assert set(scale.data.levels) == set(UNSEEN_LEVELS)
    assert not set(scale.data.levels) & set(PROXY.data.levels)
    # What is written fits what is asked for, with room: the policy's tokens are words and digits.
    for problem in load_problems(scale.data, "train")[:500]:
        written = worked_completion(problem, scale.prompt_template)
        assert len(re.findall(r"\d|[^\W\d]+|[^\w\s]|\n", written)) < 100
        assert written.endswith(f"<answer>{problem.answer}</answer>")


def test_a_chosen_rate_is_shared_by_arms_of_one_format_and_training() -> None:
    rates = LearningRates(lora_16bit=1.0, lora_4bit=2.0, full=3.0, chosen=(("nvfp4_lora", 5.0),))
    assert rates.of(TABLE1.arm("nvfp4_lora")) == 5.0
    assert rates.of(TABLE1.arm("nvfp4_lora_aqn")) == 5.0
    assert rates.of(find("figure16").arm("qerl_3e5")) == 15.0
    assert rates.of(TABLE1.arm("nf4_lora")) == 2.0
    assert rates.of(TABLE1.arm("bf16_full")) == 3.0


def test_what_came_later_leaves_the_digests_of_earlier_records_alone() -> None:
    run = plan(TABLE1, Tier.SMOKE, 1)[0]
    assert "weight_noise" not in run.resolved()["arm"]
    assert "learning_rate" not in run.resolved()["arm"]
    assert "exploration" not in run.resolved()["arm"]
    (noisy,) = plan(TABLE1, Tier.SMOKE, 1, ["nvfp4_lora_aqn"])
    assert "sharing" not in noisy.resolved()["arm"]["noise"]
    assert "test_sets" not in run.resolved()["scale"]
    changed = dataclasses.replace(run, scale=dataclasses.replace(SMOKE, test_sets=PROXY.test_sets))
    assert changed.digest() != run.digest()
    assert changed.resolved()["scale"]["test_sets"][0]["name"] == "hard"


def test_planning_looks_for_policies_where_they_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable, value in (("REPRO_POLICIES", str(tmp_path)), ("XDG_CACHE_HOME", str(tmp_path))):
        monkeypatch.delenv("REPRO_POLICIES", raising=False)
        monkeypatch.setenv(variable, value)
        needs = find("table1").needs_at(Tier.PROXY)
        assert needs.lacking() == ("proxy-30m",)
        folder = proxy_folder("proxy-30m")
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
        assert needs.lacking() == ()
