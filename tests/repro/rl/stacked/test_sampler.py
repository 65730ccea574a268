"""What the stacked sampler draws for a run is what transformers' own pass draws for it alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from repro.data.problem import Problem
from repro.rl.collect import GrowingRollout, PromptSource
from repro.rl.noise import perturbed
from repro.rl.stacked import sampler as stacked_sampler
from repro.rl.stacked.decoding import Buffers, Decoder, GraphedSteps
from repro.rl.stacked.noise import added_noise
from repro.rl.stacked.sampler import SampleRequest, StackSampler
from repro.rl.stacked.stack import Stack
from repro.rollout.sampler import RolloutBatch
from repro.spec.arm import NoiseConfig
from repro.spec.config import RunConfig, SamplingConfig
from tests.repro.rl.conftest import PlainSampler
from tests.repro.rl.stacked import conftest as small

NOISE = NoiseConfig(sigma_start=0.2, sigma_end=0.1, num_stages=3)
RUNS = [
    small.make_run(seed=0),
    small.make_run(seed=1, weight_format="nvfp4", noise=NOISE),
    small.make_run(seed=1, weight_format="nf4", noise=dataclasses.replace(NOISE, sigma_end=0.2)),
    small.make_run(seed=3, weight_format="mxfp4"),
]
LONG = SamplingConfig(temperature=1.5, max_new_tokens=60)
SHORT = SamplingConfig(max_new_tokens=12)


def request_of(run: RunConfig, problems: list[Problem], step: int) -> SampleRequest:
    source = PromptSource(problems, small.load(run).tokenizer, run)  # type: ignore[arg-type]
    asked = GrowingRollout(run, source, step=step, draws=step).request()
    return SampleRequest(prompts=asked.prompts, seeds=asked.seeds)


def sampler_of(
    runs: list[RunConfig], problems: list[Problem]
) -> tuple[Stack, list[Any], StackSampler]:
    """Return runs as a stack, a request of each for its first step, and the stack's sampler."""
    stack = small.stack_of(runs)
    requests = [request_of(run, problems, 0) for run in runs]
    return stack, requests, StackSampler(stack, small.positions(runs[0]))


def require_same(one: RolloutBatch, many: RolloutBatch | None) -> None:
    assert many is not None
    assert many.prompt_ids == one.prompt_ids
    assert [c.token_ids for c in many.completions] == [c.token_ids for c in one.completions]
    assert [c.finish_reason for c in many.completions] == [c.finish_reason for c in one.completions]
    for own, alone in zip(many.completions, one.completions, strict=True):
        assert own.sampled_logprobs == pytest.approx(alone.sampled_logprobs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_new_tokens=40),
        SamplingConfig(temperature=0.0, max_new_tokens=40),
        SamplingConfig(temperature=0.6, top_p=0.95, max_new_tokens=40),
    ],
    ids=["full", "greedy", "top_p"],
)
def test_tokens_of_every_format_and_noise_are_those_of_the_plain_sampler(
    problems: list[Problem], sampling: SamplingConfig
) -> None:
    step = 2
    requests = [request_of(run, problems, step) for run in RUNS]
    stack = small.stack_of(RUNS)
    sampler = StackSampler(stack, small.positions(RUNS[0]) + 40)
    sampler.refresh(added_noise(RUNS, stack, step=step).rollout)
    together = sampler.sample(requests, sampling, group_size=4)
    for run, request, many in zip(RUNS, requests, together, strict=True):
        policy = small.load(run)
        with perturbed(policy, run.arm.noise, seed=run.seed, step=step, total_steps=3):
            one = PlainSampler(policy).sample(
                request.prompts, sampling, group_size=4, seeds=request.seeds
            )
        require_same(one, many)
    reasons = {c.finish_reason for many in together if many for c in many.completions}
    assert "stop" in reasons


def test_noise_goes_away_with_the_next_refresh_and_never_touches_the_gains(
    problems: list[Problem],
) -> None:
    stack, requests, sampler = sampler_of(RUNS[:2], problems)
    frozen = {name: tensor.clone() for name, tensor in stack.frozen.items()}
    clean = sampler.sample(requests, SHORT, group_size=4)
    sampler.refresh(torch.ones(2, 2 * stack.shape.layers + 1, stack.shape.hidden))
    noisy = sampler.sample(requests, SHORT, group_size=4)
    sampler.refresh()
    again = sampler.sample(requests, SHORT, group_size=4)
    assert again == clean
    assert noisy != clean
    assert all(torch.equal(stack.frozen[name], frozen[name]) for name in frozen)


