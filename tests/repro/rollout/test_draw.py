"""The choice of a token, against transformers' own filters and by exhaustion; a step's end."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from kernels.reference_step import FAULTY
from repro.rollout.backend import Backend
from repro.rollout.draw import draw, sampling_logprobs, uniforms
from repro.rollout.state import RowState
from repro.spec.config import SamplingConfig


def logits_of(rows=50, vocabulary=40, seed=0):
    return 3.0 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 1.0])
def test_the_filter_keeps_what_transformers_keeps(temperature, top_p):
    logits = logits_of()
    stock = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_p < 1:
        stock.append(TopPLogitsWarper(top_p))
    expected = torch.log_softmax(stock(torch.zeros(50, 1, dtype=torch.long), logits), dim=-1)
    sampling = SamplingConfig(temperature=temperature, top_p=top_p)
    torch.testing.assert_close(sampling_logprobs(logits, sampling), expected)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0.6, top_p=0.95),
        SamplingConfig(temperature=1.3, top_p=0.8),
        SamplingConfig(top_p=1e-9),
    ],
)
def test_the_draw_inverts_the_filtered_distribution(sampling):
    for row in logits_of(rows=6, seed=21):
        p = sampling_logprobs(row[None], sampling)[0].double().exp()
        edges = p.cumsum(0)
        points = torch.linspace(0, 1, 400, dtype=torch.float64)[:-1] + 1e-4
        tokens, logprobs = draw(row.expand(399, -1), points, sampling)
        clear = (points.unsqueeze(1) - edges).abs().amin(1) > 1e-6
        assert float(clear.double().mean()) > 0.95
        expected = torch.searchsorted(edges, points, right=True)
        assert torch.equal(tokens[clear], expected[clear])
        torch.testing.assert_close(logprobs.double(), p[tokens].log(), rtol=0, atol=2e-6)


def test_filtered_tokens_are_never_drawn_at_either_end():
    sampling = SamplingConfig(top_p=0.5)
    logits = logits_of(rows=200)
    allowed = sampling_logprobs(logits, sampling).isfinite()
    for number in (0.0, 1.0 - 2.0**-53):
        tokens, _ = draw(logits, torch.full((200,), number, dtype=torch.float64), sampling)
        assert bool(allowed[torch.arange(200), tokens].all())


def test_greedy_takes_the_largest_logit_with_certainty():
    logits = logits_of()
    tokens, logprobs = draw(logits, torch.zeros(50).double(), SamplingConfig(temperature=0.0))
    assert torch.equal(tokens, logits.argmax(1))
    assert torch.equal(logprobs, torch.zeros(50))


def test_uniform_numbers_follow_their_seed_and_nothing_else():
    both = uniforms([3, 2**63 - 1, 3], 20)
    assert torch.equal(both[0], both[2])
    assert torch.equal(both[1], uniforms([2**63 - 1], 20)[0])
    assert not torch.equal(both[0], both[1])
    assert both.min() >= 0
    assert both.max() < 1


def test_the_last_token_of_a_large_vocabulary_can_be_drawn():
    # Cumulated in float32, 200 000 equal probabilities end below or above 1.
    logits = torch.zeros(1, 200_000)
    tokens, _ = draw(logits, torch.tensor([1 - 1e-7], dtype=torch.float64), SamplingConfig())
    assert int(tokens) == 199_999
    tokens, _ = draw(logits, torch.tensor([0.5], dtype=torch.float64), SamplingConfig())
    assert abs(int(tokens) - 100_000) <= 1


VOCABULARY = 50


def running(rows):
    state = RowState(rows, max_new_tokens=4, max_blocks=1, device=torch.device("cpu"))
    state.positions.fill_(3)
    state.limits.fill_(4)
    state.uniforms.copy_(torch.rand(rows, 4, dtype=torch.float64))
    state.begin([], 0.6)
    return state


def choose(logits, state, sampling):
    Backend().choose(logits.clone(), state, sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0.6, top_p=0.8),
        SamplingConfig(temperature=0, top_p=0.8),
        SamplingConfig(temperature=0.6),
        SamplingConfig(temperature=0),
    ],
)
@pytest.mark.parametrize("rows", [1, 65])
def test_a_step_draws_what_its_distribution_gives(sampling, rows):
    torch.manual_seed(rows)
    state, logits = running(rows), 3 * torch.randn(rows, VOCABULARY)
    uniform = state.uniforms[:, 0].clone()
    choose(logits, state, sampling)
    ids, logprobs = draw(logits, uniform, sampling)
    assert torch.equal(state.out_tokens[:, 0].long(), ids)
    assert torch.allclose(state.out_logprobs[:, 0], logprobs, atol=1e-6)


def test_a_row_whose_logits_are_not_finite_draws_nothing_and_leaves_the_others_alone():
    torch.manual_seed(0)
    rows, bad = 5, 2
    logits = torch.randn(rows, VOCABULARY)
    sampling = SamplingConfig(temperature=0.6, top_p=0.8)
    sound = running(rows)
    choose(logits, sound, sampling)
    broken = running(rows)
    broken.uniforms.copy_(sound.uniforms)
    logits[bad, 7] = torch.nan
    choose(logits, broken, sampling)
    others = torch.arange(rows) != bad
    assert broken.status[bad] == FAULTY
    assert torch.equal(broken.out_tokens[others], sound.out_tokens[others])
    assert torch.equal(broken.status[others], sound.status[others])


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_a_token_that_is_ruled_out_is_no_fault(temperature):
    torch.manual_seed(0)
    logits = torch.randn(3, VOCABULARY)
    logits[:, 10:] = -torch.inf
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    state = running(3)
    choose(logits, state, SamplingConfig(temperature=temperature))
    assert (state.status == FAULTY).tolist() == [False, True, True]
    assert state.out_tokens[0, 0] < 10
    assert torch.isfinite(state.out_logprobs[0, 0])
