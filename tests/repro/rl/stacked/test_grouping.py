"""Which runs go together: what may differ inside an ensemble, and how many memory allows."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from repro.rl.stacked import grouping
from repro.rl.stacked.grouping import (
    evaluation_share,
    footprint,
    group_runs,
    kind_of,
    prompts_at_once,
)
from repro.spec.arm import DAPO, GRPO, NoiseConfig
from repro.spec.config import EvaluationConfig, LearningRates, ProblemSet, RunConfig, SamplingConfig
from repro.spec.target import plan
from repro.spec.tier import Tier
from tests.repro.planned import SCALE, STUDY
from tests.repro.rl.stacked import conftest as small

GIB = 2**30
make_run = small.make_run


def test_formats_seeds_noise_ranks_losses_and_rates_go_together() -> None:
    rates = LearningRates(lora_16bit=1.0, lora_4bit=2.0, full=3.0)
    other = dataclasses.replace(small.SCALE.optimizer, learning_rates=rates)
    runs = [
        make_run(seed=0),
        make_run(seed=7, weight_format="nvfp4", noise=NoiseConfig()),
        make_run(lora_rank=16, reward="random", learning_rate_factor=3.0),
        make_run(loss=dataclasses.replace(GRPO, beta=0.1)),
        make_run(scale=small.with_steps(small.SCALE, optimizer=other, seeds=(9,))),
    ]
    assert len({kind_of(run) for run in runs}) == 1
    assert group_runs(runs, 64 * GIB) == [tuple(sorted(runs, key=lambda run: run.seed))]


def test_what_changes_the_computation_goes_apart() -> None:
    runs = [
        make_run(),
        make_run(training="full"),
        make_run(norms_trained=True),
        make_run(temperature_factor=1.1),
        make_run(loss=DAPO),
        make_run(scale=small.with_steps(small.SCALE, steps=4)),
        make_run(scale=small.with_steps(small.SCALE, compute_dtype="bfloat16")),
        dataclasses.replace(make_run(training="none"), procedure="evaluate"),
    ]
    assert len({kind_of(run) for run in runs}) == len(runs)
    assert group_runs(runs, 64 * GIB) == [(run,) for run in runs]


def test_memory_decides_how_many_and_arms_are_spread_evenly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouping, "WHOLE_EVALUATION_BYTES", 1)
    arms = [make_run(seed=seed, weight_format=f) for seed in range(5) for f in ("bf16", "nvfp4")]
    per_run = footprint(arms)
    room = (
        per_run.fixed + 4 * per_run.run + max(per_run.reading, 4 * per_run.longest * per_run.token)
    )
    groups = group_runs(arms, int(room / 0.8) + 1)
    assert sorted(len(group) for group in groups) == [3, 3, 4]
    assert sorted(run.digest() for group in groups for run in group) == sorted(
        run.digest() for run in arms
    )
    # Seeds stay whole but for one at a cut.
    for group, after in itertools.pairwise(groups):
        assert group[-1].seed <= after[0].seed
    assert [len(group) for group in group_runs(arms, 1)] == [1] * 10
    assert [len(group) for group in group_runs(arms, 64 * GIB, devices=2)] == [5, 5]


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Return fifty runs of a policy of 30 million parameters, as the estimate was fitted on.

    Of 1,983 recorded runs of such a policy, ensembles of up to 50 held 130 GB or less on an H200.
    """
    shape = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 3072,
    }
    monkeypatch.setattr(grouping, "_config", {"tiny": shape}.__getitem__)
    data = dataclasses.replace(SCALE.data, test_problems=500)
    sets = tuple(ProblemSet(name=name, data=data) for name in ("one", "two"))
    scale = dataclasses.replace(
        SCALE,
        data=data,
        steps=120,
        max_prompt_tokens=448,
        rollout=SamplingConfig(max_new_tokens=128),
        evaluation=EvaluationConfig(
            every=20, sampling=SamplingConfig(temperature=0.6, max_new_tokens=128)
        ),
        compute_dtype="bfloat16",
        test_sets=sets,
    )
    target = dataclasses.replace(STUDY, scales={Tier.MINI: scale})
    return plan(target, Tier.MINI, 5, ["bf16_lora", "nvfp4_lora"]) * 5


def test_a_worker_of_two_on_a_card_of_80_gigabytes_has_a_third_of_the_runs(
    many: list[RunConfig],
) -> None:
    card = 80 * 10**9
    share = evaluation_share(card // 2)
    assert 0.5 < share < 1
    assert evaluation_share(card) == 1
    assert footprint(many).runs_in(card // 2) < 10
    estimate = footprint(many, share=share)
    assert estimate.runs_in(card // 2) >= 18
    tokens = estimate.tokens_at_once(18, card // 2)
    assert estimate.peak(18, tokens) < card // 2
    assert prompts_at_once(18, 1, 200, share) < prompts_at_once(18, 1, 200)


def test_fifty_runs_fit_a_card_of_80_gigabytes(many: list[RunConfig]) -> None:
    card = 80 * 10**9
    estimate = footprint(many)
    assert estimate.runs_in(card) >= 50
    assert estimate.peak(50, estimate.tokens_at_once(50, card)) * 1.13 < card
