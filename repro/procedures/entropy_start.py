"""Entropy before any training, prompt by prompt: what four-bit rounding does to it by itself.

Two readings of "quantisation raises entropy", both in nats per token, averaged over the tokens of
one prompt's completions:

* `own`: under the completions that the policy itself samples. This is what Fig. 5 plots at step 0;
  it moves also because other completions are sampled.
* `forced`: under the completions that the BF16 policy samples, the same for every arm: the
  distributions are compared at the same places.

Prompts are the units: each arm sees the same ones, so arms are compared prompt by prompt, and no
training seed is needed. Arms with added noise carry that of the first noisy stage.

Where the scale asks for the *dose* (`EvaluationConfig.dose`), two more, prompt by prompt:

* `kl_completions`: KL(BF16 policy || arm's policy), nats per token of the common completions, by
  the definition of `repro.measure.dose`;
* `accuracy_sampled_start`: percent of the arm's own samples that are right, at the temperature of
  rollouts.

Where each seed has an order of channels of its own (`TrainScale.permuted`), the BF16 policy of a
seed has the same order. It is the same function as without, and samples the same tokens where
sums do not depend on their order; in half precision they do, and with another order the BF16 arm
would differ from itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from repro.data.load import load_problems
from repro.data.problem import Problem, digest_of_problems
from repro.data.prompts import Tokenizer, read_texts, render, template_named
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate
from repro.evidence.statistics import mean_interval
from repro.measure.dose import completion_kl
from repro.models.checkpoint import checkpoint_inputs
from repro.models.policy import Policy, end_token_ids, load_policy
from repro.models.weight_noise import token_logprobs
from repro.procedures.train import load_arm
from repro.reward.grader import GraderPool
from repro.reward.score import score
from repro.rl.logprobs import completion_logprobs
from repro.rl.noise import NoiseReceipt, perturbed
from repro.rl.rows import Rows, make_rows
from repro.rl.torch_sampler import TorchSampler
from repro.spec.config import RunConfig, TrainScale, derive_seed

_PROMPTS_AT_ONCE = 256
# As many as one pass over full distributions takes (`token_logprobs`).
_ROWS_AT_ONCE = 16
_ENTROPIES = ("entropy_own", "entropy_forced")
_DOSE = ("kl_completions", "accuracy_sampled_start")
_UNITS = {"accuracy_sampled_start": "percent"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Common:
    """What every arm of a seed is compared on: the BF16 policy and its completions, part by part.

    Attributes
    ----------
    parts
        The completions of `_PROMPTS_AT_ONCE` prompts each.
    clean
        Where the dose is asked for, the policy's log-probabilities along each prompt's completions.
    """

    parts: tuple[Rows, ...]
    clean: tuple[list[Tensor], ...] = ()


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
    policy = load_arm(run, _device(run.tier))
    progress("sampling the common tokens", {})
    common = _common(run.scale, run.seed, run.tier)
    names = (*_ENTROPIES, *(_DOSE if scale.evaluation.dose else ()))
    by_metric: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        receipt = stack.enter_context(_noise(run, policy))
        pool = stack.enter_context(GraderPool(workers=1)) if scale.evaluation.dose else None
        for number, part in enumerate(_parts(problems)):
            if should_stop():
                raise Stopped
            done = float(len(by_metric["entropy_own"]))
            progress("measuring", {"step": done, "steps": float(len(problems))})
            own, forced = _sample(scale, run.seed, policy, part), common.parts[number]
            by_metric["entropy_own"] += entropies_by_prompt(policy, own)
            by_metric["entropy_forced"] += entropies_by_prompt(policy, forced)
            if pool is not None:
                first = len(by_metric["kl_completions"])
                clean = common.clean[first : first + len(part)]
                by_metric["kl_completions"] += kls_by_prompt(policy, forced, clean)
                by_metric["accuracy_sampled_start"] += _accuracies(
                    policy, part, own, pool, template_named(scale.prompt_template).reads
                )
    return Measured(
        metrics={
            name: _mean(values, _UNITS.get(name, "nats")) for name, values in by_metric.items()
        },
        series={f"{name}_by_prompt": list(values) for name, values in by_metric.items()},
        effects=dict(policy.effects) | {"noise_at_start": _noise_effects(receipt)},
        inputs={
            **checkpoint_inputs(policy.effects),
            "development_problems": digest_of_problems(problems),
            "prompt_template": template_named(scale.prompt_template).digest(),
        },
    )


def _device(tier: str) -> str:
    return "cpu" if tier == "smoke" else "cuda"


def _parts(problems: Sequence[Problem]) -> list[Sequence[Problem]]:
    """Return the problems in the parts that are sampled at once."""
    places = range(0, len(problems), _PROMPTS_AT_ONCE)
    return [problems[place : place + _PROMPTS_AT_ONCE] for place in places]


# Every arm of a seed is asked on the same tokens, which one process samples once.
@functools.lru_cache(maxsize=1)
def _common(scale: TrainScale, seed: int, tier: str) -> Common:
    """Return what the arms of a seed have in common."""
    plain = load_policy(
        scale.checkpoint,
        weight_format="bf16",
        compute_dtype=scale.compute_dtype,
        device=_device(tier),
        order=seed if scale.permuted else None,
    )
    problems = load_problems(scale.data, "development")
    parts = tuple(_sample(scale, seed, plain, part) for part in _parts(problems))
    if not scale.evaluation.dose:
        return Common(parts=parts)
    clean = tuple(along for rows in parts for _, along in _along_completions(plain, rows))
    return Common(parts=parts, clean=clean)


def _along_completions(policy: Policy, rows: Rows) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield, prompt by prompt, the prompt's tokens per row and the rows' log-probabilities.

    The latter are (S, V) float32 per row, for `completion_kl`. Several prompts go forward together.
    """
    lengths = rows.lengths().tolist()
    whole = [
        [*rows.prompts[prompt], *rows.token_ids[row, : lengths[row]].tolist()]
        for row, prompt in enumerate(rows.prompt_of_row.tolist())
    ]
    group = len(rows) // len(rows.prompts)
    at_once = max(1, _ROWS_AT_ONCE // group) * group
    for begin in range(0, len(whole), at_once):
        logprobs = token_logprobs(policy, whole[begin : begin + at_once])
        for row in range(0, len(logprobs), group):
            prompt = rows.prompts[(begin + row) // group]
            yield [len(prompt)] * group, logprobs[row : row + group]


def kls_by_prompt(policy: Policy, rows: Rows, clean: Sequence[Sequence[Tensor]]) -> list[float]:
    """Return KL(BF16 policy || policy) over each prompt's completions, nats per token.

    Parameters
    ----------
    rows
        The BF16 policy's completions, equally many of each prompt in turn.
    clean
        That policy's log-probabilities along them, a list per prompt.
    """
    return [
        completion_kl(before, changed, prompt_tokens)
        for before, (prompt_tokens, changed) in zip(
            clean, _along_completions(policy, rows), strict=True
        )
    ]


def _accuracies(
    policy: Policy, problems: Sequence[Problem], rows: Rows, pool: GraderPool, reads: str = "tags"
) -> list[float]:
    """Return the percent of each prompt's completions that are right, by the strict reading."""
    tokenizer = cast(PreTrainedTokenizerBase, policy.tokenizer)
    completions = [
        tokens[mask].tolist() for tokens, mask in zip(rows.token_ids, rows.mask, strict=True)
    ]
    texts = read_texts(completions, rows.prompts, tokenizer)
    group = len(rows) // len(problems)
    golds = [problem.answer for problem in problems for _ in range(group)]
    right = score(texts, golds, "answer", 0.0, pool, reads=reads).accuracy
    percents = []
    for number, problem in enumerate(problems):
        graded = [one for one in right[number * group : (number + 1) * group] if one is not None]
        if not graded:
            raise ValueError(f"problem {problem.id}: none of its {group} completions was graded")
        percents.append(100 * fmean(graded))
    return percents


def _noise(run: RunConfig, policy: Policy) -> AbstractContextManager[NoiseReceipt]:
    """Return the added noise of the first noisy stage, or none."""
    noise, steps = run.arm.noise, run.scale.steps
    first = 0 if noise is None else max(steps // noise.num_stages, 1)
    return perturbed(policy, noise, seed=run.seed, step=first, total_steps=steps)


def _noise_effects(receipt: NoiseReceipt) -> dict[str, Any]:
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


def _mean(values: Sequence[float], unit: str) -> Estimate:
    interval = mean_interval(values)
    return Estimate(
        value=fmean(values),
        unit=unit,
        low=interval.low,
        high=interval.high,
        n=interval.n,
        method="mean over prompts of the token mean; 95 % t interval over prompts",
    )
