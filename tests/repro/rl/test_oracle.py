"""The loss's gradient against the exact gradient of a policy small enough to enumerate.

A tabular policy over 5 tokens with completions of at most 3 has 85 completions; all pairs of them
are gone through in float64. `test_step.py` holds a step's micro-batches against this loss.
"""

import itertools

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from repro.rl.advantage import group_advantages
from repro.rl.loss import StepCounts, policy_loss
from repro.spec.arm import LossConfig

VOCABULARY, LONGEST, END = 5, 3, 0
TEMPERATURE = 0.6


# Every text of so many tokens at most; those before the last length are the table's rows.
TEXTS = [t for n in range(LONGEST + 1) for t in itertools.product(range(VOCABULARY), repeat=n)]
PREFIXES = [tokens for tokens in TEXTS if len(tokens) < LONGEST]
COMPLETIONS = [
    tokens
    for tokens in TEXTS
    if tokens and END not in tokens[:-1] and (tokens[-1] == END or len(tokens) == LONGEST)
]


def token_logprobs(table):
    """Return (N, 3) log-probabilities of every completion's tokens and their mask."""
    logp = torch.log_softmax(table / TEMPERATURE, dim=-1)
    rows = [
        torch.stack([logp[PREFIXES.index(tokens[:i]), token] for i, token in enumerate(tokens)])
        for tokens in COMPLETIONS
    ]
    lengths = torch.tensor([len(tokens) for tokens in COMPLETIONS])
    return pad_sequence(rows, batch_first=True), torch.arange(LONGEST) < lengths[:, None]


@pytest.mark.parametrize("scale_by_std", [False, True])
@pytest.mark.parametrize(
    "aggregation", ["sequence_mean", "token_mean", "token_mean_local", "constant"]
)
def test_expected_gradient_over_all_pairs_is_exact(aggregation, scale_by_std):
    config = LossConfig(scale_by_std=scale_by_std, aggregation=aggregation)
    kind = {"generator": torch.Generator().manual_seed(11), "dtype": torch.float64}
    table = torch.randn(len(PREFIXES), VOCABULARY, **kind).requires_grad_()
    # Rewards around 0.5, so that leaving them uncentred shows.
    r = 0.5 + torch.randn(len(COMPLETIONS), **kind)
    logp, mask = token_logprobs(table)
    length = mask.double().sum(1)
    pairs = torch.cartesian_prod(*[torch.arange(len(r))] * 2)  # (N^2, 2)

    # Written from the definitions, two completions at a time.
    first, second = pairs.t()
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
