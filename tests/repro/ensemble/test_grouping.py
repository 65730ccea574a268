"""Which runs go together: what may differ inside an ensemble, and how many memory allows."""

from __future__ import annotations

import dataclasses

import pytest

from repro.ensemble.grouping import footprint, group_runs, kind_of
from repro.spec.config import DAPO, GRPO, LearningRates, NoiseConfig
from tests.repro.ensemble import conftest as small

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
    assert group_runs(runs, 64 * GIB) == [tuple(runs)]


def test_what_changes_the_computation_goes_apart() -> None:
    runs = [
        make_run(),
        make_run(training="full"),
        make_run(norms_trained=True),
        make_run(loss=DAPO),
        make_run(scale=small.with_steps(small.SCALE, steps=4)),
        make_run(scale=small.with_steps(small.SCALE, compute_dtype="bfloat16")),
        dataclasses.replace(make_run(training="none"), procedure="evaluate"),
    ]
    assert len({kind_of(run) for run in runs}) == len(runs)
    assert group_runs(runs, 64 * GIB) == [(run,) for run in runs]


def test_memory_decides_how_many_and_arms_are_spread_evenly() -> None:
    arms = [make_run(seed=seed, weight_format=f) for seed in range(5) for f in ("bf16", "nvfp4")]
    per_run = footprint(arms)
    room = per_run.fixed + 4 * (per_run.run + per_run.group)
    groups = group_runs(arms, int(room / 0.8) + 1)
    assert sorted(len(group) for group in groups) == [3, 3, 4]
    assert sorted(run.digest() for group in groups for run in group) == sorted(
        run.digest() for run in arms
    )
    assert [len(group) for group in group_runs(arms, 1)] == [1] * 10
    assert [len(group) for group in group_runs(arms, 64 * GIB, devices=2)] == [5, 5]


def test_larger_runs_are_estimated_larger() -> None:
    plain = footprint([make_run()])
    assert footprint([make_run(lora_rank=64)]).run > plain.run
    assert footprint([make_run(training="full")]).run > plain.run
    wide = small.with_steps(small.SCALE, group_size=8)
    assert footprint([make_run(scale=wide)]).group > plain.group
    assert plain.groups_at_once(4, 64 * GIB, 6) == 6
    tight = plain.fixed + 4 * plain.run + 4 * 2 * plain.group
    assert plain.groups_at_once(4, int(tight / 0.8) + 1, 6) == 2
    assert plain.groups_at_once(4, 1, 6) == 1


def test_a_run_without_a_training_scale_is_refused() -> None:
    with pytest.raises(TypeError, match="TrainScale"):
        kind_of(dataclasses.replace(make_run(), scale=None))
