"""What rounding or noise does to a policy before any training: how large the treatment is.

The paper's chain is: four-bit rounding raises entropy, entropy is exploration, exploration speeds
learning up. Its first link is measured here, for every arm as it is before its first step, against
the BF16 policy of the same seed. Units are prompts; each has `group_size` completions.

* `kl_completions`: KL(BF16 policy || arm's policy), nats per token of the BF16 policy's own
  completions, the same for every arm;
* `entropy_forced`: the arm's entropy along those same completions;
* `entropy_own`: its entropy along its own; `entropy_finished`: along those of its own that ended by
  themselves, since what is cut at the length limit is often a loop of little entropy;
* `choice`: p (1 - p) of the tokens that it drew, which is what a policy gradient moves by;
* what its completions earn: strict and lenient accuracy, pass@k, the share of groups with right and
  wrong answers both (only these teach), different answers to a prompt, completions that box an
  answer, write a program, or are cut.

An arm with a `temperature_factor` is the policy at another temperature, in sampling and in every
distribution: where its entropy is a format's, the accuracy that the format has less is *damage*,
what rounding costs beyond exploring. Arms with added noise carry that of the first noisy stage.

The BF16 policy is loaded as the arm is, adapter and all: an adapter of zeros adds up in another
order than a bare projection, which alone is a KL of .004 nats per token in bfloat16.

Where each seed has an order of channels of its own (`TrainScale.permuted`), seeds are draws of the
rounding. Distributions are never held: both policies go forward over the same rows, and a slice of
tokens at a time reaches the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor

from repro.data.load import load_problems
from repro.data.problem import digest_of_problems
from repro.data.prompts import read_texts, template_inputs, template_named
from repro.evaluation.asking import Question, answers_of, questions, seeds_of
from repro.evaluation.grades import Answers
from repro.evidence.derived import mean_of_problems
from repro.evidence.procedure import Measured, RunContext, Stopped
from repro.evidence.record import Estimate
from repro.models.checkpoint import checkpoint_inputs
from repro.models.divergence import SLICE, compared, logprobs
from repro.models.policy import Policy
from repro.procedures.train import device_of, load_arm
from repro.reward.grader import GraderPool
from repro.rl.noise import NoiseReceipt, perturbed
from repro.rl.packed import packed_hidden
from repro.rl.rows import Rows, make_rows
from repro.rollout.for_policy import sampler_for
from repro.rollout.sampler import Completion
from repro.spec.arm import Arm
from repro.spec.config import RunConfig, SamplingConfig, TrainScale

# Rows of one pass.
_ROWS = 128
_PROGRAM = re.compile(r"```|^\s*(?:def |import |print\()", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Common:
    """What every arm of a seed is compared with: the BF16 policy and its completions as rows."""

    policy: Policy
    asked: list[Question]
    parts: Sequence[Rows]
    temperature: float


def measure_dose(run: RunConfig, context: RunContext) -> Measured:
    """Measure an arm's policy before training; see `repro.evidence.procedure.Procedure`."""
    torch.set_num_threads(context.threads)
    progress, should_stop = context.progress, context.should_stop
    scale: TrainScale = run.scale
    progress("sampling the common tokens", {})
    common = _common(_untreated(run))
    if should_stop():
        raise Stopped
    progress("loading", {})
    policy = load_arm(run, device_of(run))
    temperature = run.rollout.temperature
    with torch.no_grad(), _noise(run, policy) as receipt, GraderPool() as pool:
        progress("sampling its own", {})
        completions, own = _sampled(policy, common.asked, scale, run.seed, temperature)
        if should_stop():
            raise Stopped
        progress("measuring", {})
        by_prompt = _of_distributions(policy, common, own, temperature)
        token_ids = [completion.token_ids for completion in completions]
        openings = [question.opening for question in common.asked]
        texts = read_texts(token_ids, openings, policy.tokenizer)
        reads = template_named(scale.prompt_template).reads
        answers = answers_of(common.asked, texts, completions, pool, reads)
    by_prompt |= _of_answers(answers, texts)
    metrics = {name: _mean(values, _UNITS.get(name, "nats")) for name, values in by_prompt.items()}
    metrics |= answers.estimates(scale.evaluation.at)
    return Measured(
        metrics=metrics,
        series={
            # A prompt of which no completion ended says nothing of those that did.
            f"{name}_by_prompt": [None if math.isnan(value) else value for value in values]
            for name, values in by_prompt.items()
        },
        facts=policy.facts
        | {
            "noise_at_start": {
                "sigma": receipt.sigma,
                "sigma_realised": receipt.sigma_realised,
                "modules": len(receipt.modules),
                "channels_changed": receipt.channels_changed,
            },
            "temperature": temperature,
            "answers": {"accuracy": answers.tallies()},
        },
        inputs={
            **checkpoint_inputs(policy.facts),
            "development_problems": digest_of_problems([one.problem for one in common.asked]),
            **template_inputs(scale.prompt_template, policy.tokenizer),
        },
    )


_UNITS = {
    "choice": "share",
    "mixed_groups": "percent",
    "code_rate": "percent",
    "distinct_answers": "answers",
}


def _untreated(run: RunConfig) -> RunConfig:
    """Return the run of the BF16 policy that a run's arm is compared with."""
    arm = run.arm
    plain = Arm(
        name="bf16",
        label="BF16",
        training=arm.training,
        lora_rank=arm.lora_rank,
        lora_alpha=arm.lora_alpha,
        norms_trained=arm.norms_trained,
    )
    return dataclasses.replace(run, arm=plain)


