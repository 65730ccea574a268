"""The loss by hand and by grid: idle rows, clipping, KL, GSPO, weights (means: test_oracle)."""

import dataclasses
import math

import pytest
import torch

from repro.rl.loss import SUMS, StepCounts, policy_loss
from repro.rl.micro_batches import plan_step
from repro.rl.rows import make_rows
from repro.spec.arm import LossConfig
from tests.repro.rl.conftest import make_completion

LENGTHS = (2, 5, 9)
AGGREGATIONS = ("sequence_mean", "token_mean", "token_mean_local", "constant")


def batch(seed=0, lengths=LENGTHS):
    """Return (B, T) float64 log-probabilities and their mask."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(len(lengths), max(lengths), generator=generator, dtype=torch.float64)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return logprobs, mask


def sums_of(result):
    return dict(zip(SUMS, result.sums.tolist(), strict=True))


def counts_of(mask, **changes):
    rows = int(mask.any(1).sum())
    base = StepCounts(rows=rows, tokens=int(mask.sum()), length_limit=12)
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_leaving_idle_rows_out_is_exact(aggregation):
    lengths = (3, 6, 2, 5, 7, 1, 4, 6)
    logprobs, mask = batch(5, lengths)
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.5, -0.5, 0.0, 2.0], dtype=torch.float64)
    config = LossConfig(aggregation=aggregation)
    completions = [make_completion((5,) * n, "length", 0.0) for n in lengths]
    rows = make_rows([(5,)] * len(lengths), completions, group_size=1)

    def gradient(values):
        plan = plan_step(
            rows, torch.arange(8), values, mask, config,
            micro_tokens=8, micro_batch_rows=4, length_limit=12,
        )  # fmt: skip
        leaf = logprobs.clone().requires_grad_()
        for index, counts in plan.micro_batches:
            policy_loss(leaf[index], advantages[index], mask[index], config, counts).loss.backward()
        return leaf.grad

    everything = torch.ones(8, dtype=torch.float64)
    torch.testing.assert_close(gradient(advantages), gradient(everything), rtol=0, atol=1e-14)


def test_gradient_vanishes_exactly_where_a_bound_acts():
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    mask = torch.ones(1, 1, dtype=torch.bool)
    for ratio in (0.3, 0.7, 0.79, 0.81, 0.99, 1.0, 1.2, 1.27, 1.29, 2.0, 2.9, 3.1, 10.0):
        for advantage in (-2.0, -0.5, 0.5, 2.0):
            leaf = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
            result = policy_loss(
                leaf, torch.tensor([advantage]), mask, config, counts_of(mask),
                old_logprobs=torch.zeros(1, 1, dtype=torch.float64),
            )  # fmt: skip
            result.loss.backward()
            low = advantage < 0 and ratio < 0.8
            high = advantage > 0 and ratio > 1.28
            expected = 0.0 if low or high else -advantage * ratio
            assert float(leaf.grad) == pytest.approx(expected, abs=1e-12), (ratio, advantage)
            sums = sums_of(result)
            assert (sums["clipped_low"], sums["clipped_high"]) == (low, high)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("far", [0.1, 100.0, -100.0])
def test_padding_and_policies_far_apart_leave_loss_and_gradient_finite(ratio, far):
    logprobs, mask = batch()
    leaf = torch.where(mask, logprobs.float(), -torch.inf).requires_grad_()
    elsewhere, sampled = (torch.where(mask, leaf.detach() - by, torch.nan) for by in (far, 0.0))
    config = LossConfig(beta=0.1, importance_cap=2.0, ratio=ratio)
    result = policy_loss(
        leaf, torch.tensor([1.0, -1.0, 0.0]), mask, config, counts_of(mask),
        old_logprobs=elsewhere, sampled_logprobs=sampled, ref_logprobs=elsewhere,
    )  # fmt: skip
    result.loss.backward()
    assert bool(leaf.grad.isfinite().all())
    assert math.isfinite(float(result.loss))
    assert all(map(math.isfinite, result.sums.tolist()))


def test_sequence_ratio_is_the_length_normalised_one_with_equal_gradients():
    logprobs, mask = batch()
    old = logprobs + 0.05 * torch.sin(torch.arange(27.0, dtype=torch.float64)).view(3, 9)
    leaf = logprobs.clone().requires_grad_()
    config = LossConfig(ratio="sequence", clip_low=0.5, clip_high=0.5)
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    result = policy_loss(leaf, advantages, mask, config, counts_of(mask), old_logprobs=old)
    result.loss.backward()
    ratios = [
        math.exp(float((logprobs - old)[row, :length].mean())) for row, length in enumerate(LENGTHS)
    ]
    assert sums_of(result)["ratio"] == pytest.approx(
        sum(r * n for r, n in zip(ratios, LENGTHS, strict=True))
    )
    expected = -sum(r * float(a) for r, a in zip(ratios, advantages, strict=True)) / 3
    assert float(result.loss) == pytest.approx(expected, abs=1e-12)
    for row, length in enumerate(LENGTHS):
        each = -float(advantages[row]) * ratios[row] / (3 * length)
        assert leaf.grad[row, :length].tolist() == pytest.approx([each] * length, abs=1e-14)
        assert leaf.grad[row, length:].abs().sum() == 0
    sampled = logprobs - 0.01
    weighed = policy_loss(
        logprobs, advantages, mask, dataclasses.replace(config, importance_cap=9.0),
        counts_of(mask), old_logprobs=old, sampled_logprobs=sampled,
    )  # fmt: skip
    products = [math.exp(float((old - sampled)[r, :n].sum())) for r, n in enumerate(LENGTHS)]
    assert sums_of(weighed)["weight"] == pytest.approx(
        sum(w * n for w, n in zip(products, LENGTHS, strict=True))
    )


def test_importance_weights_carry_no_gradient_and_are_truncated():
    logprobs, mask = batch()
    sampled = logprobs - torch.tensor([[2.0], [0.1], [-1.0]])
    config = LossConfig(importance_cap=2.0)
    leaf = logprobs.clone().requires_grad_()
    expected = [2.0, math.exp(0.1), math.exp(-1.0)]
    result = policy_loss(
        leaf, torch.ones(3), mask, config, counts_of(mask), sampled_logprobs=sampled
    )
    result.loss.backward()
    hand = [-w / (3 * n) for w, n in zip(expected, LENGTHS, strict=True)]
    assert leaf.grad[:, 0].tolist() == pytest.approx(hand)
