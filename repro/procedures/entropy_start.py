"""Entropy before any training, prompt by prompt: what four-bit rounding does to it by itself.

Two readings of "quantisation raises entropy", both in nats a token, averaged over the tokens of one
prompt's completions:

* `own`: under the completions that the policy itself samples. This is what Fig. 5 plots at step 0;
  it moves also because other completions are sampled.
* `forced`: under the completions that the BF16 policy samples, the same for every arm: the
  distributions are compared at the same places.

Prompts are the units: each arm sees the same ones, so arms are compared prompt by prompt, and no
training seed is needed. Arms with added noise carry that of the first noisy stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch

from repro.data.load import load_problems
from repro.data.problem import Problem, digest_of_problems
from repro.data.prompts import Tokenizer, render, template_named
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.evidence.statistics import mean_interval
from repro.models.policy import Policy, load_policy
from repro.procedures.matched_noise import plant_matched_noise
from repro.procedures.train import checkpoint_digest
from repro.rl.logprobs import completion_logprobs
from repro.rl.noise import NoiseReceipt, perturbed
from repro.rl.rows import Rows, make_rows
from repro.rollout.torch_sampler import TorchSampler, end_token_ids
from repro.spec.arm import Training, WeightFormat
from repro.spec.config import RunConfig, TrainScale, derive_seed

_PROMPTS_AT_ONCE = 256
_KINDS = ("own", "forced")


def measure_entropy(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Measure one arm's entropy before training; see `repro.procedures.Procedure`."""
    del folder
    torch.set_num_threads(threads)
    scale: TrainScale = run.scale
    problems = load_problems(scale.data, "development")
    progress("loading", {})
    policy = _load(run, run.arm.weight_format, run.arm.training)
    if run.arm.weight_noise is not None:
        plant_matched_noise(policy, run, load_problems(scale.data, "train"))
    progress("sampling the common tokens", {})
    common = _common_rows(run.scale, run.seed, run.tier)
    found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    with _noise(run, policy) as receipt:
        for part, forced in zip(_parts(problems), common, strict=True):
            if should_stop():
                raise Stopped
            done = float(len(found["own"]))
            progress("measuring", {"step": done, "steps": float(len(problems))})
            own = _sample(scale, run.seed, policy, part)
            found["own"] += entropies_by_prompt(policy, own)
            found["forced"] += entropies_by_prompt(policy, forced)
    return Measured(
        metrics={f"entropy_{kind}": _mean(values) for kind, values in found.items()},
        series={f"entropy_{kind}_by_prompt": list(values) for kind, values in found.items()},
        effects=dict(policy.effects) | {"noise_at_start": _told(receipt)},
        inputs={
            "checkpoint": checkpoint_digest(scale.checkpoint, policy.effects),
            "development_problems": digest_of_problems(problems),
            "prompt_template": template_named(scale.prompt_template).digest(),
        },
    )


def _load(run: RunConfig, weight_format: WeightFormat, training: Training) -> Policy:
    return load_policy(
        run.scale.checkpoint,
        weight_format=weight_format,
        training=training,
        lora_rank=run.arm.lora_rank,
        lora_alpha=run.arm.lora_alpha,
        compute_dtype=run.scale.compute_dtype,
        seed=run.seed,
        device=_device(run.tier),
        order=run.seed if run.scale.permuted else None,
        rounding=run.arm.rounding,
    )


def _device(tier: str) -> str:
    return "cpu" if tier == "smoke" else "cuda"


def _parts(problems: Sequence[Problem]) -> list[Sequence[Problem]]:
    """Return the problems in the parts that are sampled at once."""
    places = range(0, len(problems), _PROMPTS_AT_ONCE)
    return [problems[place : place + _PROMPTS_AT_ONCE] for place in places]


# Every arm of a seed is asked on the same tokens, which one process samples once.
@functools.lru_cache(maxsize=1)
def _common_rows(scale: TrainScale, seed: int, tier: str) -> tuple[Rows, ...]:
    """Return the BF16 policy's completions of the development problems, part by part."""
    plain = load_policy(
        scale.checkpoint,
        weight_format="bf16",
        compute_dtype=scale.compute_dtype,
        device=_device(tier),
    )
    problems = load_problems(scale.data, "development")
    return tuple(_sample(scale, seed, plain, part) for part in _parts(problems))


def _noise(run: RunConfig, policy: Policy) -> AbstractContextManager[NoiseReceipt]:
    """Return the added noise of the first noisy stage, or none."""
    noise, steps = run.arm.noise, run.scale.steps
    first = 0 if noise is None else max(steps // noise.num_stages, 1)
    return perturbed(policy, noise, seed=run.seed, step=first, total_steps=steps)


def _told(receipt: NoiseReceipt) -> dict[str, Any]:
    return {
        "sigma": receipt.sigma,
        "sigma_realised": receipt.sigma_realised,
        "modules": len(receipt.modules),
        "channels_changed": receipt.channels_changed,
    }


def _sample(scale: TrainScale, seed: int, policy: Policy, problems: Sequence[Problem]) -> Rows:
    """Return completions of the problems; their seeds depend on run seed and problem alone."""
    tokenizer = cast(Tokenizer, policy.tokenizer)
    prompts = [render(problem, scale.prompt_template, tokenizer) for problem in problems]
    batch = TorchSampler(policy).sample(
        prompts,
        scale.rollout,
        group_size=scale.group_size,
        seeds=[
            derive_seed(seed, "entropy", problem.id, k)
            for problem in problems
            for k in range(scale.group_size)
        ],
    )
    return make_rows(
        prompts,
        batch.completions,
        group_size=scale.group_size,
        end_token_ids=end_token_ids(policy),
    )


@torch.no_grad()
def entropies_by_prompt(policy: Policy, rows: Rows) -> list[float]:
    """Return the mean entropy over the tokens of each prompt's completions, in nats."""
    _, entropy = completion_logprobs(policy, rows, 1.0)
    sums = entropy.double().sum(1).cpu()
    tokens = rows.mask.sum(1).double()
    count = len(rows.prompts)
    total = torch.zeros(count, dtype=torch.float64).index_add_(0, rows.prompt_of_row, sums)
    length = torch.zeros(count, dtype=torch.float64).index_add_(0, rows.prompt_of_row, tokens)
    return [float(value) for value in total / length]


def _mean(values: Sequence[float]) -> Estimate:
    interval = mean_interval(values)
    return Estimate(
        value=fmean(values),
        unit="nats",
        low=interval.low,
        high=interval.high,
        n=interval.n,
        method="mean over prompts of the token mean; 95 % t interval over prompts",
    )
