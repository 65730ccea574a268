"""Short runs of a target's smoke tier."""

from __future__ import annotations

import dataclasses

from repro.spec.config import RunConfig
from repro.spec.target import Target, plan
from repro.spec.tier import Tier


def small_runs(target: Target, arm: str = "nvfp4_lora", seeds: int = 1) -> list[RunConfig]:
    """Return an arm's runs, which ask few questions; those of several seeds train together."""
    small = []
    for run in plan(target, Tier.SMOKE, seeds, [arm]):
        data = dataclasses.replace(run.scale.data, test_problems=8, development_problems=6)
        evaluation = dataclasses.replace(run.scale.evaluation, every=2)
        scale = dataclasses.replace(
            run.scale,
            data=data,
            evaluation=evaluation,
            checkpoint_every=1,
            prompts_per_rollout=4,
            together=seeds > 1,
        )
        small.append(dataclasses.replace(run, scale=scale))
    return small
