"""Settings at their bounds train: the weights move, and the way in which others move them."""

import pytest
import torch

from repro.spec.arm import LossConfig
from repro.spec.config import LearningRates, OptimizerConfig
from tests.repro.small_runs import weights


def moved(go, folder, rate=1e-2, **changes):
    """Return how one step moves the trained weights, as one vector, over its learning rate."""
    start = {}
    optimizer = {name: changes.pop(name) for name in list(changes) if name in OPTIMIZER}
    rates = LearningRates(lora_16bit=rate, lora_4bit=rate, full=rate)
    result, policy, _ = go(
        folder=folder,
        steps=1,
        prepare=lambda policy, sampler: start.update(weights(policy)),
        optimizer=OptimizerConfig(learning_rates=rates, **optimizer),
        **changes,
    )
    assert result.step == 1
    now = weights(policy)
    return torch.cat([(now[name] - start[name]).flatten() for name in sorted(start)]) / rate


@pytest.fixture(scope="module")
def plainly():
    """Hold how usual settings move the weights, once it is known."""
    return []


OPTIMIZER = {"beta1", "beta2", "weight_decay", "max_grad_norm", "warmup_steps", "schedule"}


@pytest.mark.parametrize(
    "extreme",
    [
        {"rate": 1e-12},
        {"rate": 1},
        {"beta1": 0},
        {"beta1": 0.999999},
        {"beta2": 0},
        {"beta2": 0.999999},
        {"weight_decay": 1},
        {"max_grad_norm": 1e-6},
        {"max_grad_norm": 1e18},
        {"warmup_steps": 1, "schedule": "cosine"},
        {"lora_alpha": 0.01},
        {"lora_alpha": 1e6},
        {"loss": LossConfig(advantage_epsilon=1, clip_low=1e-18, clip_high=1e-18)},
        {"loss": LossConfig(advantage_epsilon=0, clip_high=1e18, importance_cap=1)},
        {"loss": LossConfig(beta=100)},
    ],
    ids=str,
)
def test_a_setting_at_its_bound_moves_the_weights_as_others_do(go, extreme, plainly):
    if not plainly:
        plainly.append(moved(go, "plain"))
    (plain,), own = plainly, moved(go, "own", **extreme)
    assert bool(own.isfinite().all())
    assert float(own.norm()) > 0.01 * float(plain.norm())
    assert float(torch.cosine_similarity(plain, own, dim=0)) > 0.5
