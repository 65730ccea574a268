"""What training runs are asked and graded on, as their scale says: one run, or many side by side.

Every arm, trained or not, is asked the same: sampled as the paper evaluates, greedily, and, an
untrained arm, greedily with the working forced, which is the ceiling of what training the policy's
*habits* can reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from repro.data.problem import Problem
from repro.data.prompts import template_named
from repro.ensemble.collecting import Asked
from repro.evaluate.asking import Asker, Evaluator
from repro.evaluate.grades import Answers
from repro.evaluate.questions import questions
from repro.evidence.record import Estimate
from repro.reward.grader import GraderPool
from repro.reward.score import Rewards, score
from repro.spec.config import RunConfig, SamplingConfig, TrainScale

Alive = Sequence[bool] | None


class Board:
    """Asks and grades runs of one scale.

    Parameters
    ----------
    asker
        Of the runs, in their order.
    tokenizer
        Of the policies; None raises `ValueError`.
    """

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
        self.evaluator = Evaluator(asker, tokenizer, pool, [run.seed for run in runs])

    def grades(self, number: int = 0) -> dict[str, int]:
        """Return how many grades of each status a run was given."""
        return dict(self.evaluator.grades[number])

    def greedy(
        self, problems: Sequence[Problem], alive: Alive = None, *, opening: str = ""
    ) -> list[Answers | None]:
        """Ask each live run once per problem, greedily."""
        limit = self.scale.evaluation.sampling.max_new_tokens
        sampling = SamplingConfig(temperature=0.0, max_new_tokens=limit)
        return self._ask(problems, alive, sampling, samples=1, opening=opening)

    def sampled(self, problems: Sequence[Problem], alive: Alive = None) -> list[Answers | None]:
        """Ask each live run as the scale's evaluation says."""
        evaluation = self.scale.evaluation
        return self._ask(problems, alive, evaluation.sampling, samples=evaluation.samples)

    def final(
        self,
        test: Sequence[Problem],
        further: Mapping[str, Sequence[Problem]],
        alive: Alive = None,
    ) -> dict[str, list[Answers | None]]:
        """Ask the policies as they are at the end of a run; return the answers by metric.

        Parameters
        ----------
        further
            Further test sets, by name.
        """
        answers = {
            "accuracy": self.sampled(test, alive),
            "accuracy_greedy": self.greedy(test, alive),
        }
        for name, problems in further.items():
            answers[f"accuracy_{name}"] = self.sampled(problems, alive)
        prefix = template_named(self.scale.prompt_template).working_prefix
        if prefix is not None and self.runs[0].arm.training == "none":
            # The ceiling belongs to the policy as it starts. Only of policies pre-trained here is
            # the way of working known well enough to be forced.
            answers["accuracy_forced_working"] = self.greedy(test, alive, opening=prefix)
        return answers

    def score(self, asked: Sequence[Asked | None]) -> list[Rewards | None]:
        """Return the rewards of each run's completions, by its own arm's reward."""
        evaluator, pool = self.evaluator, self.evaluator.pool
        evaluator.learn([pair for one in asked if one for pair in zip(one[1], one[0], strict=True)])
        rewards: list[Rewards | None] = []
        for number, one in enumerate(asked):
            if one is None:
                rewards.append(None)
                continue
            before = pool.counters.copy()
            kind = self.runs[number].arm.reward
            rewards.append(score(one[0], one[1], kind, self.scale.format_reward, pool, one[2]))
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
    ) -> list[Answers | None]:
        asked = questions(
            problems,
            self.scale.prompt_template,
            self.evaluator.tokenizer,
            max_prompt_tokens=self.scale.max_prompt_tokens,
            opening=opening,
        )
        return self.evaluator.ask(asked, sampling, samples=samples, alive=alive)


def final_metrics(
    answers: Mapping[str, Sequence[Answers | None]], number: int = 0
) -> dict[str, Estimate]:
    """Return the metrics of one run's final answers, as `Board.final` names them."""
    metrics: dict[str, Estimate] = {}
    for name, of_runs in answers.items():
        own = of_runs[number]
        if own is None:
            continue
        estimates = own.estimates()
        metrics |= estimates if name == "accuracy" else {name: estimates["accuracy"]}
    return metrics
