"""Evaluation of a run as its scale says.

All arms, trained or not, are evaluated on the same problems: by sampling as in the paper, and
greedily. An untrained arm is also evaluated greedily with the working forced: the upper limit of
what training can reach by changing only the *style* of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from repro.data.problem import Problem
from repro.data.prompts import template_named
from repro.distributed import ALONE, Ranks
from repro.evaluation.asking import Evaluator, Question, questions
from repro.evaluation.grades import Answers
from repro.evidence.record import Estimate
from repro.reward.custom import load_reward
from repro.reward.grader import GraderPool
from repro.reward.score import Graded, GradingRequest, score
from repro.rollout.sampler import Sampler
from repro.spec.config import RunConfig, SamplingConfig, TrainScale

# Answers that are greedy, whatever the scale's evaluation says, on the questions of all sets.
_GREEDY = ("accuracy_greedy", "accuracy_forced_working")


class ScaleEvaluator:
    """Evaluates a run."""

    def __init__(
        self,
        run: RunConfig,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase | None,
        pool: GraderPool,
        ranks: Ranks = ALONE,
    ) -> None:
        self.run = run
        self.scale: TrainScale = run.scale
        if tokenizer is None:
            checkpoint = self.scale.checkpoint
            raise ValueError(f"{checkpoint} has no tokenizer; asking questions needs one")
        named = run.arm.reward_function
        self.own_reward = None if named is None else load_reward(named)
        reads = template_named(self.scale.prompt_template).reads
        self.evaluator = Evaluator(sampler, tokenizer, pool, run.seed, reads=reads, ranks=ranks)
        # A split is rendered once, however often a run asks it.
        self._rendered: dict[tuple[tuple[Problem, ...], str, int], list[Question]] = {}

    def greedy(self, problems: Sequence[Problem], *, opening: str = "") -> Answers:
        """Return greedy answers to the problems."""
        limit = self.scale.evaluation.sampling.max_new_tokens
        sampling = SamplingConfig(temperature=0.0, max_new_tokens=limit)
        # Where accuracy is over several sets, these are asked together.
        longest = self.scale.longest_prompt if self.scale.accuracy_over == "sets" else 0
        return self._ask(problems, sampling, samples=1, opening=opening, max_prompt_tokens=longest)

    def sampled(self, problems: Sequence[Problem], *, max_prompt_tokens: int = 0) -> Answers:
        """Return sampled answers; 0 takes the scale's own length limit."""
        evaluation = self.scale.evaluation
        return self._ask(
            problems,
            evaluation.sampling,
            samples=evaluation.samples,
            max_prompt_tokens=max_prompt_tokens,
        )

    def explored(self, test: Sequence[Problem]) -> Answers:
        """Return answers to the first test problems, sampled as rollouts are."""
        evaluation = self.scale.evaluation
        return self._ask(
            test[: evaluation.explored_problems],
            self.run.rollout,
            samples=evaluation.explored_samples,
        )

    def final(
        self, test: Sequence[Problem], further: Mapping[str, Sequence[Problem]]
    ) -> dict[str, Answers]:
        """Evaluate the policy at the end of a run; return the answers by metric.

        If accuracy is over the `further` test sets, `test` has all their problems, and is only
        evaluated greedily.
        """
        answers = {}
        if self.scale.accuracy_over == "split":
            answers["accuracy"] = self.sampled(test)
        answers["accuracy_greedy"] = self.greedy(test)
        limits = {item.name: item.max_prompt_tokens for item in self.scale.test_sets}
        for name, problems in further.items():
            answers[f"accuracy_{name}"] = self.sampled(
                problems, max_prompt_tokens=limits.get(name, 0)
            )
        prefix = template_named(self.scale.prompt_template).working_prefix
        if prefix is not None and self.run.arm.training == "none":
            # The ceiling belongs to the policy as it starts. Only of policies pre-trained here is
            # the way of working known well enough to be forced.
            answers["accuracy_forced_working"] = self.greedy(test, opening=prefix)
        return answers

    def score(self, requests: Sequence[GradingRequest]) -> list[Graded]:
        """Return the rewards of completions, by the reward of the run's arm."""
        return score(
            requests,
            self.run.arm.reward,
            self.scale.format_reward,
            self.evaluator.pool,
            own=self.own_reward,
            reads=self.evaluator.reads,
        )

    def _ask(
        self,
        problems: Sequence[Problem],
        sampling: SamplingConfig,
        *,
        samples: int,
        opening: str = "",
        max_prompt_tokens: int = 0,
    ) -> Answers:
        longest = max_prompt_tokens or self.scale.max_prompt_tokens
        key = (tuple(problems), opening, longest)
        if key not in self._rendered:
            template, tokenizer = self.scale.prompt_template, self.evaluator.tokenizer
            self._rendered[key] = questions(
                problems, template, tokenizer, max_prompt_tokens=longest, opening=opening
            )
        return self.evaluator.ask(self._rendered[key], sampling, samples=samples)


def mean_tokens(answers: Mapping[str, Answers]) -> dict[str, Estimate]:
    """Return `completion_tokens_mean` of a run's final sampled answers, the mean over its sets.

    All other metrics are computed from the tallies (`repro.evidence.derived`).
    """
    names = ["accuracy"] if "accuracy" in answers else sorted(answers.keys() - _GREEDY)
    means = [answers[name].estimates()["completion_tokens_mean"] for name in names]
    if len(means) > 1:
        value = fmean([one.value or 0.0 for one in means])
        method = f"plain mean over {len(means)} sets"
        means = [Estimate(value=value, unit="tokens", n=len(means), method=method)]
    return {"completion_tokens_mean": means[0]} if means else {}
