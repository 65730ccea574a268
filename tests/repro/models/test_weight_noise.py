"""Weight noise: as strong as a format's rounding, drawn by name, and on 16-bit weights alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from repro.models.policy import Policy, load_policy
from repro.models.weight_noise import (
    base_projections,
    matched_sigma,
    mean_kl,
    plant_noise,
    token_logprobs,
)
from repro.spec.arm import WeightFormat

PROMPTS = [[5, 9, 40, 7, 21, 3], [8, 8, 30, 2], [11, 50, 60, 17, 4, 33, 12]]


def policy(weight_format: WeightFormat = "bf16", training: str = "lora") -> Policy:
    return load_policy(
        "tiny",
        weight_format=weight_format,
        training=training,  # type: ignore[arg-type]
        lora_rank=4,
        lora_alpha=4.0,
        seed=1,
    )


def test_the_noise_found_moves_the_logits_as_far_as_the_format() -> None:
    matched = matched_sigma("tiny", "nvfp4", PROMPTS, seed=3, compute_dtype="float32", device="cpu")
    assert matched.kl_noise == pytest.approx(matched.kl_format, rel=0.011)
    # The receipt is of what happens, not of what was asked for: measured again from outside.
    clean = token_logprobs(policy(training="none"), PROMPTS)
    rounded = mean_kl(clean, token_logprobs(policy("nvfp4", "none"), PROMPTS))
    assert rounded == pytest.approx(matched.kl_format, rel=1e-6)
    noisy = policy(training="none")
    plant_noise(noisy, matched.sigma, seed=3)
    planted = mean_kl(clean, token_logprobs(noisy, PROMPTS))
    assert planted == pytest.approx(matched.kl_noise, rel=1e-6)


def test_a_stronger_noise_has_a_larger_divergence() -> None:
    clean = token_logprobs(policy(), PROMPTS)
    divergences = []
    for sigma in (0.01, 0.03, 0.1):
        noisy = policy()
        plant_noise(noisy, sigma, seed=0)
        divergences.append(mean_kl(clean, token_logprobs(noisy, PROMPTS)))
    assert 0 < divergences[0] < divergences[1] < divergences[2]


def test_noise_depends_on_seed_and_name_and_reaches_every_projection() -> None:
    before = {name: item.weight.clone() for name, item in base_projections(policy()).items()}
    planted = []
    for seed in (1, 1, 2):
        noisy = policy()
        assert plant_noise(noisy, 0.1, seed=seed) == list(before)
        planted.append({n: item.weight.clone() for n, item in base_projections(noisy).items()})
    assert all(torch.equal(planted[0][name], planted[1][name]) for name in before)
    assert not any(torch.equal(planted[0][name], planted[2][name]) for name in before)
    name = next(iter(before))
    change = (planted[0][name] - before[name]).float()
    ratio = change.square().mean().sqrt() / before[name].float().square().mean().sqrt()
    assert float(ratio) == pytest.approx(0.1, rel=0.1)


def test_noise_on_quantised_or_untouched_weights_is_refused() -> None:
    with pytest.raises(TypeError, match="needs 16-bit weights"):
        plant_noise(policy("nvfp4"), 0.1, seed=0)
    with pytest.raises(ValueError, match="as it was"):
        plant_noise(policy(), 0.0, seed=0)


def test_prompts_side_by_side_are_read_as_each_alone() -> None:
    together = token_logprobs(policy(), PROMPTS)
    for prompt, logprobs_together in zip(PROMPTS, together, strict=True):
        (alone,) = token_logprobs(policy(), [prompt])
        assert logprobs_together.shape[0] == len(prompt)
        assert torch.allclose(logprobs_together, alone, atol=1e-5)


def test_only_counted_positions_are_matched_and_in_the_order_that_will_be_planted() -> None:
    settings: dict[str, Any] = {"seed": 3, "compute_dtype": "float32", "device": "cpu"}
    counted = [slice(2, -1)] * len(PROMPTS)
    matched = matched_sigma("tiny", "nvfp4", PROMPTS, **settings, order=7, counted=counted)

    def part(order: int, which: WeightFormat = "bf16", sigma: float = 0.0) -> list[torch.Tensor]:
        other = load_policy("tiny", weight_format=which, training="none", lora_rank=4,
                            lora_alpha=4.0, seed=1, order=order)  # fmt: skip
        if sigma:
            plant_noise(other, sigma, seed=3)
        return [row[2:-1] for row in token_logprobs(other, PROMPTS)]

    clean = part(7)
    assert mean_kl(clean, part(7, "nvfp4")) == pytest.approx(matched.kl_format, rel=1e-4)
    assert mean_kl(clean, part(7, sigma=matched.sigma)) == pytest.approx(matched.kl_noise, rel=1e-4)
    # Another order rounds other blocks and puts the same draw on other channels.
    assert mean_kl(clean, part(8, "nvfp4")) != pytest.approx(matched.kl_format, rel=1e-2)
    everywhere = matched_sigma("tiny", "nvfp4", PROMPTS, **settings, order=7)
    assert everywhere.kl_format != pytest.approx(matched.kl_format, rel=1e-2)
