"""A policy that writes what it is given, and a run's scale of few problems."""

from repro.data.problem import Problem
from repro.rollout.sampler import Completion


def problem(text, answer, level=None):
    return Problem(id=text, question=text, answer=answer, level=level)


class Writer:
    """A sampler whose completions are given texts, by question."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.requests = tokenizer, texts, []

    def refresh(self):
        """Do nothing."""

    def sample(self, prompts, sampling, *, group_size, seeds):
        """Return what the texts have behind the prompts."""
        self.requests.append((prompts, seeds, sampling))
        return [self._written(p) for p in prompts for _ in range(group_size)]

    def _written(self, prompt):
        question, _, begun = self.tokenizer.decode(list(prompt)).partition("\n")
        rest = self.texts[question].removeprefix(begun)
        ids = self.tokenizer(rest, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id]
        return Completion(
            token_ids=tuple(ids), sampled_logprobs=(0.0,) * len(ids), finish_reason="stop"
        )
