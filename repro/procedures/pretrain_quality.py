"""What a pre-trained tiny policy can do, and what it does: the measures that decide its use.

A policy that reinforcement learning can sharpen knows more than it shows. Three numbers say so:
greedy accuracy (what it shows), greedy accuracy with working forced (what it knows: the ceiling),
and accuracy at temperature 1 apart for completions with and without working (the signal). The loss
says none of this. Answers are read strictly, as in training, and compared as text: the generator's
answers are plain integers.

Greedy accuracy rests on one near-tie, whether to work or not, at each level; it can move by tens of
points while no skill changes. Print it with the share of worked answers and the ceiling beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

from repro.data.generator import Split, generate_problems
from repro.data.problem import Problem
from repro.data.tiny_corpus import WORKING_PREFIX, CorpusConfig, tiny_prompt
from repro.models.policy import load_policy
from repro.reward.answers import extract_answer
from repro.rollout.sampler import RolloutBatch
from repro.rollout.torch_sampler import TorchSampler
from repro.spec.config import SamplingConfig, WeightFormat, derive_seed

_GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=64)
_SAMPLED = SamplingConfig(temperature=1.0, max_new_tokens=64)
_PROMPTS_AT_ONCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Percentages over `problems` problems; `_by_level` is keyed by the level as text.

    Attributes
    ----------
    greedy, greedy_by_level
        Strict accuracy of greedy decoding.
    working_greedy_by_level
        Share of greedy completions that work.
    forced_working, forced_working_by_level
        Strict accuracy of greedy decoding after `WORKING_PREFIX`.
    sampled_mean, sampled_pass
        Mean and best of `samples` completions at temperature 1.
    working
        Share of sampled completions that work.
    given_working, given_careless
        Accuracy of the sampled completions that work, and of the others; None where none is.
    truncated
        Share of sampled completions that hit the length limit.
    """

    problems: int
    samples: int
    greedy: float
    greedy_by_level: dict[str, float]
    working_greedy_by_level: dict[str, float]
    forced_working: float
    forced_working_by_level: dict[str, float]
    sampled_mean: float
    sampled_pass: float
    working: float
    given_working: float | None
    given_careless: float | None
    truncated: float
    seconds: float


def measure_quality(
    checkpoint: str | Path,
    corpus: CorpusConfig,
    *,
    seed: int,
    problems: int = 500,
    samples: int = 8,
    split: Split = "development",
    weight_format: WeightFormat = "bf16",
) -> Quality:
    """Measure a checkpoint on generated problems that it has never seen.

    Parameters
    ----------
    split
        `development` while a recipe is chosen; `test` is what the suite's targets report on.
    """
    began = time.perf_counter()
    asked = generate_problems(split, problems, seed=seed, config=corpus.generator)
    policy = load_policy(
        checkpoint,
        weight_format=weight_format,
        training="none",
        lora_rank=1,
        lora_alpha=1.0,
        seed=seed,
    )
    sampler = TorchSampler(policy)
    tokenizer = cast(PreTrainedTokenizerBase, policy.tokenizer)
    greedy = _ask(sampler, tokenizer, asked, _GREEDY, seed=seed)
    forced = _ask(sampler, tokenizer, asked, _GREEDY, seed=seed, opening=WORKING_PREFIX)
    sampled = _ask(sampler, tokenizer, asked, _SAMPLED, seed=seed, group_size=samples)
    drawn = [answer for group in sampled for answer in group]
    return Quality(
        problems=problems,
        samples=samples,
        greedy=_percent(group[0].correct for group in greedy),
        greedy_by_level=_by_level(asked, [group[0].correct for group in greedy]),
        working_greedy_by_level=_by_level(asked, [group[0].works for group in greedy]),
        forced_working=_percent(group[0].correct for group in forced),
        forced_working_by_level=_by_level(asked, [group[0].correct for group in forced]),
        sampled_mean=_percent(answer.correct for answer in drawn),
        sampled_pass=_percent(any(answer.correct for answer in group) for group in sampled),
        working=_percent(answer.works for answer in drawn),
        given_working=_percent_of([answer.correct for answer in drawn if answer.works]),
        given_careless=_percent_of([answer.correct for answer in drawn if not answer.works]),
        truncated=_percent(answer.truncated for answer in drawn),
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    correct: bool
    works: bool
    truncated: bool


def _ask(
    sampler: TorchSampler,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Problem],
    sampling: SamplingConfig,
    *,
    seed: int,
    group_size: int = 1,
    opening: str = "",
) -> list[list[_Answer]]:
    """Return the graded answers, problem by problem."""
    answers: list[list[_Answer]] = []
    for begin in range(0, len(asked), _PROMPTS_AT_ONCE):
        part = asked[begin : begin + _PROMPTS_AT_ONCE]
        texts = [tiny_prompt(problem.question) + opening for problem in part]
        seeds = [
            derive_seed(seed, "quality", problem.id, sample)
            for problem in part
            for sample in range(group_size)
        ]
        prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        batch = sampler.sample(prompts, sampling, group_size=group_size, seeds=seeds)
        answers += _graded(part, batch, tokenizer, opening)
    return answers


def _graded(
    asked: Sequence[Problem],
    batch: RolloutBatch,
    tokenizer: PreTrainedTokenizerBase,
    opening: str,
) -> list[list[_Answer]]:
    graded = []
    for index, problem in enumerate(asked):
        group = []
        for completion in batch.group(index):
            text = opening + str(
                tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
            )
            group.append(
                _Answer(
                    correct=extract_answer(text) == problem.answer,
                    works=text.startswith(WORKING_PREFIX),
                    truncated=completion.finish_reason == "length",
                )
            )
        graded.append(group)
    return graded


def _percent(values: Iterable[bool]) -> float:
    found = list(values)
    return round(100.0 * sum(found) / len(found), 2)


def _percent_of(values: Sequence[bool]) -> float | None:
    return _percent(values) if values else None


def _by_level(asked: Sequence[Problem], values: Sequence[bool]) -> dict[str, float]:
    levels = sorted({problem.level for problem in asked if problem.level is not None})
    return {
        str(level): _percent(
            [value for problem, value in zip(asked, values, strict=True) if problem.level == level]
        )
        for level in levels
    }
