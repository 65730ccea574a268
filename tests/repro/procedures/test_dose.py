"""The dose before training: against one clean policy, on the same and on own completions."""

import dataclasses
import functools
import math
from pathlib import Path

import pytest
import torch

from repro.data.load import load_problems
from repro.models.policy import load_policy
from repro.procedures import dose as module
from repro.run.carry_out import procedure_named
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets import find
from repro.targets.table1 import SMOKE
from tests.repro.models.whole_kl import distributions, mean_kl
from tests.repro.small_runs import context_of

PROMPTS, GROUP = 5, 4


def run_of(arm, seed=0, **changes):
    (run,) = plan(find("dose_coder_0_5b"), Tier.MINI, [seed], [arm])
    scale = dataclasses.replace(
        SMOKE,
        data=dataclasses.replace(SMOKE.data, development_problems=PROMPTS),
        rollout=dataclasses.replace(SMOKE.rollout, max_new_tokens=24),
        group_size=GROUP,
        evaluation=dataclasses.replace(SMOKE.evaluation, samples=GROUP, at=(1, GROUP)),
        permuted=True,
        **changes,
    )
    return dataclasses.replace(run, tier="smoke", scale=scale)


@functools.cache
def measured(arm, seed=0):
    return procedure_named("dose")(run_of(arm, seed), context_of(Path()))


def value(result, name):
    return result.metrics[name].value


def test_the_clean_policy_is_no_dose_and_its_own_tokens_are_the_common_ones():
    clean = measured("bf16_lora")
    assert value(clean, "kl_completions") == pytest.approx(0, abs=1e-9)
    assert value(clean, "entropy_own") == pytest.approx(value(clean, "entropy_forced"), rel=1e-6)
    assert len(clean.series["entropy_own_by_prompt"]) == PROMPTS
    assert 0 < value(clean, "choice") <= 0.25
    assert set(clean.metrics) == {
        metric.name for metric in find("dose_coder_0_5b").metrics if metric.name != "pass_at_16"
    } | {"working_rate"} | {
        f"{name}_at_{k}{reading}"
        for reading in ("", "_lenient")
        for name, k in (("pass", 1), ("pass", GROUP), ("maj", 1), ("maj", GROUP), ("mean", GROUP))
    }


def test_the_dose_grows_with_the_error_and_differs_by_draw():
    kl = {
        arm: value(measured(arm), "kl_completions")
        for arm in ("nvfp4_half", "nvfp4_lora", "nvfp4_x2", "nvfp4_lora_aqn", "nvfp4_lora_aqn_x5")
    }
    assert 0 < kl["nvfp4_half"] < kl["nvfp4_lora"] / 2 < kl["nvfp4_x2"] / 4
    assert kl["nvfp4_lora_aqn"] != kl["nvfp4_lora"]
    assert kl["nvfp4_lora_aqn_x5"] > kl["nvfp4_lora_aqn"]
    assert value(measured("nvfp4_lora", seed=1), "kl_completions") != kl["nvfp4_lora"]


def test_a_warmer_policy_has_more_entropy_in_its_own_distribution():
    cold, clean, warm = (
        value(measured(arm), "entropy_forced") for arm in ("bf16_t90", "bf16_lora", "bf16_t120")
    )
    assert cold < clean < warm


def test_the_kl_is_that_of_whole_distributions():
    run = run_of("nvfp4_lora")
    common = module._common(module._untreated(run))
    changed = load_policy("tiny", weight_format="nvfp4", compute_dtype="float32", order=0)
    (prompts,) = {len(load_problems(run.scale.data, "development"))}
    (part,) = common.parts
    assert prompts == len(common.asked) == PROMPTS
    own = []
    for number, question in enumerate(common.asked):
        group = range(number * GROUP, (number + 1) * GROUP)
        rows = [[*question.prompt, *part.token_ids[row][part.mask[row]].tolist()] for row in group]
        predicting = slice(len(question.prompt) - 1, -1)
        own.append(mean_kl(*(distributions(of, rows, predicting)
                             for of in (common.policy, changed))))  # fmt: skip
    kls = measured("nvfp4_lora").series["kl_completions_by_prompt"]
    assert kls == pytest.approx(own, rel=1e-3)


def test_only_finished_rows_count_where_they_alone_are_asked_for():
    rows = module._common(module._untreated(run_of("bf16_lora"))).parts[0]
    values = torch.arange(float(rows.mask.sum()))
    ended = dataclasses.replace(rows, truncated=torch.zeros_like(rows.truncated))
    cut = dataclasses.replace(rows, truncated=torch.ones_like(rows.truncated))
    assert module._by_prompt(ended, values, finished=True) == module._by_prompt(ended, values)
    assert all(map(math.isnan, module._by_prompt(cut, values, finished=True)))
    first = values[rows.prompt_of_row[:, None].expand_as(rows.mask)[rows.mask] == 0]
    assert module._by_prompt(rows, values)[0] == pytest.approx(float(first.mean()))


def test_a_prompt_without_the_value_is_left_out_and_none_at_all_is_no_number():
    assert module._mean([1.0, math.nan, 3.0], "nats").value == 2.0
    assert module._mean([math.nan], "nats").value is None
