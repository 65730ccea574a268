"""The optimiser: float32 masters, learning rates by step, clipping, the 8-bit variant's errors."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from repro.rl.optimizers import build_optimizer, gradient_step, optimizer_tensors, restore_optimizer
from repro.spec.config import LearningRates, OptimizerConfig
from repro.spec.schedule import learning_rate_of_run
from repro.spec.target import plan
from repro.spec.tier import Tier
from repro.targets.table1 import TABLE1

CONFIG = OptimizerConfig(learning_rates=LearningRates(lora_16bit=1, lora_4bit=1, full=1))


def named(*values):
    return {f"w{i}": nn.Parameter(torch.tensor([v])) for i, v in enumerate(values)}


def give(parameters, gradient):
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, gradient)


def test_gradient_is_clipped_to_its_norm_which_is_returned_before_clipping():
    parameters = named(0.0, 0.0)
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    parameters["w0"].grad, parameters["w1"].grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert gradient_step(optimizer, parameters, rate=1.0, max_grad_norm=0.5) == pytest.approx(5.0)
    moved = [float(p.detach()) for p in parameters.values()]
    assert moved == pytest.approx([-0.3, -0.4], rel=1e-4)
    assert all(p.grad is None for p in parameters.values())


def test_a_gradient_that_is_not_finite_raises_before_the_step():
    parameters = named(1.0)
    optimizer = build_optimizer(parameters, CONFIG)
    give(parameters, float("nan"))
    with pytest.raises(ValueError, match="norm is nan"):
        gradient_step(optimizer, parameters, rate=1.0, max_grad_norm=1.0)
    assert float(parameters["w0"].detach()) == 1.0


def test_learning_rate_warms_up_and_stays_or_falls_as_a_cosine():
    (run,) = plan(TABLE1, Tier.SMOKE, 1, ["bf16_lora"])
    peak = run.scale.optimizer.learning_rates.lora_16bit

    def shares_of_peak(schedule):
        config = dataclasses.replace(run.scale.optimizer, warmup_steps=4, schedule=schedule)
        scale = dataclasses.replace(run.scale, steps=12, optimizer=config)
        changed = dataclasses.replace(run, scale=scale)
        return [learning_rate_of_run(changed, step) / peak for step in range(12)]

    assert shares_of_peak("constant") == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 9)
    shares = shares_of_peak("cosine")
    assert shares[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert shares[8] == pytest.approx(0.5)
    assert all(a > b for a, b in itertools.pairwise(shares[4:]))
    assert 0 < shares[-1] < 0.05


def go_out_and_back(parameters, config):
    """Step, restore the state on copies, and check that both step alike; return its tensors."""
    optimizer = build_optimizer(parameters, config)
    for _ in range(3):
        give(parameters, 0.3)
        gradient_step(optimizer, parameters, rate=0.1, max_grad_norm=100.0)
    tensors, numbers = optimizer_tensors(optimizer, parameters)
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in parameters.items()}
    other = build_optimizer(copies, config)
    restore_optimizer(other, copies, tensors, numbers)
    for o, p in ((optimizer, parameters), (other, copies)):
        give(p, -0.7)
        gradient_step(o, p, rate=0.1, max_grad_norm=100.0)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, copies[name])
    return tensors


def test_state_goes_out_and_back():
    go_out_and_back(named(1.0, -2.0), CONFIG)


def test_eight_bit_states_off_the_gpu_raise():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        build_optimizer(named(1.0), dataclasses.replace(CONFIG, name="adamw_8bit"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none")
def test_eight_bit_states_train_on_a_gpu_and_go_out_and_back():
    pytest.importorskip("bitsandbytes")
    parameters = {"w": nn.Parameter(torch.ones(8192, device="cuda"))}
    tensors = go_out_and_back(parameters, dataclasses.replace(CONFIG, name="adamw_8bit"))
    assert any(value.dtype == torch.uint8 for value in tensors.values())
