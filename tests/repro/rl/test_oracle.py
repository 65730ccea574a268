"""The trainer's gradient against exact gradients of a policy small enough to enumerate.

A tabular policy over 5 tokens with completions of at most 3 has 85 completions. Two comparisons:
over all pairs of completions in float64, exactly; and over sampled groups through the trainer's own
path (rows, log-probabilities, advantages, micro-batches), where the mean over n batches must
approach the exact gradient as 1/sqrt(n).
"""

import dataclasses

import pytest
import torch

from repro.rl import step
from repro.rl.advantage import group_advantages
from repro.rl.loss import StepCounts, policy_loss
from repro.rl.rows import make_rows
from repro.rl.step import accumulate_step
from repro.spec.arm import LossConfig
from tests.repro.rl.conftest import Tabular, make_completion
from tests.repro.rl.uneven_rows import plain_logprobs, rollout_of, step_on

NO_STD = LossConfig(scale_by_std=False)
TEMPERATURE = 0.6
PROMPTS = ((3, 1),)


def exact_centred(tab, group_size, weight=1.0):
    """Return the expected group mean of (r - mean r) * weight * d log p, by enumeration."""
    p, score = tab.scores()
    weight = torch.as_tensor(weight, dtype=torch.float64).expand_as(p)
    first = ((p * tab.rewards * weight)[:, None] * score).sum(0)
    second = (p * tab.rewards).sum() * ((p * weight)[:, None] * score).sum(0)
    return (group_size - 1) / group_size * (first - second)


def lengths(tab):
    return torch.tensor([len(c) for c in tab.completions], dtype=torch.float64)


@pytest.mark.parametrize("scale_by_std", [False, True])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_expected_gradient_over_all_pairs_is_exact(aggregation, scale_by_std):
    tab = Tabular(TEMPERATURE)
    config = LossConfig(scale_by_std=scale_by_std, aggregation=aggregation)
    count, length = len(tab.completions), lengths(tab)
    pairs = torch.cartesian_prod(torch.arange(count), torch.arange(count))  # (N^2, 2)
    p, score = tab.scores()

    # Written from the definitions, two completions at a time.
    first, second = pairs.t()
    r = tab.rewards
    advantage = (r[first] - r[second]) / 2
    if scale_by_std:
        advantage = advantage / ((r[first] - r[second]).abs() / 2**0.5 + config.advantage_epsilon)
    weigh = {
        "sequence_mean": (0.5 / length[first], 0.5 / length[second]),
        "token_mean": (1 / (length[first] + length[second]),) * 2,
        "constant": (torch.full_like(p[first], 1 / 6),) * 2,
    }[aggregation]
    chance = p[first] * p[second]
    expected = (
        (chance * advantage * weigh[0])[:, None] * score[first]
        - (chance * advantage * weigh[1])[:, None] * score[second]
    ).sum(0)

    table = tab.table.clone().requires_grad_()
    logp, mask = tab.token_logprobs(table)
    of_groups = group_advantages(
        r[pairs].flatten().tolist(),
        torch.arange(len(pairs)).repeat_interleave(2),
        scale_by_std=scale_by_std,
        epsilon=config.advantage_epsilon,
    ).values
    # Each pair is one optimiser step; pairs of equal token counts share their normaliser.
    tokens_of_pair = length[first] + length[second]
    for tokens in tokens_of_pair.unique().tolist():
        chosen = (tokens_of_pair == tokens).nonzero().squeeze(1)
        rows = pairs[chosen].flatten()
        result = policy_loss(
            logp[rows],
            of_groups.view(-1, 2)[chosen].flatten() * chance[chosen].repeat_interleave(2),
            mask[rows],
            config,
            StepCounts(rows=2, tokens=int(tokens), length_limit=3),
        )
        result.loss.backward(retain_graph=True)
    torch.testing.assert_close(-table.grad.flatten(), expected, rtol=0, atol=1e-12)


@pytest.fixture(autouse=True)
def table_pass(monkeypatch):
    """Let steps ask the table, which has no blocks to pack."""

    def asked(policy, rows, temperature, **settings):
        return plain_logprobs(policy, rows, temperature)

    monkeypatch.setattr(step, "packed_logprobs", asked)


@pytest.fixture
def sampled(make_run):
    """Return a function that gives the gradients, (batches, n), of batches of sampled groups of 4.

    They come by the trainer's path from completions; without a baseline advantages are rewards.
    """
    tab = Tabular(TEMPERATURE)

    def gradients(config, *, groups, batches, baseline=True):
        rollout = dataclasses.replace(
            make_run().scale.rollout, temperature=tab.temperature, max_new_tokens=3
        )
        run = make_run(loss=config, micro_batch_rows=100, rollout=rollout)
        policy, p, generator = tab.policy(), tab.scores()[0], torch.Generator().manual_seed(1)
        table, made = policy.decoder.table, []
        for _ in range(batches):
            drawn = torch.multinomial(p, groups * 4, replacement=True, generator=generator)
            completions = [
                make_completion(tokens, "stop" if tokens[-1] == 0 else "length")
                for tokens in (tab.completions[index] for index in drawn.tolist())
            ]
            rows, rewards = (
                make_rows(PROMPTS * groups, completions, group_size=4),
                tab.rewards[drawn],
            )
            ids = torch.arange(groups).repeat_interleave(4)
            advantages = group_advantages(
                rewards.tolist(), ids, scale_by_std=config.scale_by_std, epsilon=1e-4
            ).values
            accumulate_step(
                policy,
                step_on(rollout_of(rows, (advantages if baseline else rewards).tolist())),
                run,
                parameters={"table": table},
                micro_tokens=10_000,
            )
            made.append(-table.grad.double().flatten())
            table.grad = None
        return torch.stack(made)

    return gradients


def excess(gradients, expected):
    """Squared error of the mean over what chance explains; about 1 when unbiased."""
    error = (gradients.mean(0) - expected).square().sum()
    return float(error / (gradients.var(0) / len(gradients)).sum())


CORRECT = {
    "sequence_mean": (NO_STD, lambda tab, G: exact_centred(tab, G, 1 / lengths(tab))),
    "constant": (
        dataclasses.replace(NO_STD, aggregation="constant"),
        lambda tab, G: exact_centred(tab, G) / 3,
    ),
}


@pytest.mark.parametrize("name", CORRECT)
def test_sampled_gradient_converges_at_the_monte_carlo_rate(sampled, name):
    config, oracle = CORRECT[name]
    expected = oracle(Tabular(TEMPERATURE), 4)
    gradients = sampled(config, groups=12, batches=256)
    assert excess(gradients, expected) < 2
    # Blocks of 4 batches against blocks of 64: the squared error falls by 16, give or take chance.
    few = (gradients.view(64, 4, -1).mean(1) - expected).square().sum(1).mean()
    many = (gradients.view(4, 64, -1).mean(1) - expected).square().sum(1).mean()
    assert 8 < float(few / many) < 32


def test_reinforce_without_baseline_converges_to_the_gradient_itself(sampled):
    gradients = sampled(CORRECT["constant"][0], groups=48, batches=64, baseline=False)
    # exact_centred at a group size without end is d E[r] / d table.
    assert excess(gradients, exact_centred(Tabular(TEMPERATURE), 10**9) / 3) < 2