def test_a_refresh_takes_up_what_was_trained(problems: list[Problem]) -> None:
    stack, requests, sampler = sampler_of(RUNS[:2], problems)
    assert stack.masters is not None
    before = sampler.sample(requests, SHORT, group_size=4)
    stack.masters.values[1] += 0.1
    assert sampler.sample(requests, SHORT, group_size=4) == before
    sampler.refresh()
    after = sampler.sample(requests, SHORT, group_size=4)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_idle_runs_get_nothing_and_move_nobody(problems: list[Problem]) -> None:
    _, requests, sampler = sampler_of(RUNS[:3], problems)
    whole = sampler.sample(requests, SHORT, group_size=4)
    fewer = SampleRequest(prompts=requests[2].prompts[:2], seeds=requests[2].seeds[:8])
    part = sampler.sample([None, requests[1], fewer], SHORT, group_size=4)
    assert part[0] is None
    assert part[1] == whole[1]
    assert part[2] is not None
    assert whole[2] is not None
    assert part[2].completions == whole[2].completions[:8]


def test_requests_that_cannot_be_served_say_why(problems: list[Problem]) -> None:
    stack = small.stack_of(RUNS[:2])
    sampler = StackSampler(stack, 20)
    good = SampleRequest(prompts=[[5, 6]], seeds=[1])
    with pytest.raises(ValueError, match="2 runs"):
        sampler.sample([None, None], SHORT, group_size=1)
    with pytest.raises(ValueError, match="2 runs"):
        sampler.sample([good], SHORT, group_size=1)
    long = SampleRequest(prompts=[[5] * 9], seeds=[1])
    with pytest.raises(ValueError, match="exceeds the policy's 20 positions"):
        sampler.sample([good, long], SHORT, group_size=1)


class StepsOfNoGraph(GraphedSteps):
    """Steps as of a GPU, at its sizes and looks, without graphs."""

    def __init__(self, decoder: Decoder, buffers: Buffers, sampling: Any, pool: Any) -> None:
        self.call = decoder, buffers, sampling

    def __call__(self, columns: int) -> None:
        """Run one step."""
        decoder, buffers, sampling = self.call
        decoder.step(buffers, columns, sampling)


@pytest.fixture(scope="module")
def many_rows(problems: list[Problem]) -> tuple[list[Any], list[RolloutBatch]]:
    """Return requests of three runs for many rows, and what the plain sampler draws for each."""
    requests: list[Any] = []
    for run in RUNS[:3]:
        asked = request_of(run, problems, 0)
        # Eight rows of each of four prompts, whatever the runs' own groups are.
        prompts = (list(asked.prompts) * 4)[:4]
        seeds = list(range(100 * run.seed, 100 * run.seed + 32))
        requests.append(dataclasses.replace(asked, prompts=prompts, seeds=seeds))
    # The last run asks for less than the others, so that its other rows idle from the start.
    requests[2] = dataclasses.replace(
        requests[2], prompts=requests[2].prompts[:1], seeds=requests[2].seeds[:8]
    )
    apart = [
        PlainSampler(small.load(run)).sample(
            request.prompts, LONG, group_size=8, seeds=request.seeds
        )
        for run, request in zip(RUNS[:3], requests, strict=True)
    ]
    return requests, apart


@pytest.mark.parametrize("captured", [False, True])
def test_rows_that_have_ended_are_left_out_of_further_steps_and_change_nothing(
    many_rows: tuple[list[Any], list[RolloutBatch]], monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    runs = RUNS[:3]
    requests, apart = many_rows
    stack = small.stack_of(runs)
    sampler = StackSampler(stack, small.positions(runs[0]) + 60)
    if captured:
        monkeypatch.setattr(stacked_sampler, "GraphedSteps", StepsOfNoGraph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(sampler, "_captured", True)
    rows: list[int] = []
    draw = Decoder.draw

    def counted(self: Decoder, buffers: Buffers, sampling: SamplingConfig) -> torch.Tensor:
        rows.append(len(buffers.done))
        return draw(self, buffers, sampling)

    monkeypatch.setattr(Decoder, "draw", counted)
    together = sampler.sample(requests, LONG, group_size=8)
    assert rows[0] == 3 * 32
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0]
    for one, many in zip(apart, together, strict=True):
        require_same(one, many)
    lengths = {len(c.token_ids) for many in together if many for c in many.completions}
    assert len(lengths) > 3
    assert sampler.sample(requests, LONG, group_size=8) == together
