"""Added noise: schedules against the paper's numbers, what bfloat16 keeps, and where it goes."""

import dataclasses
import itertools

import pytest
import torch

from repro.models.norms import block_norms, final_norm
from repro.rl import noise as module
from repro.rl.noise import draw_noise, perturbed
from repro.spec.arm import NoiseConfig
from repro.spec.schedule import sigma_of_stage, stage_of_step

PAPER = NoiseConfig(sigma_start=1e-2, sigma_end=5e-4, num_stages=10)
FIGURE_15 = NoiseConfig(sigma_start=5e-2, sigma_end=5e-4, num_stages=10)
RELEASED = NoiseConfig(sigma_start=1e-2, sigma_end=1e-4, num_stages=10, form="as_released")
STRONG = NoiseConfig(sigma_start=0.5, sigma_end=0.1, num_stages=4)


def sigmas(config):
    return [sigma_of_stage(config, stage) for stage in range(config.num_stages)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # 0.01 * 0.05^((k-1)/9), k = 1..9; the last stays above sigma_end by Algorithm 1's stages.
        (PAPER, [0.0, 1e-2, 7.1687e-3, 5.139e-3, 3.684e-3, 2.641e-3, 1.8932e-3, 1.3572e-3,
                 9.7294e-4, 6.9747e-4]),
        # As read off the released scheduler for 1e-2 to 1e-4, K = 10.
        (RELEASED, [0.0, 1e-2, 5.62e-3, 3.16e-3, 1.78e-3, 1e-3, 5.62e-4, 3.16e-4, 1.78e-4, 1e-4]),
    ],
)  # fmt: skip
def test_exponential_schedules_are_equation_8_and_the_released_one(config, expected):
    assert sigmas(config) == pytest.approx(expected, rel=1e-4 if config is PAPER else 2e-3)


@pytest.mark.parametrize(
    ("schedule", "read"),
    [
        ("logarithmic", {2: 0.0349, 3: 0.0265, 4: 0.0202, 5: 0.0153}),
        ("logarithmic", {6: 0.0113, 7: 0.0079, 8: 0.0050, 9: 0.0024}),
        ("linear", {2: 0.0446}),
        ("cosine", {2: 0.0486}),
    ],
)  # fmt: skip
def test_other_schedules_agree_with_figure_15(schedule, read):
    config = dataclasses.replace(FIGURE_15, schedule=schedule)
    assert sigma_of_stage(config, 1) == pytest.approx(0.05)
    for stage, value in read.items():
        assert sigma_of_stage(config, stage) == pytest.approx(value, abs=4e-4)


@pytest.mark.parametrize("form", ["as_described", "as_released"])
@pytest.mark.parametrize("schedule", ["exponential", "linear", "cosine", "logarithmic"])
def test_every_schedule_falls_from_its_start(schedule, form):
    stages = sigmas(dataclasses.replace(PAPER, schedule=schedule, form=form))
    assert stages[0] == 0
    assert stages[1] == pytest.approx(PAPER.sigma_start)
    assert all(a > b >= PAPER.sigma_end * (1 - 1e-9) for a, b in itertools.pairwise(stages[1:]))
    if form == "as_released":
        assert stages[-1] == pytest.approx(PAPER.sigma_end)


def test_stages_are_equal_spans_and_left_over_steps_belong_to_the_last():
    assert [stage_of_step(PAPER, step, 20) for step in range(20)] == [
        s for s in range(10) for _ in "ab"
    ]
    # floor(M / K) = 2 of 25 steps: stage 9 begins at step 18 and keeps the rest.
    assert [stage_of_step(PAPER, step, 25) for step in (0, 1, 2, 17, 18, 24)] == [0, 0, 1, 8, 9, 9]
    # As released the spans are M / K = 2.5 steps.
    assert [stage_of_step(RELEASED, step, 25) for step in (2, 3, 5, 24)] == [0, 1, 2, 9]
    assert [stage_of_step(PAPER, step, 6) for step in range(6)] == [0, 1, 2, 3, 4, 5]


