"""Added noise of S runs in one step: each run's own values, stages and receipt.

Everything is `repro.rl.noise`'s; here the values are only laid side by side, (S, 2 L + 1, H), or
(S, 5 L + 1, H) where projections do not share a norm's, zero where a run or a norm has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.models.decoder import BLOCK_NORMS
from repro.rl.noise import NoiseReceipt, draw_noise, names_of_draws, receipt_of
from repro.rl.stacked.stack import Stack
from repro.spec.arm import NoiseConfig, NoiseSharing
from repro.spec.config import RunConfig
from repro.spec.schedule import sigma_of_stage, stage_of_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AddedNoise:
    """One step's noise.

    Attributes
    ----------
    rollout : Tensor or None, (S, 2 L + 1 or 5 L + 1, H), float32
        What the sampler adds, as of `Stack.weights`; None where no run adds any.
    shared : Tensor or None
        What the trainer adds too: that of the runs whose noise reaches it.
    receipts
        One per run.
    """

    rollout: Tensor | None
    shared: Tensor | None
    receipts: list[NoiseReceipt]


@torch.no_grad()
def added_noise(runs: Sequence[RunConfig], stack: Stack, *, step: int) -> AddedNoise:
    """Draw the noise of a step, counted from 0.

    Raises
    ------
    ValueError
        When some runs share noise by norm and others by projection.
    """
    sharing = sharing_of(runs)
    names = norm_names(stack.shape.layers)
    draws = [name for norm in names for name in names_of_draws(norm, sharing)]
    places = {name: place for place, name in enumerate(draws)}
    values = torch.zeros(len(runs), len(places), stack.shape.hidden)  # (S, draws, H)
    gains: dict[str, Tensor] = {}
    receipts = []
    for number, run in enumerate(runs):
        config = run.arm.noise
        stage = 0 if config is None else stage_of_step(config, step, run.scale.steps)
        sigma = 0.0 if config is None else sigma_of_stage(config, stage)
        drawn: dict[str, Tensor] = {}
        if config is not None and sigma > 0:
            for norm in _touched(config, names):
                if norm not in gains:
                    gains[norm] = stack.gains(norm).cpu()
                for name in names_of_draws(norm, sharing):
                    drawn[name] = draw_noise(
                        gains[norm][number], sigma, seed=run.seed, step=step, name=name,
                        form=config.form,
                    )  # fmt: skip
                    values[number, places[name]] = drawn[name]
        form = "none" if config is None else config.form
        receipts.append(receipt_of(drawn, form=form, stage=stage, sigma=sigma))
    if not bool(values.any()):
        return AddedNoise(rollout=None, shared=None, receipts=receipts)
    reaching = [run.arm.noise is not None and run.arm.noise.reach == "shared" for run in runs]
    shared = values * torch.tensor(reaching)[:, None, None] if any(reaching) else None
    return AddedNoise(
        rollout=values.to(stack.device),
        shared=None if shared is None else shared.to(stack.device),
        receipts=receipts,
    )


def sharing_of(runs: Sequence[RunConfig]) -> NoiseSharing:
    """Return who shares a norm's noise in an ensemble; by norm where no run has any.

    Raises
    ------
    ValueError
        When it differs between runs: products are of one shape for all.
    """
    kinds = sorted({run.arm.noise.sharing for run in runs if run.arm.noise is not None})
    if len(kinds) > 1:
        raise ValueError(f"runs of an ensemble share noise by {' and '.join(kinds)}; needs one")
    return kinds[0] if kinds else "norm"


def norm_names(layers: int) -> list[str]:
    """Return the names of all norms, the final one last."""
    blocks = [f"model.layers.{layer}.{norm}" for layer in range(layers) for norm in BLOCK_NORMS]
    return [*blocks, "model.norm"]


def _touched(config: NoiseConfig, names: Sequence[str]) -> Sequence[str]:
    """Return the norms that a form perturbs."""
    if config.form == "as_published":
        return []
    return names if config.form == "as_released" else names[:-1]
