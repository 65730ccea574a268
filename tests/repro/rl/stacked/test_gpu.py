"""On a CUDA device: graphs, 16 bits and everything between loading and a record's values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.data.problem import Problem
from repro.evidence.derived import curve_metrics
from repro.evidence.procedure import Measured
from repro.models.policy import end_token_ids, load_policy
from repro.procedures.together import train_together
from repro.rl.collect import GrowingRollout, PromptSource, Rollout
from repro.rl.policies import StepInputs
from repro.rl.stacked.stack import Stack, stack_policies
from repro.rl.stacked.stacked_noise import added_noise
from repro.rl.stacked.stacked_sampler import SampleRequest, StackedSampler
from repro.rl.stacked.update import Passes, accumulate_gradients, plan_run
from repro.spec.arm import DAPO, NoiseConfig, PlantedRounding
from repro.spec.config import EvaluationConfig, RunConfig, SamplingConfig
from tests.repro.rl.stacked import conftest as small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none"),
]

NOISE = NoiseConfig(sigma_start=0.05, sigma_end=0.02, num_stages=3)
RUNS = [
    small.make_run(seed=0),
    small.make_run(seed=1, weight_format="nvfp4", noise=NOISE),
    small.make_run(seed=2, weight_format="nf4", noise=dataclasses.replace(NOISE, reach="shared")),
]
STEP = 2


def stack_on(device: str, dtype: str, training: str = "lora") -> Stack:
    """Return the runs' policies on a device, moved off their start alike."""
    policies = [
        load_policy(
            "tiny", weight_format=run.arm.weight_format if training == "lora" else "bf16",
            training=training, lora_rank=4, lora_alpha=8.0, compute_dtype=dtype,  # type: ignore[arg-type]
            seed=run.seed, device=device,
        )
        for run in RUNS
    ]  # fmt: skip
    stack = stack_policies(policies, end_token_ids=end_token_ids(policies[0]), device=device)
    assert stack.masters is not None
    values = stack.masters.values
    nudge = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)) * 0.01
    values.add_(nudge.to(device))
    return stack


def rollouts(
    stack: Stack, problems: list[Problem], new: int = 24
) -> tuple[StackedSampler, list[Rollout]]:
    """Return rollouts of every run under its noise, rewarded by their texts."""
    sampler = StackedSampler(stack, small.positions(RUNS[0]) + new)
    sampler.refresh(added_noise(RUNS, stack, step=STEP).rollout)
    growing = [
        GrowingRollout(run, PromptSource(problems, stack.tokenizer, run), step=STEP, draws=0)
        for run in RUNS
    ]
    asked = [one.request() for one in growing]
    requests = [SampleRequest(prompts=one.prompts, seeds=one.seeds) for one in asked]
    sampling = SamplingConfig(max_new_tokens=new)
    collected = []
    batches = sampler.sample(requests, sampling, group_size=4)
    for one, request, batch in zip(growing, asked, batches, strict=True):
        assert batch is not None
        texts = one.source.texts(batch.completions, request.prompts)
        one.add(request, batch.completions, small.score(texts, request.golds, request.seeds))
        collected.append(one.rollout())
    return sampler, collected


