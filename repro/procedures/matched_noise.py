"""The arms whose 16-bit weights carry noise as strong as a format's rounding, made ready.

The strength is found on calibration prompts of the training split, or on completions of them that
the 16-bit policy samples, the same for every seed; the noise and so its sigma differ by seed, and
so does the format's rounding where each seed has an order of channels of its own. The receipt with
both KLs goes into the record's effects.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import cast

from repro.data.problem import Problem
from repro.data.prompts import Tokenizer, render
from repro.measure.dose import own_completions, predicting_completion
from repro.models.policy import Policy, load_policy
from repro.models.weight_noise import MatchedNoise, matched_sigma, plant_noise
from repro.spec.config import RunConfig, TrainScale

CALIBRATION_PROMPTS = 64


def plant_matched_noise(policy: Policy, run: RunConfig, problems: Sequence[Problem]) -> None:
    """Put the arm's weight noise on a freshly loaded policy, and its receipt into the effects."""
    matched = strength(run, policy, problems)
    changed = plant_noise(policy, matched.sigma, seed=run.seed)
    policy.effects["weight_noise"] = dataclasses.asdict(matched) | {"projections": len(changed)}


def strength(run: RunConfig, policy: Policy, problems: Sequence[Problem]) -> MatchedNoise:
    """Return the strength at which the run's own noise matches its format."""
    scale: TrainScale = run.scale
    if run.arm.weight_noise is None:
        raise ValueError(f"arm {run.arm.name} has no weight noise to match")
    prompts = [
        render(problem, scale.prompt_template, cast(Tokenizer, policy.tokenizer))
        for problem in problems[:CALIBRATION_PROMPTS]
    ]
    rows, counted = prompts, []
    if run.arm.weight_noise.matched_on == "completions":
        counted = [predicting_completion(len(prompt)) for prompt in prompts]
        rows = _completed(
            scale.checkpoint,
            scale.compute_dtype,
            str(policy.device),
            tuple(map(tuple, prompts)),
            scale.rollout.max_new_tokens,
        )
    return matched_sigma(
        scale.checkpoint,
        run.arm.weight_noise.matched_to,
        rows,
        seed=run.seed,
        compute_dtype=scale.compute_dtype,
        device=policy.device,
        order=run.seed if scale.permuted else None,
        counted=counted,
    )


@functools.lru_cache(maxsize=1)
def _completed(
    checkpoint: str,
    compute_dtype: str,
    device: str,
    prompts: tuple[tuple[int, ...], ...],
    new_tokens: int,
) -> list[list[int]]:
    """Return prompts with the 16-bit policy's own completions; runs of one ensemble share them."""
    policy = load_policy(
        checkpoint,
        weight_format="bf16",
        compute_dtype=compute_dtype,
        device=device,
    )
    return own_completions(policy, prompts, new_tokens, seed=0)
