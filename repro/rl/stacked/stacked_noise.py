"""Added noise of S runs in one step: each run's own values, stages and receipt.

Everything is `repro.rl.noise`'s; here the values are only laid side by side, (S, 2 L + 1, H), zero
where a run or a norm has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.models.decoder import BLOCK_NORMS
from repro.rl.noise import NoiseReceipt, draw_noise, receipt_of
from repro.rl.stacked.stack import Stack
from repro.spec.arm import NoiseConfig
from repro.spec.config import RunConfig
from repro.spec.schedule import sigma_of_stage, stage_of_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AddedNoise:
    """One step's noise.

    Attributes
    ----------
    rollout : Tensor or None, (S, 2 L + 1, H), float32
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
    """Draw the noise of a step, counted from 0."""
    names = norm_names(stack.shape.layers)
    values = torch.zeros(len(runs), len(names), stack.shape.hidden)  # (S, 2 L + 1, H)
    gains: dict[str, Tensor] = {}
    receipts = []
    for number, run in enumerate(runs):
        config = run.arm.noise
        stage = 0 if config is None else stage_of_step(config, step, run.scale.steps)
        sigma = 0.0 if config is None else sigma_of_stage(config, stage)
        drawn: dict[str, Tensor] = {}
        if config is not None and sigma > 0:
            for place, name in enumerate(_touched(config, names)):
                if name not in gains:
                    gains[name] = stack.gains(name).cpu()
                drawn[name] = draw_noise(
                    gains[name][number], sigma, seed=run.seed, step=step, name=name,
                    form=config.form,
                )  # fmt: skip
                values[number, place] = drawn[name]
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


def norm_names(layers: int) -> list[str]:
    """Return the names of all norms, the final one last."""
    blocks = [f"model.layers.{layer}.{norm}" for layer in range(layers) for norm in BLOCK_NORMS]
    return [*blocks, "model.norm"]


def _touched(config: NoiseConfig, names: Sequence[str]) -> Sequence[str]:
    """Return the norms that a form perturbs."""
    if config.form == "as_published":
        return []
    return names if config.form == "as_released" else names[:-1]
