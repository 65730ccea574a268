"""Stacked policies: where each run's noise is, and where it is not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from repro.rl.stacked.noise import added_noise
from repro.rl.stacked.policies import StackedPolicies
from repro.rl.stacked.sampler import StackSampler
from repro.rl.stacked.stack import Stack
from repro.spec.arm import NoiseConfig
from tests.repro.rl.stacked import conftest as small

NOISE = NoiseConfig(sigma_start=0.1, sigma_end=0.05, num_stages=3)
RUNS = [
    small.make_run(seed=0),
    small.make_run(seed=1, noise=NOISE),
    small.make_run(seed=2, noise=dataclasses.replace(NOISE, reach="shared")),
]


@pytest.fixture
def policies() -> StackedPolicies:
    stack = small.stack_of(RUNS)
    return StackedPolicies(RUNS, stack, StackSampler(stack, small.positions(RUNS[0])), 2)


def gains(policies: StackedPolicies) -> Tensor:
    """Return the (S, H) gains that the sampler reads at the first norm."""
    return policies.sampler._decoder.weights.layers[0].input_gain.squeeze(1).clone()


def test_the_sampler_reads_each_runs_noise_in_its_rollout_and_none_after_a_refresh(
    policies: StackedPolicies,
) -> None:
    clean = gains(policies)
    with policies.perturbed(1, "rollout") as receipts:
        moved = (gains(policies) != clean).any(dim=1)
    assert moved.tolist() == [False, True, True]
    assert [receipt.sigma > 0 for receipt in receipts] == [False, True, True]
    policies.refresh()
    assert torch.equal(gains(policies), clean)


def test_the_passes_of_an_update_read_the_noise_that_reaches_them_alone(
    policies: StackedPolicies,
) -> None:
    with policies.perturbed(1, "update"):
        noise = policies._passes(1).noise
    assert noise is not None
    assert noise.flatten(1).any(dim=1).tolist() == [False, False, True]
    assert policies._passes(1).noise is None


def test_noise_is_drawn_once_per_step(
    policies: StackedPolicies, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def counted(runs: object, stack: Stack, *, step: int) -> object:
        drawn.append(step)
        return added_noise(RUNS, stack, step=step)

    monkeypatch.setattr("repro.rl.stacked.policies.added_noise", counted)
    for step in (1, 2):
        with policies.perturbed(step, "rollout") as rolling:
            pass
        with policies.perturbed(step, "update") as updating:
            pass
        assert rolling is updating
    assert drawn == [1, 2]