def gradients(
    stack: Stack, sampler: StackedSampler, rollouts_of_runs: list[Rollout]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return (S, n) gradients and each run's log-probabilities of its rollout."""
    passes = Passes(
        stack=stack, rotary=sampler.rotary, temperature=1.0, group_size=4,
        tokens_at_once=small.TWO_GROUPS, noise=added_noise(RUNS, stack, step=STEP).rollout,
    )  # fmt: skip
    steps = [
        plan_run(
            StepInputs(
                run=run, step=STEP, rollout=rollout, index=torch.arange(len(rollout.rows)),
                old=None, reference=None,
            )
        )
        for run, rollout in zip(RUNS, rollouts_of_runs, strict=True)
    ]  # fmt: skip
    accumulate_gradients(passes, steps)
    assert stack.masters is not None
    return stack.masters.gradients.cpu().clone(), [step.logprobs for step in steps if step]


def test_float32_on_the_device_is_float32_on_the_host(problems: list[Problem]) -> None:
    host, device = stack_on("cpu", "float32"), stack_on("cuda", "float32")
    (host_sampler, on_host), (device_sampler, on_device) = (
        rollouts(stack, problems) for stack in (host, device)
    )
    for one, many in zip(on_host, on_device, strict=True):
        assert torch.equal(one.rows.token_ids, many.rows.token_ids)
        assert torch.allclose(one.rows.sampled_logprobs, many.rows.sampled_logprobs, atol=1e-3)
    expected, _ = gradients(host, host_sampler, on_host)
    computed, _ = gradients(device, device_sampler, on_device)
    error = (computed - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 1e-3


@pytest.mark.parametrize("training", ["lora", "full"])
def test_sampler_and_trainer_agree_in_16_bits(problems: list[Problem], training: str) -> None:
    stack = stack_on("cuda", "bfloat16", training)
    sampler, sampled = rollouts(stack, problems)
    values, logprobs = gradients(stack, sampler, sampled)
    assert bool(torch.isfinite(values).all())
    for rollout, own in zip(sampled, logprobs, strict=True):
        mask = rollout.rows.mask
        difference = (own - rollout.rows.sampled_logprobs)[mask].abs()
        # 8 bits of mantissa through four blocks; a lost adapter or noise would be 10 times as far.
        assert float(difference.mean()) < 0.03


def test_graphs_serve_rollouts_of_other_lengths_and_other_ways_of_drawing(
    problems: list[Problem],
) -> None:
    stack = stack_on("cuda", "float32")
    sampler = StackedSampler(stack, 300)
    source = PromptSource(problems, stack.tokenizer, RUNS[0])
    prompts = [source.prompt(problem) for problem in problems[:3]]
    requests = [SampleRequest(prompts=prompts, seeds=[1, 2, 3])] * 3
    fewer = [SampleRequest(prompts=prompts[1:2], seeds=[2]), None, None]
    greedy = SamplingConfig(temperature=0.0, max_new_tokens=40)
    nucleus = SamplingConfig(temperature=0.6, top_p=0.95, max_new_tokens=40)
    first = {s: sampler.sample(requests, s, group_size=1) for s in (greedy, nucleus)}
    for sampling in (nucleus, greedy):
        assert sampler.sample(requests, sampling, group_size=1) == first[sampling]
        (part, *_) = sampler.sample(fewer, sampling, group_size=1)
        whole = first[sampling][0]
        assert part is not None
        assert whole is not None
        assert part.completions[0].token_ids == whole.completions[1].token_ids


def test_a_plan_of_several_kinds_is_carried_out(tmp_path: Path) -> None:
    scale = small.with_steps(
        small.SCALE,
        compute_dtype="bfloat16",
        evaluation=EvaluationConfig(
            every=2,
            sampling=SamplingConfig(temperature=0.6, top_p=0.95, max_new_tokens=24),
            token_budget=100,
            threshold=50.0,
        ),
        checkpoint_every=2,
    )

    def run(seed: int, **arm: Any) -> RunConfig:
        return small.make_run(seed=seed, scale=scale, **arm)

    untrained = dataclasses.replace(run(0, training="none"), procedure="evaluate")
    runs = [
        run(0),
        run(1, weight_format="nvfp4", noise=NOISE),
        run(2, weight_format="mxfp4", lora_rank=8),
        run(0, training="full"),
        run(1, training="full"),
        run(0, loss=DAPO),
        run(2, rounding=PlantedRounding(format="mxfp4")),
        untrained,
    ]
    results = train_together(
        runs, device="cuda", folder=tmp_path, progress=lambda text, values: None,
        should_stop=lambda: False, threads=2,
    )  # fmt: skip
    for one in results:
        assert isinstance(one, Measured)
        assert one.facts["sampler"] == "StackedSampler"
        assert sum(one.facts["answers"]["accuracy"]["right"]) > 0
    assert results[1].facts["noise"]["rollouts_perturbed"] == 2  # type: ignore[union-attr]
    assert [len(one.series.get("reward", [])) for one in results] == [3] * 7 + [0]  # type: ignore[union-attr]
    assert results[6].facts["rounding"]["format"] == "mxfp4"  # type: ignore[union-attr]
    for one in results[:7]:
        assert curve_metrics(one.series, 50.0)["take_off_steps"].value  # type: ignore[union-attr]


def test_two_trainings_of_the_same_runs_are_equal_to_the_bit(tmp_path: Path) -> None:
    scale = small.with_steps(small.SCALE, compute_dtype="bfloat16", steps=4)
    runs = [
        small.make_run(seed=0, scale=scale),
        small.make_run(seed=1, scale=scale, weight_format="nvfp4", noise=NOISE),
        small.make_run(seed=0, scale=scale, training="full"),
    ]
    first, second = (
        train_together(
            runs, device="cuda", folder=tmp_path / name, progress=lambda text, values: None,
            should_stop=lambda: False, threads=2,
        )
        for name in ("first", "second")
    )  # fmt: skip
    for one, other in zip(first, second, strict=True):
        assert isinstance(one, Measured)
        assert isinstance(other, Measured)
        assert one.series["grad_norm"] == other.series["grad_norm"]
        assert one.series == other.series
        assert one.facts["trained_change_l2"] == other.facts["trained_change_l2"]
