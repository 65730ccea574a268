"""Weight noise: as strong as a format's rounding, drawn by name, and on 16-bit weights alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from repro.models import weight_noise
from repro.models.policy import Policy, load_policy
from repro.models.weight_noise import (
    PlantedNoise,
    base_projections,
    last_hidden,
    mean_kl,
    plant_matched_noise,
)
from repro.spec.arm import WeightFormat

ROWS = [[5, 9, 40, 7, 21, 3], [8, 8, 30, 2], [11, 50, 60, 17, 4, 33, 12]]
PROMPT_TOKENS = [3, 3, 3]


def policy(weight_format: WeightFormat = "bf16", order: int | None = None) -> Policy:
    return load_policy(
        "tiny",
        weight_format=weight_format,
        training="lora",
        lora_rank=4,
        lora_alpha=4.0,
        seed=1,
        order=order,
    )


@torch.no_grad()
def distributions(of: Policy) -> Tensor:
    """Return those that predict the completions' tokens, one row at a time by the model's head."""
    return torch.cat([
        of.model(input_ids=torch.tensor([row])).logits[0, 2:-1].double().log_softmax(-1)
        for row in ROWS
    ])  # fmt: skip


@pytest.mark.parametrize("order", [None, 7])
def test_the_planted_noise_moves_completions_as_far_as_the_format(
    order: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks as a real model needs them: two rows go forward at once, three tokens to the head.
    monkeypatch.setattr(weight_noise, "_FORWARD", 14)
    monkeypatch.setattr(weight_noise, "_SLICE", 3)
    noisy = policy(order=order)
    clean = distributions(noisy)
    rounded = policy("nvfp4", order)
    receipt = plant_matched_noise(noisy, rounded, ROWS, PROMPT_TOKENS, matched_to="nvfp4", seed=3)
    assert receipt.kl_noise == pytest.approx(receipt.kl_format, rel=0.011)
    assert receipt.projections == len(base_projections(noisy))
    for changed, kl in ((policy("nvfp4", order), receipt.kl_format), (noisy, receipt.kl_noise)):
        q = distributions(changed)
        assert float((clean.exp() * (clean - q)).sum(-1).mean()) == pytest.approx(kl, rel=1e-3)


def test_noise_depends_on_seed_and_name_and_a_stronger_one_moves_further() -> None:
    clean = policy()
    before = {name: item.weight.clone() for name, item in base_projections(clean).items()}
    planted, kls = [], []
    for seed, sigma in ((1, 0.1), (1, 0.1), (2, 0.1), (1, 0.03), (1, 0.01)):
        noisy = policy()
        PlantedNoise(noisy, seed=seed).scale(sigma)
        planted.append({n: item.weight.clone() for n, item in base_projections(noisy).items()})
        kls.append(mean_kl(clean, last_hidden(clean, ROWS), noisy, last_hidden(noisy, ROWS)))
    assert all(torch.equal(planted[0][name], planted[1][name]) for name in before)
    assert not any(torch.equal(planted[0][name], planted[2][name]) for name in before)
    assert kls[1] > kls[3] > kls[4] > 0
    name = next(iter(before))
    change = (planted[0][name] - before[name]).float()
    ratio = change.square().mean().sqrt() / before[name].float().square().mean().sqrt()
    assert float(ratio) == pytest.approx(0.1, rel=0.1)


def test_noise_on_quantised_or_untouched_weights_is_refused() -> None:
    with pytest.raises(TypeError, match="needs 16-bit weights"):
        PlantedNoise(policy("nvfp4"), seed=0)
    with pytest.raises(ValueError, match="as it was"):
        PlantedNoise(policy(), seed=0).scale(0.0)
