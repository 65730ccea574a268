"""The pre-training text of the tiny policy: a mixture of careful and careless solutions.

A document is a prompt and a completion in the format that the paper asks for::

    Tom has 14 apples. Tom buys 5 more apples. How many apples does Tom have now?
    <think>First 14 + 5 = 19</think>
    <answer>19</answer>

*Careful* completions work step by step; *careless* ones leave the thinking empty and state the
number at once. The careless numbers are correct in the text, but a model this small cannot compute
them in one go: what it learns from them is a habit that fails. Three endings occur: the tags of the
paper, `#### N` and `The answer is N`. A policy pre-trained on this can solve the problems and often
does not; what reinforcement learning sharpens is a choice of style, not arithmetic.

Three shares make the controls meaningful:

* The longer the problem, the more often it is answered carelessly. This puts the change of habit
  in the middle of the difficulty range, which is what keeps greedy accuracy near one half.
* Careless completions use the paper's tags more often than careful ones. A reward for the format
  alone therefore sharpens the careless habit, and must not raise accuracy.
* Some careful completions skip an operation or slip by a little, and go on consistently from there.
  Sampling at temperature 1 then fails where the greedy choice does not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from repro.data.generator import (
    DEFAULT_GENERATOR,
    GeneratorConfig,
    Step,
    WordProblem,
    iterate_word_problems,
)
from repro.spec.config import derive_seed

# The first characters of every careful completion and of no careless one: forced upon a policy, it
# gives its ceiling.
WORKING_PREFIX = "<think>First "
EMPTY_THINKING = "<think></think>"
STEP_JOINT = ", then "
ENDINGS: dict[str, str] = {
    "tags": "\n<answer>{n}</answer>",
    "hashes": "\n#### {n}",
    "sentence": "\nThe answer is {n}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusConfig:
    """Shares of the habits in the pre-training text.

    `careless_share` is the probability of a careless completion by level, from level 1 upward;
    longer problems take the last one. Endings have weights: tags, hashes, sentence. `dropped_share`
    and `slip_share` are the probabilities that a careful completion of two or more steps skips one,
    and that one contains a wrong result, off by one of `slips`.
    """

    careless_share: tuple[float, ...] = (0.10, 0.30, 0.50, 0.60, 0.65)
    careful_endings: tuple[float, float, float] = (0.50, 0.30, 0.20)
    careless_endings: tuple[float, float, float] = (0.85, 0.10, 0.05)
    dropped_share: float = 0.15
    slip_share: float = 0.15
    slips: tuple[int, ...] = (-10, -2, -1, 1, 2, 10)
    generator: GeneratorConfig = field(default=DEFAULT_GENERATOR)


def tiny_prompt(question: str) -> str:
    """Return the text that asks the tiny policy a question; the completion follows it."""
    return question + "\n"


def worked_with_mistakes(
    problem: WordProblem, rng: random.Random, config: CorpusConfig
) -> tuple[Sequence[Step], int]:
    """Return a careful completion's steps, none beyond the generator's values, and their result."""
    steps = list(problem.steps)
    if len(steps) > 1 and rng.random() < config.dropped_share:
        del steps[rng.randrange(len(steps))]
    slip_at = rng.randrange(len(steps)) if rng.random() < config.slip_share else None
    slip = rng.choice(config.slips)
    value, worked = problem.start, []
    for index, step in enumerate(steps):
        off = slip if index == slip_at else 0
        worked.append(Step.taken(step.operator, value, step.operand, off))
        value = worked[-1].after
    # A mistake that leaves the range of the story would be told apart by its size; take it back.
    if any(not 1 <= step.after <= config.generator.max_value for step in worked):
        return problem.steps, problem.answer
    return worked, value


def complete(problem: WordProblem, rng: random.Random, config: CorpusConfig) -> str:
    """Return one completion of a problem in a habit drawn from `rng`."""
    last = len(config.careless_share) - 1
    if rng.random() < config.careless_share[min(problem.level - 1, last)]:
        thinking, answer, weights = EMPTY_THINKING, problem.answer, config.careless_endings
    else:
        steps, answer = worked_with_mistakes(problem, rng, config)
        thinking = WORKING_PREFIX + STEP_JOINT.join(map(str, steps)) + "</think>"
        weights = config.careful_endings
    return thinking + rng.choices(tuple(ENDINGS.values()), weights)[0].format(n=answer)


def iterate_documents(seed: int, config: CorpusConfig) -> Iterator[tuple[str, str]]:
    """Yield documents, a prompt and its completion, without end, all of the training split."""
    rng = random.Random(derive_seed(seed, "completions"))
    for problem in iterate_word_problems("train", (), seed):
        yield tiny_prompt(problem.question), complete(problem, rng, config)