# A process asks the arms of one seed in turn; the BF16 policy's completions are sampled once.
@functools.lru_cache(maxsize=1)
def _common(run: RunConfig) -> Common:
    """Return what the arms of a seed have in common, from the run of their BF16 policy."""
    scale: TrainScale = run.scale
    policy = load_arm(run, device_of(run))
    asked = questions(
        load_problems(scale.data, "development"),
        scale.prompt_template,
        cast(Any, policy.tokenizer),
        max_prompt_tokens=scale.max_prompt_tokens,
    )
    with torch.no_grad():
        _, parts = _sampled(policy, asked, scale, run.seed, run.rollout.temperature)
    return Common(policy=policy, asked=asked, parts=parts, temperature=run.rollout.temperature)


def _sampled(
    policy: Policy, asked: Sequence[Question], scale: TrainScale, seed: int, temperature: float
) -> tuple[list[Completion], list[Rows]]:
    """Return a group of completions of each question, as rollouts are drawn, also as rows.

    The rows are in parts of whole prompts.
    """
    group, limit = scale.group_size, scale.rollout.max_new_tokens
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=limit)
    prompts = [question.prompt for question in asked]
    seeds = seeds_of(asked, samples=group, seed=seed, stream="dose")
    sampler = sampler_for(
        policy,
        rows=group * len(prompts),
        max_new_tokens=limit,
        max_positions=max(map(len, prompts)) + limit,
    )
    completions = sampler.sample(prompts, sampling, group_size=group, seeds=seeds)
    close = getattr(sampler, "close", None)
    if close is not None:
        close()
    at_once = max(1, _ROWS // group)
    parts = [
        make_rows(
            prompts[first : first + at_once],
            completions[first * group : (first + at_once) * group],
            group_size=group,
        )
        for first in range(0, len(prompts), at_once)
    ]
    return completions, parts


def _of_distributions(
    policy: Policy, common: Common, own: Sequence[Rows], temperature: float
) -> dict[str, list[float]]:
    """Return what the distributions along common and own completions say, a value per prompt."""
    values = defaultdict[str, list[float]](list)
    for rows in common.parts:
        kl, forced = compared(
            common.policy,
            packed_hidden(common.policy, rows),
            policy,
            packed_hidden(policy, rows),
            (common.temperature, temperature),
        )
        values["kl_completions"] += _by_prompt(rows, kl)
        values["entropy_forced"] += _by_prompt(rows, forced)
    for rows in own:
        entropy, choice = zip(*_along(policy, rows, temperature), strict=True)
        values["entropy_own"] += _by_prompt(rows, torch.cat(entropy))
        values["entropy_finished"] += _by_prompt(rows, torch.cat(entropy), finished=True)
        values["choice"] += _by_prompt(rows, torch.cat(choice))
    return values


def _along(policy: Policy, rows: Rows, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, slice by slice, the entropy and p (1 - p) of the token that was drawn."""
    drawn = rows.token_ids[rows.mask].to(policy.device)
    for hidden, ids in zip(
        packed_hidden(policy, rows).split(SLICE), drawn.split(SLICE), strict=True
    ):
        own = logprobs(policy, hidden, temperature)
        chosen = own.gather(1, ids[:, None])[:, 0].exp()
        yield -(own.exp() * own).sum(-1), chosen * (1 - chosen)


def _by_prompt(rows: Rows, values: Tensor, *, finished: bool = False) -> list[float]:
    """Return means over prompts' tokens, row by row in `values`, perhaps of finished rows alone."""
    prompts = rows.prompt_of_row[:, None].expand_as(rows.mask)[rows.mask]
    values = values.double().cpu()
    if finished:
        counts = ~rows.truncated[:, None].expand_as(rows.mask)[rows.mask]
        prompts, values = prompts[counts], values[counts]
    sums = torch.zeros(len(rows.prompts), dtype=torch.float64)
    total = sums.index_add(0, prompts, values)
    return [float(v) for v in total / sums.index_add(0, prompts, torch.ones_like(values))]


def _of_answers(answers: Answers, texts: Sequence[str]) -> dict[str, list[float]]:
    """Return what each prompt's completions have in common, and how they differ."""
    group = len(texts) // max(1, len(answers.groups) + answers.dropped)
    programs = [float(bool(_PROGRAM.search(text))) for text in texts]
    paid = [[one.accuracy == 1.0 and not one.truncated for one in of] for of in answers.groups]
    given = [{one.answer for one in of if one.answer is not None} for of in answers.groups]
    return {
        "mixed_groups": [100.0 * (any(of) and not all(of)) for of in paid],
        "distinct_answers": [float(len(of)) for of in given],
        "code_rate": [
            100 * fmean(programs[first : first + group]) for first in range(0, len(programs), group)
        ],
    }


def _noise(run: RunConfig, policy: Policy) -> AbstractContextManager[NoiseReceipt]:
    """Return the added noise of the first noisy stage, or none."""
    noise, steps = run.arm.noise, run.scale.steps
    first = 0 if noise is None else max(steps // noise.num_stages, 1)
    return perturbed(policy, noise, seed=run.seed, step=first, total_steps=steps)


def _mean(values: Sequence[float], unit: str) -> Estimate:
    method = "mean over prompts of the token mean; 95 % t interval"
    return mean_of_problems([value for value in values if not math.isnan(value)], unit, method)
