"""An ensemble trains what each of its runs would have been trained to alone.

In float64 the two may differ by the order of sums alone: about 1e-13 here. Where the packaged code
insists on float32 (masters, norms, log-probabilities), the tests replace both sides' by one float64
form; nothing of the ensemble's own is replaced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from repro.models.policy import Policy
from repro.rl.single_run import single_policy as single
from repro.spec.arm import DAPO, LossConfig, NoiseConfig
from repro.spec.config import EvaluationConfig, RunConfig
from tests.repro.rl.stacked import conftest as small
from tests.repro.rl.uneven_rows import BNPO, exact_head, exact_norm

NOISE = NoiseConfig(sigma_start=0.1, sigma_end=0.05, num_stages=3)
SHARED = dataclasses.replace(NOISE, reach="shared", form="as_released")
make_run = small.make_run
# Clip range of order 3e-4 / 4e-4 as GSPO's authors give it: a sequence ratio moves far less.
GSPO = LossConfig(name="gspo", ratio="sequence", clip_low=3e-4, clip_high=4e-4)


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies, norms and log-probabilities be float64 on both sides."""
    load = small.load

    def load_exact(run: RunConfig) -> Policy:
        policy = load(run)
        policy.model.double()
        policy.compute_dtype = torch.float64
        return policy

    def trainable(policy: Policy) -> dict[str, Any]:
        return {n: p for n, p in policy.model.named_parameters() if p.requires_grad}

    monkeypatch.setattr(small, "load", load_exact)
    monkeypatch.setattr(small, "trainable_parameters", trainable)
    monkeypatch.setattr("repro.rl.stacked.stack.trainable_parameters", trainable)
    monkeypatch.setattr(single, "trainable_parameters", trainable)
    monkeypatch.setattr("kernels.reference.rms_norm", exact_norm)
    monkeypatch.setattr("kernels.dispatch.token_logprobs", exact_head)


@pytest.fixture(scope="module")
def trained_alone() -> dict[str, small.Trained]:
    """Return a place for the runs in float64 that several tests compare with, by digest."""
    return {}


@pytest.fixture
def alone_once(
    in_float64: None, alone: Callable[..., Any], trained_alone: dict[str, small.Trained]
) -> Callable[[RunConfig], small.Trained]:
    """Return what trains a run by itself in float64, each run once."""

    def start(run: RunConfig) -> small.Trained:
        digest = run.digest()
        if digest not in trained_alone:
            trained_alone[digest] = alone(run)
        return trained_alone[digest]

    return start


def largest_difference(one: small.Trained, other: small.Trained) -> float:
    assert one.parameters.keys() == other.parameters.keys()
    return max(
        float((one.parameters[name] - other.parameters[name]).abs().max())
        for name in one.parameters
    )


def require_equal(
    runs: Sequence[RunConfig], alone: Callable[..., Any], together: Callable[..., Any]
) -> None:
    """Train both ways and compare parameters, series and receipts."""
    batched = together(runs)
    for run, many in zip(runs, batched, strict=True):
        one = alone(run)
        assert one.result.finished
        assert many.result.finished
        assert many.result.step == one.result.step
        assert largest_difference(one, many) < 1e-10
        require_same_series(one.result.series, many.result.series)
        require_same_facts(one.result.facts, many.result.facts)


def require_same_series(one: dict[str, list[Any]], many: dict[str, list[Any]]) -> None:
    assert list(one) == list(many)
    for name, values in one.items():
        # The sampler's own log-probabilities are float32 alone and float64 here.
        bound = 1e-4 if name.startswith("sampler_trainer") else 1e-6
        assert many[name] == pytest.approx(values, abs=bound), name


def require_same_facts(one: dict[str, Any], many: dict[str, Any]) -> None:
    assert one.keys() == many.keys()
    assert many["noise"] == one["noise"]
    assert many["rows"] == one["rows"]
    assert many["seconds"].keys() == one["seconds"].keys()
    assert many["advantage_group_mean_max"] == one["advantage_group_mean_max"]


