"""The stacked optimiser moves each row as torch's AdamW moves it alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from repro.rl.stacked.masters import Masters
from repro.rl.stacked.optimizer import StackedAdamW
from tests.repro.rl.stacked import conftest as small

CONFIG = dataclasses.replace(small.SCALE.optimizer, weight_decay=0.1, max_grad_norm=0.5)
RATES = [1e-3, 5e-2, 2e-2]


def starts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # The third run's A and B have a smaller rank.
    return [
        {"A": draw(rank, 5), "B": draw(6, rank), "gain": draw(5)} for rank in (3, 3, 2)
    ]  # fmt: skip


def test_rows_of_several_ranks_move_as_torch_moves_them_with_decay_and_clipping() -> None:
    begun = starts()
    masters = Masters(begun, "cpu")
    stacked = StackedAdamW(masters, CONFIG)
    alone = [
        {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()} for start in begun
    ]
    optimizers = [
        torch.optim.AdamW(
            own.values(), lr=rate, betas=(CONFIG.beta1, CONFIG.beta2), weight_decay=0.1
        )
        for own, rate in zip(alone, RATES, strict=True)
    ]
    generator = torch.Generator().manual_seed(4)
    norms = []
    for step in range(4):
        for run, own in enumerate(alone):
            gradients = small.parameters_of_run(masters, run, masters.gradients)
            for name, parameter in own.items():
                size = 10.0 ** (run - 1 - step)
                gradient = torch.randn(parameter.shape, generator=generator).double() * size
                gradients[name].copy_(gradient)
                parameter.grad = gradient
            norms.append(float(nn.utils.clip_grad_norm_(own.values(), CONFIG.max_grad_norm)))
            optimizers[run].step()
        measured_norms = stacked.gradient_norms()
        assert measured_norms == pytest.approx(norms[-3:], rel=1e-12)
        stacked.step(RATES, measured_norms, [True] * 3)
        assert not bool(masters.gradients.any())
    for run, own in enumerate(alone):
        for name, value in small.parameters_of_run(masters, run).items():
            assert torch.allclose(value, own[name].detach(), rtol=0, atol=1e-14)
    assert float(masters.leaves["A"][2, 2:].detach().abs().max()) == 0


def test_a_frozen_run_stays_whatever_its_gradient_is() -> None:
    masters = Masters(starts(), "cpu")
    stacked = StackedAdamW(masters, CONFIG)
    before = masters.values.clone()
    masters.gradients.fill_(0.1)
    masters.gradients[1] = torch.nan
    norms = stacked.gradient_norms()
    stacked.step(RATES, norms, [True, False, True])
    moved = (masters.values != before).any(1).tolist()
    assert moved == [True, False, True]
    assert bool(torch.isfinite(stacked.first).all())
    assert not bool(masters.gradients.any())
