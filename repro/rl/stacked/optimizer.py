"""AdamW over S runs at once: one row per run, each with its own learning rate and gradient norm.

The formula and its order are torch's (decoupled decay, moments, bias corrections, step), so that a
run's row moves as `torch.optim.AdamW` would move it alone. Norms are clipped per run: one over all
runs would let a run's large gradient shrink another's step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from repro.rl.stacked.masters import Masters
from repro.spec.config import OptimizerConfig

# torch.optim.AdamW's and clip_grad_norm_'s own.
_EPSILON = 1e-8
_CLIP_EPSILON = 1e-6


class StackedAdamW:
    """AdamW on the rows of `Masters`, with moments `first` and `second`, (S, n) float32.

    Raises
    ------
    ValueError
        When the configuration names another optimiser.
    """

    def __init__(self, masters: Masters, config: OptimizerConfig) -> None:
        if config.name != "adamw":
            raise ValueError(f"optimizer is {config.name}; an ensemble has adamw")
        self.masters, self.config = masters, config
        self.first = torch.zeros_like(masters.values)
        self.second = torch.zeros_like(masters.values)
        self.steps = 0

    @torch.no_grad()
    def gradient_norms(self) -> list[float]:
        """Return the norm of each run's gradient."""
        return [float(norm) for norm in torch.linalg.vector_norm(self.masters.gradients, dim=1)]

    @torch.no_grad()
    def step(self, rates: Sequence[float], norms: Sequence[float], alive: Sequence[bool]) -> None:
        """Clip, move every run that is alive, and clear all gradients.

        Rates and norms (of `gradient_norms`) are one per run; a run that is not alive keeps
        parameters and moments.
        """
        config, masters = self.config, self.masters
        self.steps += 1
        correction1 = 1 - config.beta1**self.steps
        correction2 = 1 - config.beta2**self.steps
        for rows in _stretches(alive):
            gradient = masters.gradients[rows]
            factor = [min(1.0, config.max_grad_norm / (n + _CLIP_EPSILON)) for n in norms[rows]]
            gradient.mul_(_column(factor, gradient))
            value, first, second = masters.values[rows], self.first[rows], self.second[rows]
            if config.weight_decay:
                value.mul_(_column([1 - r * config.weight_decay for r in rates[rows]], value))
            first.lerp_(gradient, 1 - config.beta1)
            second.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
            root = second.sqrt().div_(correction2**0.5).add_(_EPSILON)
            root.reciprocal_().mul_(first)
            value.addcmul_(root, _column([-r / correction1 for r in rates[rows]], value))
        masters.gradients.zero_()


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).unsqueeze(1)  # (s, 1)


def _stretches(alive: Sequence[bool]) -> list[slice]:
    """Return the maximal slices of runs that are alive."""
    stretches: list[slice] = []
    for run, lives in enumerate(alive):
        if not lives:
            continue
        if stretches and stretches[-1].stop == run:
            stretches[-1] = slice(stretches[-1].start, run + 1)
        else:
            stretches.append(slice(run, run + 1))
    return stretches
