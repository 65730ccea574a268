"""The plain end of a decode step: rows drawn a few at a time draw what all would at once."""

import pytest
import torch

from repro.models.memory_plan import FILTERED_ROWS
from repro.rollout.draw import choose, draw
from repro.rollout.state import FAULTY, RowState
from repro.spec.config import SamplingConfig

VOCABULARY = 50


def running(rows):
    state = RowState(rows, max_new_tokens=4, max_blocks=1, device=torch.device("cpu"))
    state.positions.fill_(3)
    state.limits.fill_(4)
    state.uniforms.copy_(torch.rand(rows, 4, dtype=torch.float64))
    state.begin([], 0.6)
    return state


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0.6, top_p=0.8),
        SamplingConfig(temperature=0.6, top_k=3),
        SamplingConfig(temperature=0.6, min_p=0.1),
        SamplingConfig(temperature=0.6),
        SamplingConfig(temperature=0),
    ],
)
@pytest.mark.parametrize("rows", [1, FILTERED_ROWS, 2 * FILTERED_ROWS + 1])
def test_rows_draw_what_they_would_draw_all_at_once(sampling, rows):
    torch.manual_seed(rows)
    state, logits = running(rows), 3 * torch.randn(rows, VOCABULARY)
    uniform = state.uniforms[:, 0].clone()
    choose(logits, state, sampling)
    ids, logprobs = draw(logits, uniform, sampling)
    assert torch.equal(state.out_tokens[:, 0].long(), ids)
    assert torch.allclose(state.out_logprobs[:, 0], logprobs, atol=1e-6)


def test_a_row_whose_logits_are_not_finite_draws_nothing_and_leaves_the_others_alone():
    torch.manual_seed(0)
    rows = FILTERED_ROWS + 2
    logits = torch.randn(rows, VOCABULARY)
    sampling = SamplingConfig(temperature=0.6, top_p=0.8)
    sound = running(rows)
    choose(logits, sound, sampling)
    broken = running(rows)
    broken.uniforms.copy_(sound.uniforms)
    logits[FILTERED_ROWS, 7] = torch.nan
    choose(logits, broken, sampling)
    others = torch.arange(rows) != FILTERED_ROWS
    assert broken.status[FILTERED_ROWS] == FAULTY
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
