"""The arms whose 16-bit weights carry noise as strong as a format's rounding, made ready.

The strength is found on calibration prompts of the training split, the same for every seed; the
noise and so its sigma differ by seed. The receipt with both KLs goes into the record's effects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

from repro.data.problem import Problem
from repro.data.prompts import Tokenizer, render
from repro.models.policy import Policy
from repro.models.weight_noise import MatchedNoise, matched_sigma, plant_noise
from repro.spec.config import RunConfig, TrainScale

CALIBRATION_PROMPTS = 64


def plant_matched_noise(policy: Policy, run: RunConfig, problems: Sequence[Problem]) -> None:
    """Put the arm's weight noise on a freshly loaded policy, and its receipt into the effects."""
    wanted = run.arm.weight_noise
    if wanted is None:
        raise ValueError(f"arm {run.arm.name} has no weight noise to plant")
    found = strength(run, policy, problems)
    changed = plant_noise(policy, found.sigma, seed=run.seed)
    policy.effects["weight_noise"] = dataclasses.asdict(found) | {"projections": len(changed)}


def strength(run: RunConfig, policy: Policy, problems: Sequence[Problem]) -> MatchedNoise:
    """Return the strength at which the run's own noise matches its format."""
    scale: TrainScale = run.scale
    if run.arm.weight_noise is None:
        raise ValueError(f"arm {run.arm.name} has no weight noise to match")
    prompts = [
        render(problem, scale.prompt_template, cast(Tokenizer, policy.tokenizer))
        for problem in problems[:CALIBRATION_PROMPTS]
    ]
    return matched_sigma(
        scale.checkpoint,
        run.arm.weight_noise.matched_to,
        prompts,
        seed=run.seed,
        compute_dtype=scale.compute_dtype,
        device=policy.device,
    )