# Share of channels that an in-place bfloat16 addition changes, by range of |w| (computed
# independently with the spacing of bfloat16), and the RMS of what was added over sigma.
RANGES = [(0.25, 0.5), (0.5, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, 8.0)]
SURVIVING = {
    1e-2: ((0.92, 1.00), (0.85, 1.01), (0.70, 1.03), (0.43, 1.10), (0.12, 1.08)),
    1.8e-3: ((0.58, 1.05), (0.27, 1.15), (0.028, 0.74), (0.0, 0.0), (0.0, 0.0)),
    5e-4: ((0.05, 0.88), (0.0, 0.07), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
}


@pytest.mark.parametrize("sigma", SURVIVING)
def test_bfloat16_swallows_small_noise(sigma):
    generator = torch.Generator().manual_seed(0)
    for (low, high), (share, size) in zip(RANGES, SURVIVING[sigma], strict=True):
        weight = (low + (high - low) * torch.rand(100_000, generator=generator)).bfloat16().float()
        arguments = {"seed": 0, "step": 0, "name": f"{low}"}
        noise = draw_noise(weight, sigma, form="as_released", **arguments)
        assert float((noise != 0).double().mean()) == pytest.approx(share, abs=0.012)
        assert float(noise.square().mean().sqrt()) / sigma == pytest.approx(size, abs=0.06)
        exact = draw_noise(weight, sigma, form="as_described", **arguments)
        assert float(exact.square().mean().sqrt()) / sigma == pytest.approx(1.0, abs=0.01)
        assert int((exact == 0).sum()) == 0


def test_the_draw_depends_on_seed_step_and_name_only():
    weight = torch.ones(64)
    base = {"seed": 3, "step": 7, "name": "a", "form": "as_described"}
    first = draw_noise(weight, 0.1, **base)
    torch.randn(5)
    assert torch.equal(first, draw_noise(weight * 2, 0.1, **base))
    for change in ({"seed": 4}, {"step": 8}, {"name": "b"}):
        assert not torch.equal(first, draw_noise(weight, 0.1, **(base | change)))


def logits(policy):
    with torch.no_grad():
        values = policy.model(torch.arange(3, 23)[None]).logits
    return values


def enter(policy, config, *, step=3, seed=0):
    return perturbed(policy, config, seed=seed, step=step, total_steps=4)


@pytest.mark.parametrize("form", ["as_described", "as_released"])
def test_noise_changes_gains_inside_and_is_gone_to_the_bit_outside(make_policy, form):
    policy, config = make_policy(), dataclasses.replace(STRONG, form=form)
    clean = logits(policy)
    norms = block_norms(policy.model) | {"model.norm": final_norm(policy.model)}
    gains = {name: norm.weight.clone() for name, norm in norms.items()}
    with enter(policy, config) as receipt:
        noisy = logits(policy)
        drawn = {name: norms[name].noise.clone() for name in receipt.modules}
        with pytest.raises(ValueError, match="do not nest"), enter(policy, config):
            pass
        assert torch.equal(logits(policy), noisy)
    assert (noisy - clean).abs().max() > 1e-3
    with pytest.raises(RuntimeError, match="inside"), enter(policy, config):
        raise RuntimeError("inside")
    assert torch.equal(logits(policy), clean)
    assert all(torch.equal(norm.weight, gains[name]) for name, norm in norms.items())
    assert len(receipt.modules) == (5 if form == "as_released" else 4)
    assert ("model.norm" in receipt.modules) == (form == "as_released")
    assert receipt.sigma_realised == pytest.approx(receipt.sigma, rel=0.25)
    with torch.no_grad():
        for name, noise in drawn.items():
            norms[name].weight += noise
    torch.testing.assert_close(logits(policy), noisy, rtol=1e-5, atol=1e-5)


def test_first_stage_no_configuration_and_the_published_form_touch_nothing(make_policy):
    policy = make_policy()
    clean = logits(policy)
    published = dataclasses.replace(STRONG, form="as_published")
    for config, step in ((STRONG, 0), (None, 3), (published, 3)):
        with enter(policy, config, step=step) as receipt:
            assert torch.equal(logits(policy), clean)
        assert (receipt.modules, receipt.sigma_realised, receipt.channels_changed) == ((), 0.0, 0)
        assert (receipt.sigma > 0) == (config is published)  # the sigma that was asked for
        assert receipt.digest == ""


def test_noise_that_touches_nothing_raises(make_policy, monkeypatch):
    monkeypatch.setattr(module, "perturbable_norms", lambda model, form: {})
    policy = make_policy()
    with pytest.raises(ValueError, match="touched no norm"), enter(policy, STRONG):
        pass
    with enter(policy, STRONG, step=0):
        pass
