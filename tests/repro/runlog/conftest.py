"""A short run of a target's smoke tier."""

import dataclasses

from repro.spec.target import plan
from repro.spec.tier import Tier


def small_of(target, arm="nvfp4_lora"):
    """Return an arm's run of seed 0, which asks few questions."""
    (run,) = plan(target, Tier.SMOKE, 1, [arm])
    scale = dataclasses.replace(
        run.scale,
        data=dataclasses.replace(run.scale.data, test_problems=8, development_problems=6),
        evaluation=dataclasses.replace(run.scale.evaluation, every=2),
        checkpoint_every=1,
        prompts_per_rollout=4,
    )
    return dataclasses.replace(run, scale=scale)
