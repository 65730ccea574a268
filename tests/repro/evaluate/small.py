"""A policy that writes what it is given, and a run's scale of few problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from repro.data.problem import Problem
from repro.rollout.sampler import Completion, RolloutBatch
from repro.spec.config import SamplingConfig


def problem(text: str, answer: str, level: int | None = None) -> Problem:
    return Problem(id=text, question=text, answer=answer, level=level)


class Writer:
    """A sampler whose completions are given texts, by question.

    Attributes
    ----------
    requests
        The prompts, seeds and sampling of each call.
    """

    def __init__(self, tokenizer: Any, texts: Mapping[str, str]) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.requests: list[tuple[Any, Any, SamplingConfig]] = []

    def refresh(self) -> None:
        """Do nothing."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        group_size: int,
        seeds: Sequence[int],
    ) -> RolloutBatch:
        """Return what the texts have behind the prompts."""
        self.requests.append((prompts, seeds, sampling))
        return RolloutBatch(
            prompt_ids=[tuple(prompt) for prompt in prompts],
            completions=[self._written(p) for p in prompts for _ in range(group_size)],
            group_size=group_size,
        )

    def _written(self, prompt: Sequence[int]) -> Completion:
        question, _, begun = self.tokenizer.decode(list(prompt)).partition("\n")
        rest = self.texts[question].removeprefix(begun)
        ids = self.tokenizer(rest, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id]
        return Completion(
            token_ids=tuple(ids), sampled_logprobs=(0.0,) * len(ids), finish_reason="stop"
        )
