"""Evaluation of training runs as their scale says: of one run, or of many at once.

All arms, trained or not, are evaluated on the same problems: by sampling as in the paper, and
greedily. An untrained arm is also evaluated greedily with the working forced: the upper limit of
what training can reach by changing only the *style* of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from repro.data.problem import Problem, columns_of
from repro.data.prompts import template_named
from repro.evaluate.asking import Asker, Evaluator
from repro.evaluate.grades import Answers
from repro.evaluate.questions import questions
from repro.evidence.record import Estimate
from repro.reward.custom import load_reward
from repro.reward.grader import GraderPool
from repro.reward.score import Rewards, score
from repro.rl.collect import GradingRequest
from repro.spec.config import RunConfig, SamplingConfig, TrainScale

Alive = Sequence[bool] | None
# Answers that are greedy, whatever the scale's evaluation says, on the questions of all sets.
_GREEDY = ("accuracy_greedy", "accuracy_forced_working")


class ScaleEvaluator:
    """Evaluates the runs of one scale."""

    def __init__(
        self,
        runs: Sequence[RunConfig],
        asker: Asker,
        tokenizer: PreTrainedTokenizerBase | None,
        pool: GraderPool,
    ) -> None:
        self.runs = runs
        self.scale: TrainScale = runs[0].scale
        if tokenizer is None:
            checkpoint = self.scale.checkpoint
            raise ValueError(f"{checkpoint} has no tokenizer; asking questions needs one")
        own = [run.arm.reward_function for run in runs]
        self.own_rewards = [None if named is None else load_reward(named) for named in own]
        reads = template_named(self.scale.prompt_template).reads
        seeds = [run.seed for run in runs]
        self.evaluator = Evaluator(asker, tokenizer, pool, seeds, reads=reads)

    def grades(self, number: int = 0) -> dict[str, int]:
        """Return the number of a run's grades by status."""
        return dict(self.evaluator.grades[number])

    def greedy(
        self, problems: Sequence[Problem], alive: Alive = None, *, opening: str = ""
    ) -> list[Answers | None]:
        """Return each live run's greedy answers to the problems."""
        limit = self.scale.evaluation.sampling.max_new_tokens
        sampling = SamplingConfig(temperature=0.0, max_new_tokens=limit)
        return self._ask(
            problems,
            alive,
            sampling,
            samples=1,
            opening=opening,
            max_prompt_tokens=self._longest_of_test,
        )

    def sampled(
        self, problems: Sequence[Problem], alive: Alive = None, *, max_prompt_tokens: int = 0
    ) -> list[Answers | None]:
        """Return each live run's sampled answers; 0 takes the scale's own length limit."""
        evaluation = self.scale.evaluation
        return self._ask(
            problems,
            alive,
            evaluation.sampling,
            samples=evaluation.samples,
            max_prompt_tokens=max_prompt_tokens,
        )

    def final(
        self,
        test: Sequence[Problem],
        further: Mapping[str, Sequence[Problem]],
        alive: Alive = None,
    ) -> dict[str, list[Answers | None]]:
        """Evaluate the policies at the end of a run; return the answers by metric.

        Parameters
        ----------
        further
            Further test sets, by name. If accuracy is over these, `test` has all their problems,
            and is only evaluated greedily.
        """
        answers = {}
        if self.scale.accuracy_over == "split":
            answers["accuracy"] = self.sampled(test, alive)
        answers["accuracy_greedy"] = self.greedy(test, alive)
        limits = {item.name: item.max_prompt_tokens for item in self.scale.test_sets}
        for name, problems in further.items():
            answers[f"accuracy_{name}"] = self.sampled(
                problems, alive, max_prompt_tokens=limits.get(name, 0)
            )
        prefix = template_named(self.scale.prompt_template).working_prefix
        if prefix is not None and self.runs[0].arm.training == "none":
            # The ceiling belongs to the policy as it starts. Only of policies pre-trained here is
            # the way of working known well enough to be forced.
            answers["accuracy_forced_working"] = self.greedy(test, alive, opening=prefix)
        return answers

    def score(self, asked: Sequence[GradingRequest | None]) -> list[Rewards | None]:
        """Return the rewards of each run's completions, by the reward of its arm."""
        evaluator, pool = self.evaluator, self.evaluator.pool
        evaluator.learn([pair for one in asked if one for pair in zip(one[1], one[0], strict=True)])
        rewards: list[Rewards | None] = []
        for number, one in enumerate(asked):
            if one is None:
                rewards.append(None)
                continue
            before = pool.counters.copy()
            kind = self.runs[number].arm.reward
            paid, own = self.scale.format_reward, self.own_rewards[number]
            texts, golds, seeds, cut, problems = one
            columns = None if own is None else columns_of(problems)
            reads = evaluator.reads
            rewards.append(score(texts, golds, kind, paid, pool, seeds, own, columns, reads, cut))
            evaluator.count(number, before)
        return rewards

    def _ask(
        self,
        problems: Sequence[Problem],
        alive: Alive,
        sampling: SamplingConfig,
        *,
        samples: int,
        opening: str = "",
        max_prompt_tokens: int = 0,
    ) -> list[Answers | None]:
        asked = questions(
            problems,
            self.scale.prompt_template,
            self.evaluator.tokenizer,
            max_prompt_tokens=max_prompt_tokens or self.scale.max_prompt_tokens,
            opening=opening,
        )
        return self.evaluator.ask(asked, sampling, samples=samples, alive=alive)

    @property
    def _longest_of_test(self) -> int:
        """Longest prompt of the problems behind `accuracy`; 0 takes the scale's own limit."""
        # Where accuracy is over several sets, these are asked together.
        return self.scale.longest_prompt if self.scale.accuracy_over == "sets" else 0


def final_tallies(
    answers: Mapping[str, Sequence[Answers | None]], number: int = 0
) -> dict[str, dict[str, Any]]:
    """Return the tallies of one run's final answers; see `Answers.tallies`."""
    own = {name: of_runs[number] for name, of_runs in answers.items()}
    return {
        name: own_answers.tallies() for name, own_answers in own.items() if own_answers is not None
    }


def mean_tokens(
    answers: Mapping[str, Sequence[Answers | None]], number: int = 0
) -> dict[str, Estimate]:
    """Return `completion_tokens_mean` of one run's final sampled answers, the mean over its sets.

    All other metrics are computed from the tallies (`repro.evidence.derived`).
    """
    names = ["accuracy"] if "accuracy" in answers else sorted(answers.keys() - _GREEDY)
    asked = [own for name in names if (own := answers[name][number]) is not None]
    means = [own.estimates()["completion_tokens_mean"] for own in asked]
    if len(means) > 1:
        value = fmean([one.value or 0.0 for one in means])
        method = f"plain mean over {len(means)} sets"
        means = [Estimate(value=value, unit="tokens", n=len(means), method=method)]
    return {"completion_tokens_mean": means[0]} if means else {}
