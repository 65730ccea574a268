"""Entropy before training: per prompt, on the same tokens, and with noise that really acts."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.evidence.environment import capture_environment
from repro.evidence.procedure import Measured
from repro.evidence.receipts import refusals
from repro.evidence.record import read_record
from repro.procedures import entropy_start as module
from repro.run.carry_out import keep, procedure_named
from repro.spec.config import RunConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.table1 import SMOKE

PROMPTS = 5
pytestmark = pytest.mark.usefixtures("planned_targets")


def run_of(arm: str, target: str = "entropy_start", seed: int | None = None) -> RunConfig:
    (run,) = plan(find(target), Tier.MINI, None if seed is None else [seed], [arm])
    data = dataclasses.replace(SMOKE.data, development_problems=PROMPTS)
    rollout = dataclasses.replace(SMOKE.rollout, max_new_tokens=12)
    scale = dataclasses.replace(
        SMOKE,
        data=data,
        rollout=rollout,
        group_size=2,
        evaluation=dataclasses.replace(SMOKE.evaluation, dose=run.scale.evaluation.dose),
        permuted=run.scale.permuted,
    )
    return dataclasses.replace(run, tier="smoke", scale=scale)


def dose(arm: str, tmp_path: Path, seed: int = 200) -> Measured:
    return measured(arm, tmp_path, "study_doses", seed)


def measured(
    arm: str, tmp_path: Path, target: str = "entropy_start", seed: int | None = None
) -> Measured:
    return procedure_named("entropy")(
        run_of(arm, target, seed),
        folder=tmp_path,
        progress=lambda text, values: None,
        should_stop=lambda: False,
        threads=1,
    )


def test_for_bf16_its_own_samples_are_the_common_tokens(tmp_path: Path) -> None:
    result = measured("bf16", tmp_path)
    own = result.series["entropy_own_by_prompt"]
    assert len(own) == PROMPTS
    assert own == result.series["entropy_forced_by_prompt"]
    assert result.metrics["entropy_own"].value == pytest.approx(sum(map(float, own)) / PROMPTS)
    limit = float(torch.log(torch.tensor(10_000.0)))
    assert all(0 < float(value) < limit for value in own)


def test_rounding_and_noise_change_the_entropy_on_the_same_tokens(tmp_path: Path) -> None:
    plain = measured("bf16", tmp_path)
    for arm in ("nvfp4", "bf16_noisy"):
        other = measured(arm, tmp_path)
        assert other.inputs == plain.inputs
        forced = other.series["entropy_forced_by_prompt"]
        assert forced != plain.series["entropy_forced_by_prompt"]
        noise = other.effects["noise_at_start"]
        assert (noise["channels_changed"] > 0) is (arm == "bf16_noisy")
    assert noise["sigma"] == pytest.approx(1e-2)


def test_the_common_tokens_are_sampled_once_and_parts_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {arm: measured(arm, tmp_path) for arm in ("bf16", "mxfp4")}
    sampled = []
    sample = module._sample

    def counted(*args: Any) -> Any:
        sampled.append(len(args[-1]))
        return sample(*args)

    monkeypatch.setattr(module, "_sample", counted)
    monkeypatch.setattr(module, "_PROMPTS_AT_ONCE", 3)
    module._common.cache_clear()
    for arm, expected in whole.items():
        result = measured(arm, tmp_path)
        for name, values in expected.series.items():
            assert result.series[name] == pytest.approx(values, abs=1e-5), (arm, name)
    # The common ones, then each arm's own.
    assert sampled == [3, 2] * 3
    module._common.cache_clear()


def test_a_target_that_does_not_ask_for_the_dose_keeps_its_form(tmp_path: Path) -> None:
    result = measured("nvfp4", tmp_path)
    assert set(result.metrics) == {"entropy_own", "entropy_forced"}
    assert set(result.series) == {"entropy_own_by_prompt", "entropy_forced_by_prompt"}


def test_the_dose_grows_with_the_error_and_is_nothing_for_bf16(tmp_path: Path) -> None:
    doses = {
        arm: dose(arm, tmp_path)
        for arm in ("bf16_lora", "nvfp4_lora", "nvfp4_x2", "nvfp4_x4", "nvfp4_lora_aqn", "aqn_03")
    }
    kl = {arm: one.metrics["kl_completions"].value or 0.0 for arm, one in doses.items()}
    assert kl["bf16_lora"] == pytest.approx(0.0, abs=1e-9)
    assert 1e-4 < kl["nvfp4_lora"] < kl["nvfp4_x2"] / 2 < kl["nvfp4_x4"] / 4
    # A sigma of .01 is small beside the rounding, one of .3 is not.
    assert kl["nvfp4_lora_aqn"] == pytest.approx(kl["nvfp4_lora"], rel=0.5)
    assert kl["aqn_03"] > 3 * kl["nvfp4_lora"]
    assert doses["aqn_03"].effects["noise_at_start"]["sigma"] == pytest.approx(0.3)
    for one in doses.values():
        by_prompt = one.series["kl_completions_by_prompt"]
        assert len(by_prompt) == PROMPTS
        assert one.metrics["kl_completions"].value == pytest.approx(sum(by_prompt) / PROMPTS)


@torch.no_grad()
def test_the_kl_is_that_of_the_dose_command_on_the_same_tokens(tmp_path: Path) -> None:
    run = run_of("nvfp4_x4", "study_doses", 200)
    result = dose("nvfp4_x4", tmp_path)
    (rows,) = module._common(run.scale, run.seed, run.tier).parts
    plain_arm = find("study_doses").arm("bf16_lora")
    plain = module.load_arm(dataclasses.replace(run, arm=plain_arm), "cpu")
    changed = module.load_arm(run, "cpu")
    for prompt, expected in enumerate(result.series["kl_completions_by_prompt"]):
        own = (rows.prompt_of_row == prompt).nonzero().flatten()
        total, tokens = 0.0, 0
        for row in own.tolist():
            ids = [*rows.prompts[prompt], *rows.token_ids[row][rows.mask[row]].tolist()]
            begin = len(rows.prompts[prompt]) - 1
            p, q = (
                of.model(input_ids=torch.tensor([ids])).logits[0, begin:-1].double().log_softmax(-1)
                for of in (plain, changed)
            )
            total += float((p.exp() * (p - q)).sum())
            tokens += len(p)
        assert expected == pytest.approx(total / tokens, rel=1e-3)


def test_a_seed_is_a_rounding_draw_on_tokens_of_the_same_function(tmp_path: Path) -> None:
    run = run_of("nvfp4_lora", "study_doses", 200)
    assert run.scale.permuted
    fixed = dataclasses.replace(run.scale, permuted=False)
    ordered, stored = (module._common(scale, 200, "smoke") for scale in (run.scale, fixed))
    for one, other in zip(ordered.parts, stored.parts, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
    assert not torch.equal(ordered.clean[0][0], stored.clean[0][0])
    assert torch.allclose(ordered.clean[0][0], stored.clean[0][0], atol=1e-3)
    draws = {
        permuted: procedure_named("entropy")(
            dataclasses.replace(run, scale=dataclasses.replace(run.scale, permuted=permuted)),
            folder=tmp_path,
            progress=lambda text, values: None,
            should_stop=lambda: False,
            threads=1,
        )
        for permuted in (True, False)
    }
    one, other = (draws[key].metrics["kl_completions"].value or 0.0 for key in (True, False))
    assert one != pytest.approx(other, rel=1e-3)
    assert 1 / 4 < one / other < 4


def test_the_arms_own_samples_are_graded_prompt_by_prompt(tmp_path: Path) -> None:
    run = run_of("bf16_lora", "study_doses", 200)
    assert "accuracy_sampled_start" in dose("bf16_lora", tmp_path).metrics
    (rows,) = module._common(run.scale, run.seed, run.tier).parts
    problems = module.load_problems(run.scale.data, "development")
    policy = module.load_arm(run, "cpu")
    right = [f"<think>so</think><answer>{problems[row // 2].answer}</answer>" for row in range(10)]
    texts = [answer if row % 3 else "none" for row, answer in enumerate(right)]
    policy.tokenizer.batch_decode = lambda ids, **_: texts  # type: ignore[union-attr]
    with module.GraderPool(workers=1) as pool:
        percents = module._accuracies(policy, problems, rows, pool)
    hits = [sum(1 for row in (2 * n, 2 * n + 1) if row % 3) for n in range(PROMPTS)]
    assert len(set(hits)) > 1
    assert percents == [50.0 * number for number in hits]


@pytest.mark.parametrize("arm", ["mxfp4_lora", "nvfp4_x4", "aqn_03", "noise_as_nvfp4"])
def test_an_arm_of_each_kind_runs_to_a_record_that_counts(arm: str, tmp_path: Path) -> None:
    run = run_of(arm, "study_doses", 201)
    path = keep(run, dose(arm, tmp_path, 201), datetime.now(UTC), tmp_path, capture_environment())
    record = read_record(path)
    assert refusals(record, find("study_doses").metrics) == []
    assert record.effects["order"] == 201
