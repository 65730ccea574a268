r"""Schedules: the learning rate and the deviation of the added noise, by step.

They follow from the configuration alone, so they need no torch: training asks for each step's
values, and a record's series are held against the same functions.

Learning rate: a linear warm-up, then constant or a half cosine.

Adaptive quantisation noise (AQN): training is cut into K stages, the first without added noise.
With M steps in all and a step counted from 0, the two forms are

    as_described   k = floor(step / floor(M / K))     (Algorithm 1; its step counts from 1)
                   sigma(k) = start * (end / start)^((k - 1) / (K - 1)),  k >= 1      (Eq. 8)
    as_released    k = floor(step / (M / K))
                   sigma(k) = start * (end / start)^((k - 1) / (K - 2))

so that as described the last stage, k = K - 1, does *not* reach sigma_end, and as released it does.
The other schedules of Fig. 9 follow the same positions p = (k - 1) / (n - 1), n being K or K - 1:

    linear        start + (end - start) p
    cosine        end + (start - end) (1 + cos(pi p)) / 2
    logarithmic   start - (start - end) ln k / ln n

Fig. 15 agrees with these for linear, cosine and logarithmic at n = K = 10. Its exponential curve is
another one, 0.05 * 10^(-0.4 (k - 1)): it reaches sigma_end at k = 6 and stays there. Eq. 8 is used.

Sources: arXiv 2510.11696 section 3.3, Algorithm 1, Eq. 8, Fig. 9 and 15.
"""

from __future__ import annotations

import math

from repro.spec.arm import NoiseConfig
from repro.spec.config import RunConfig, TrainScale


def learning_rate_of_run(run: RunConfig, step: int) -> float:
    """Return the learning rate of a run's step counted from 0.

    It rises linearly over `warmup_steps`, of which the first step already takes 1/warmup of the
    peak, then stays, or falls by a half cosine that would reach 0 one step after the last.
    """
    scale: TrainScale = run.scale
    config, peak = scale.optimizer, scale.optimizer.learning_rates.of(run.arm)
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    span = max(scale.steps - config.warmup_steps, 1)
    return peak * (1 + math.cos(math.pi * (step - config.warmup_steps) / span)) / 2


def stage_of_step(config: NoiseConfig, step: int, total_steps: int) -> int:
    """Return the stage, 0 to K - 1, of a step counted from 0.

    `as_described` follows Algorithm 1's floor(M / K), so that left-over steps at the end belong to
    the last stage; with fewer steps than stages (the paper is silent) a stage lasts one step.
    """
    if config.form == "as_described":
        stage = step // max(total_steps // config.num_stages, 1)
    else:
        stage = int(step // (total_steps / config.num_stages))
    return min(stage, config.num_stages - 1)


def sigma_of_stage(config: NoiseConfig, stage: int) -> float:
    """Return the standard deviation of a stage in [0, num_stages); 0 in stage 0."""
    if stage == 0:
        return 0.0
    start, end = config.sigma_start, config.sigma_end
    points = config.num_stages if config.form == "as_described" else config.num_stages - 1
    # Three stages as released leave two noisy ones, the least for which a position is defined.
    position = (stage - 1) / (points - 1)
    if config.schedule == "exponential":
        return float(start * (end / start) ** position)
    if config.schedule == "linear":
        return start + (end - start) * position
    if config.schedule == "cosine":
        return end + (start - end) * (1 + math.cos(math.pi * position)) / 2
    return start - (start - end) * math.log(stage) / math.log(points)
