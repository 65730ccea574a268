"""Which runs go together: what may differ inside an ensemble, and how many memory allows."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from repro.rl.stacked import grouping
from repro.rl.stacked.grouping import (
    footprint,
    group_runs,
    kind_of,
)
from repro.spec.arm import DAPO, GRPO, NoiseConfig
from repro.spec.config import LearningRates
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
