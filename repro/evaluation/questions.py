"""Problems as a policy reads them, and the seed of each completion.

A completion's seed follows from the run's seed, the problem and the sample, never from the arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from repro.data.problem import Problem
from repro.data.prompts import opening_of, render_within
from repro.spec.config import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A problem as the policy reads it, and the text that its completion is made to begin with.

    That opening, of which a thinking tag at the chat template's end is a part, is in the prompt,
    too; empty lets the policy choose.
    """

    problem: Problem
    prompt: tuple[int, ...]
    opening: str = ""


def questions(
    problems: Sequence[Problem],
    template: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    opening: str = "",
) -> list[Question]:
    """Render problems as prompts; one of more than `max_prompt_tokens` tokens raises."""
    begun = tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
    asked = []
    for problem in problems:
        prompt = render_within(problem, template, tokenizer, max_prompt_tokens)
        opened = opening_of(prompt, tokenizer) + opening
        asked.append(Question(problem=problem, prompt=(*prompt, *begun), opening=opened))
    return asked


def seeds_of(
    asked: Sequence[Question], *, samples: int, seed: int, stream: str = "evaluation"
) -> list[int]:
    """Return the seeds of a run's completions by the stream's name, question by question."""
    return [
        derive_seed(seed, stream, question.problem.id, sample)
        for question in asked
        for sample in range(samples)
    ]
