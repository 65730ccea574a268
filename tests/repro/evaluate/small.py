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
    """A sampler whose completions are given texts, by question; runs of several have the same.

    Attributes
    ----------
    requests
        The prompts, seeds and sampling of each call.
    """

    def __init__(self, tokenizer: Any, texts: Mapping[str, str], runs: int = 1) -> None:
        self.tokenizer, self.texts, self.runs = tokenizer, texts, runs
        self.requests: list[tuple[Any, Any, SamplingConfig]] = []

    def prompts_at_once(self, samples: int, longest: int) -> int:
        """Return a small number, so that several calls are needed."""
        del samples, longest
        return 2

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int] | None],
        sampling: SamplingConfig,
        *,
        group_size: int,
    ) -> list[RolloutBatch | None]:
        """Return what the texts have behind the prompts."""
        self.requests.append((prompts, seeds, sampling))
        batch = RolloutBatch(
            prompt_ids=[tuple(prompt) for prompt in prompts],
            completions=[self._written(p) for p in prompts for _ in range(group_size)],
            group_size=group_size,
        )
        return [None if own is None else batch for own in seeds]

    def _written(self, prompt: Sequence[int]) -> Completion:
        question, _, begun = self.tokenizer.decode(list(prompt)).partition("\n")
        rest = self.texts[question].removeprefix(begun)
        ids = self.tokenizer(rest, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id]
        return Completion(
            token_ids=tuple(ids), sampled_logprobs=(0.0,) * len(ids), finish_reason="stop"
        )