AGAIN = dataclasses.replace(DAPO, mask_truncated=False, dynamic_sampling=3)
ONCE = dataclasses.replace(AGAIN, dynamic_sampling=0)
BY_FIVE = small.with_steps(small.SCALE, micro_batch_rows=5)
ENSEMBLES: dict[str, list[RunConfig]] = {
    "formats, seeds, noise, rates and ranks": [
        make_run(seed=0),
        make_run(seed=1, weight_format="nvfp4", noise=NOISE, learning_rate_factor=2.0),
        make_run(seed=2, weight_format="nf4", noise=SHARED, lora_rank=2),
        make_run(seed=1, weight_format="mxfp4", loss=LossConfig(beta=0.05)),
        make_run(seed=3, loss=GSPO, learning_rate_factor=1.5),
    ],
    "full fine-tuning": [
        make_run(seed=0, training="full", learning_rate_factor=1.0),
        make_run(seed=1, training="full", learning_rate_factor=3.0),
    ],
    "trained norms with noise on them": [
        make_run(seed=0, norms_trained=True, noise=SHARED),
        make_run(seed=1, norms_trained=True, weight_format="nvfp4"),
    ],
    "dynamic sampling beside a run without it": [
        make_run(seed=0, loss=AGAIN),
        make_run(seed=1),
        make_run(seed=5, loss=AGAIN),
    ],
    "micro-batches of the loss that are not those of the passes": [
        make_run(seed=0, loss=BNPO, scale=BY_FIVE),
        make_run(seed=1, scale=BY_FIVE, weight_format="nvfp4"),
    ],
}


@pytest.mark.parametrize("runs", ENSEMBLES.values(), ids=ENSEMBLES)
def test_an_ensemble_trains_what_its_runs_train_alone(
    runs: list[RunConfig], alone_once: Callable[..., Any], together: Callable[..., Any]
) -> None:
    require_equal(runs, alone_once, together)


def test_a_warmer_policy_is_on_policy(
    alone_once: Callable[..., Any], together: Callable[..., Any]
) -> None:
    warm = [make_run(seed=seed, temperature_factor=1.5) for seed in (0, 1)]
    require_equal(warm, alone_once, together)
    plain, warmer = (alone_once(run).result for run in (make_run(seed=0), warm[0]))
    assert warmer.series["completion_tokens"] != plain.series["completion_tokens"]
    assert warmer.series["entropy"][0] > plain.series["entropy"][0]
    # What is drawn from is what the gradient is taken of.
    assert max(warmer.series["sampler_trainer_abs_diff_max"]) < 1e-4


def test_training_curves(alone_once: Callable[..., Any], together: Callable[..., Any]) -> None:
    evaluation = EvaluationConfig(threshold=30.0)
    scale = small.with_steps(small.SCALE, evaluation=evaluation)
    runs = [make_run(seed=0, scale=scale), make_run(seed=5, scale=scale, loss=AGAIN)]
    batched = together(runs)
    for run, many in zip(runs, batched, strict=True):
        one = alone_once(run)
        require_same_series(one.result.series, many.result.series)
        series = many.result.series
        assert series["tokens_sampled"][-1] == many.result.facts["rows"]["tokens_sampled"]
    plain, drawn_again = (trained.result.series for trained in batched)
    assert plain["accuracy_sampled"] == plain["accuracy"]
    # Groups that dynamic sampling left out were sampled, too.
    assert drawn_again["accuracy_sampled"] != drawn_again["accuracy"]
    rows = batched[1].result.facts["rows"]
    assert rows["groups_drawn"] * runs[1].scale.group_size > rows["trained_on"]
    # A run whose scale asks for none of it has the series of before.
    own = {"accuracy_sampled", "tokens_sampled"}
    assert own <= plain.keys()
    assert plain.keys() - own == alone_once(make_run(seed=0)).result.series.keys()


def test_several_updates_and_the_sampler_as_old_policy_in_float32(
    alone: Callable[..., Any], together: Callable[..., Any]
) -> None:
    scale = small.with_steps(small.SCALE, updates_per_rollout=3, steps=4)
    everything = LossConfig(scale_by_std=False, beta=1e-3)
    runs = [
        make_run(seed=0, scale=scale, loss=everything),
        make_run(
            seed=1, scale=scale, noise=NOISE,
            loss=dataclasses.replace(everything, old_policy="sampler"),
        ),
        make_run(
            seed=2, scale=scale, noise=NOISE,
            loss=dataclasses.replace(everything, importance_cap=2.0),
        ),
    ]  # fmt: skip
    # Where advantages are zero, the gradient is that of the KL term alone: beta times a difference
    # of two float32 log-probabilities, which is known to an epsilon and no better.
    floor = everything.beta * torch.finfo(torch.float32).eps
    batched = together(runs)
    for run, many in zip(runs, batched, strict=True):
        one = alone(run)
        assert list(one.result.series) == list(many.result.series)
        for name in ("reward", "completion_tokens", "grad_norm", "ratio", "importance_weight"):
            # None where no row of a part gave a gradient.
            actual, expected = (
                [math.nan if value is None else value for value in trained.result.series[name]]
                for trained in (many, one)
            )
            assert actual == pytest.approx(expected, rel=1e-4, abs=floor, nan_ok=True), name
        # AdamW turns gradients that are rounding into steps of some part of the learning rate.
        moved = [
            (one.parameters[name] - many.parameters[name]).abs().flatten()
            for name in one.parameters
        ]
        assert float(torch.cat(moved).mean()) < 1e-3 * 1e-3
