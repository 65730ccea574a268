"""Weight noise: as strong as a format's rounding, drawn by name, and on 16-bit weights alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from repro.models import weight_noise
from repro.models.policy import Policy, load_policy
from repro.models.weight_noise import (
    MatchedNoise,
    PlantedNoise,
    base_projections,
    last_hidden,
    logprobs,
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


def matched(of: Policy, order: int | None = None) -> MatchedNoise:
    rounded = policy("nvfp4", order)
    return plant_matched_noise(of, rounded, ROWS, PROMPT_TOKENS, matched_to="nvfp4", seed=3)


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
    receipt = matched(noisy, order)
    assert receipt.kl_noise == pytest.approx(receipt.kl_format, rel=0.011)
    assert receipt.projections == len(base_projections(noisy))
    for changed, kl in ((policy("nvfp4", order), receipt.kl_format), (noisy, receipt.kl_noise)):
        q = distributions(changed)
        assert float((clean.exp() * (clean - q)).sum(-1).mean()) == pytest.approx(kl, rel=1e-3)


def test_a_stronger_noise_has_a_larger_divergence() -> None:
    clean = policy()
    first = last_hidden(clean, ROWS)
    noisy = policy()
    planted = PlantedNoise(noisy, seed=0)
    kls = []
    for sigma in (0.01, 0.03, 0.1):
        planted.scale(sigma)
        kls.append(mean_kl(clean, first, noisy, last_hidden(noisy, ROWS)))
    assert 0 < kls[0] < kls[1] < kls[2]


def test_noise_depends_on_seed_and_name_and_reaches_every_projection() -> None:
    before = {name: item.weight.clone() for name, item in base_projections(policy()).items()}
    planted = []
    for seed in (1, 1, 2):
        noisy = policy()
        PlantedNoise(noisy, seed=seed).scale(0.1)
        planted.append({n: item.weight.clone() for n, item in base_projections(noisy).items()})
    assert all(torch.equal(planted[0][name], planted[1][name]) for name in before)
    assert not any(torch.equal(planted[0][name], planted[2][name]) for name in before)
    name = next(iter(before))
    change = (planted[0][name] - before[name]).float()
    ratio = change.square().mean().sqrt() / before[name].float().square().mean().sqrt()
    assert float(ratio) == pytest.approx(0.1, rel=0.1)


def test_noise_on_quantised_or_untouched_weights_is_refused() -> None:
    with pytest.raises(TypeError, match="needs 16-bit weights"):
        PlantedNoise(policy("nvfp4"), seed=0)
    with pytest.raises(ValueError, match="as it was"):
        PlantedNoise(policy(), seed=0).scale(0.0)


def test_rows_side_by_side_are_read_as_each_alone() -> None:
    one = policy()
    for row, together in zip(ROWS, last_hidden(one, ROWS), strict=True):
        (alone,) = last_hidden(one, [row])
        assert together.shape[0] == len(row)
        torch.testing.assert_close(logprobs(one, together), logprobs(one, alone), rtol=0, atol=1e-5)
