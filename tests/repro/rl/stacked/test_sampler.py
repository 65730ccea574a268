"""What the stacked sampler draws for a run is what transformers' own pass draws for it alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from repro.data.problem import Problem
from repro.rl.collect import GrowingRollout, PromptSource
from repro.rl.noise import perturbed
from repro.rl.single_run.torch_sampler import TorchSampler
from repro.rl.stacked.decoding import Buffers, Decoder
from repro.rl.stacked.stack import Stack
from repro.rl.stacked.stacked_noise import added_noise
from repro.rl.stacked.stacked_sampler import SampleRequest, StackedSampler
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
) -> tuple[Stack, list[Any], StackedSampler]:
    """Return runs as a stack, a request of each for its first step, and the stack's sampler."""
    stack = small.stack_of(runs)
    requests = [request_of(run, problems, 0) for run in runs]
    return stack, requests, StackedSampler(stack, small.positions(runs[0]))


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
    sampler = StackedSampler(stack, small.positions(RUNS[0]) + 40)
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
    sampler = StackedSampler(stack, 20)
    good = SampleRequest(prompts=[[5, 6]], seeds=[1])
    with pytest.raises(ValueError, match="2 runs"):
        sampler.sample([None, None], SHORT, group_size=1)
    with pytest.raises(ValueError, match="2 runs"):
        sampler.sample([good], SHORT, group_size=1)
    long = SampleRequest(prompts=[[5] * 9], seeds=[1])
    with pytest.raises(ValueError, match="exceeds the policy's 20 positions"):
        sampler.sample([good, long], SHORT, group_size=1)


def test_rows_that_have_ended_are_left_out_of_further_steps_and_change_nothing(
    problems: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, request = small.load(RUNS[1]), request_of(RUNS[1], problems, 0)
    seeds = list(range(8 * len(request.prompts)))
    rows: list[int] = []
    draw = Decoder.draw

    def counted(self: Decoder, buffers: Buffers, sampling: SamplingConfig) -> torch.Tensor:
        rows.append(len(buffers.done))
        return draw(self, buffers, sampling)

    monkeypatch.setattr(Decoder, "draw", counted)
    one, many = (
        sampler.sample(request.prompts, LONG, group_size=8, seeds=seeds)
        for sampler in (PlainSampler(policy), TorchSampler(policy))
    )
    require_same(one, many)
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0] == len(seeds)
