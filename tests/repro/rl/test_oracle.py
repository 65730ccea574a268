"""The loss's gradient against the exact gradient of a policy small enough to enumerate.

A tabular policy over 5 tokens with completions of at most 3 has 85 completions; all pairs of them
are gone through in float64. `test_step.py` holds a step's micro-batches against this loss.
"""

import itertools

import pytest
import torch

from repro.rl.advantage import group_advantages
from repro.rl.loss import StepCounts, policy_loss
from repro.spec.arm import LossConfig

VOCABULARY, LONGEST, END = 5, 3, 0
TEMPERATURE = 0.6


class Tabular:
    """Every completion of the tabular policy, their rewards and log-probabilities."""

    def __init__(self):
        generator = torch.Generator().manual_seed(11)
        prefixes = 1 + VOCABULARY + VOCABULARY**2
        self.table = torch.randn(prefixes, VOCABULARY, generator=generator, dtype=torch.float64)
        self.completions = [
            tokens
            for length in range(1, LONGEST + 1)
            for tokens in itertools.product(range(VOCABULARY), repeat=length)
            if END not in tokens[:-1] and (tokens[-1] == END or length == LONGEST)
        ]
        # Rewards around 0.5, so that leaving them uncentred shows.
        self.rewards = 0.5 + torch.randn(
            len(self.completions), generator=generator, dtype=torch.float64
        )

    def token_logprobs(self, table):
        """Return (N, 3) log-probabilities of every completion's tokens and their mask."""
        logp = torch.log_softmax(table / TEMPERATURE, dim=-1)
        rows, masks = [], []
        for tokens in self.completions:
            state, values = 0, []
            for place, token in enumerate(tokens):
                values.append(logp[state, token])
                base = (1, 1 + VOCABULARY)[place] if place < 2 else 0
                state = base + (VOCABULARY * (state - 1) if place == 1 else 0) + token
            rows.append(torch.stack(values + [logp.new_zeros(())] * (LONGEST - len(values))))
            masks.append([place < len(tokens) for place in range(LONGEST)])
        return torch.stack(rows), torch.tensor(masks)


@pytest.mark.parametrize("scale_by_std", [False, True])
@pytest.mark.parametrize(
    "aggregation", ["sequence_mean", "token_mean", "token_mean_local", "constant"]
)
def test_expected_gradient_over_all_pairs_is_exact(aggregation, scale_by_std):
    tab = Tabular()
    config = LossConfig(scale_by_std=scale_by_std, aggregation=aggregation)
    count = len(tab.completions)
    length = torch.tensor([len(c) for c in tab.completions], dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(count), torch.arange(count))  # (N^2, 2)
    table = tab.table.clone().requires_grad_()
    logp, mask = tab.token_logprobs(table)

    # Written from the definitions, two completions at a time.
    first, second = pairs.t()
    r = tab.rewards
    advantage = (r[first] - r[second]) / 2
    if scale_by_std:
        advantage = advantage / ((r[first] - r[second]).abs() / 2**0.5 + config.advantage_epsilon)
    weigh = {
        "sequence_mean": (0.5 / length[first], 0.5 / length[second]),
        "token_mean": (1 / (length[first] + length[second]),) * 2,
        "token_mean_local": (1 / (length[first] + length[second]),) * 2,
        "constant": (1 / 6,) * 2,
    }[aggregation]
    whole = logp.sum(1)
    chance = whole.detach().exp()[pairs].prod(1)
    gain = chance * advantage * (weigh[0] * whole[first] - weigh[1] * whole[second])
    (expected,) = torch.autograd.grad(gain.sum(), table, retain_graph=True)

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
            StepCounts(rows=2, tokens=int(tokens), length_limit=3, local_tokens=int(tokens)),
        )
        result.loss.backward(retain_graph=True)
    torch.testing.assert_close(-table.grad, expected, rtol=0, atol=1e-12)
