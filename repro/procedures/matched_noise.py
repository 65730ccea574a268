"""The arms whose 16-bit weights carry noise as strong as a format's rounding, made ready.

The strength is found on completions that the 16-bit policy samples of calibration prompts of the
training split. The noise and so its sigma differ by seed, and so does the format's rounding where
each seed has an order of channels of its own. Both policies are loaded alike, adapter and all. The
receipt with both KLs goes into the record's facts.
"""

from __future__ import annotations

import dataclasses

from repro.data.load import load_problems
from repro.data.prompts import render
from repro.measure.noise_dose import own_completions
from repro.models.policy import Policy, load_policy
from repro.models.weight_noise import plant_matched_noise
from repro.spec.config import RunConfig, TrainScale

CALIBRATION_PROMPTS = 64


def plant_arms_noise(policy: Policy, run: RunConfig) -> None:
    """Put the arm's weight noise, if any, on a freshly loaded policy; its receipt tells."""
    scale: TrainScale = run.scale
    arm = run.arm
    if arm.weight_noise is None:
        return
    prompts = [
        render(problem, scale.prompt_template, policy.tokenizer)
        for problem in load_problems(scale.data, "train")[:CALIBRATION_PROMPTS]
    ]
    rows = own_completions(policy, prompts, scale.rollout.max_new_tokens, seed=0)
    rounded = load_policy(
        scale.checkpoint,
        revision=scale.revision,
        weight_format=arm.weight_noise.matched_to,
        training="lora" if arm.training == "lora" else "none",
        lora_rank=arm.lora_rank,
        lora_alpha=arm.lora_alpha,
        compute_dtype=scale.compute_dtype,
        seed=run.seed,
        device=policy.device,
        order=run.seed if scale.permuted else None,
    )
    receipt = plant_matched_noise(
        policy,
        rounded,
        rows,
        list(map(len, prompts)),
        matched_to=arm.weight_noise.matched_to,
        seed=run.seed,
    )
    policy.facts["weight_noise"] = dataclasses.asdict(receipt)
