"""Worked solutions as rows of tokens: what supervised fine-tuning trains on.

The completion is tokenised by itself and follows the prompt's tokens, as in pre-training, and ends
in the end token, on which there is loss too; on the prompt there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from repro.data.problem import Problem
from repro.data.prompts import Tokenizer, render_within
from repro.data.worked import worked_completion
from repro.models.policy import Policy
from repro.rl.rows import Rows
from repro.rl.single_run.passes import row_logprobs
from repro.spec.config import RunConfig, TrainScale


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTExample:
    """One problem with its worked solution, as token ids.

    Attributes
    ----------
    prompt, completion
        The completion's last token is the end token.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


class Reader(Protocol):
    """What reads and writes tokens: a policy, or several side by side."""

    @property
    def tokenizer(self) -> Any:
        """Transformers' own, or None."""


def lessons_of(problems: Sequence[Problem], policy: Reader, run: RunConfig) -> list[SFTExample]:
    """Return the problems' worked solutions in the format of the scale's template.

    Raises
    ------
    ValueError
        When the policy has no tokenizer or its tokenizer no end token, a problem no worked solution
        in the template's format, or a prompt or completion is longer than the scale allows.
    """
    scale: TrainScale = run.scale
    if policy.tokenizer is None or policy.tokenizer.eos_token_id is None:
        raise ValueError("worked solutions need a tokenizer with an end token; the policy has none")
    tokenizer: Tokenizer = policy.tokenizer
    end = int(policy.tokenizer.eos_token_id)
    lessons = []
    for problem in problems:
        prompt = render_within(problem, scale.prompt_template, tokenizer, scale.max_prompt_tokens)
        text = worked_completion(problem, scale.prompt_template)
        completion = (*tokenizer(text, add_special_tokens=False)["input_ids"], end)
        if len(completion) > scale.rollout.max_new_tokens:
            raise ValueError(
                f"problem {problem.id}: its solution has {len(completion)} tokens; this scale "
                f"takes at most {scale.rollout.max_new_tokens}"
            )
        lessons.append(SFTExample(prompt=tuple(prompt), completion=completion))
    return lessons


def rows_of(lessons: Sequence[SFTExample]) -> Rows:
    """Return lessons as rows, one per prompt; nothing was sampled, so `sampled_logprobs` is 0."""
    lengths = torch.tensor([len(lesson.completion) for lesson in lessons])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]  # (B, T)
    token_ids = torch.zeros(mask.shape, dtype=torch.long)
    token_ids[mask] = torch.tensor([token for lesson in lessons for token in lesson.completion])
    return Rows(
        prompts=tuple(lesson.prompt for lesson in lessons),
        prompt_of_row=torch.arange(len(lessons)),
        token_ids=token_ids,
        mask=mask,
        sampled_logprobs=torch.zeros(mask.shape),
        truncated=torch.zeros(len(lessons), dtype=torch.bool),
    )


@torch.no_grad()
def mean_loss(policy: Policy, lessons: Sequence[SFTExample], rows_at_once: int) -> float:
    """Return the mean next-token loss over all completions' tokens, nats, the policy as it is."""
    total, tokens = 0.0, 0
    for begin in range(0, len(lessons), rows_at_once):
        rows = rows_of(lessons[begin : begin + rows_at_once])
        logprobs, _ = row_logprobs(policy, rows, 1.0)
        total -= float(logprobs.double().sum())
        tokens += int(rows.mask.sum())
    return total / tokens
