"""A deterministic generator of multi-step word problems with difficulty levels and solutions.

A problem tells how many things somebody has, then changes that number `level` times, and asks for
the number in the end::

    Tom has 14 apples. Tom buys 5 more apples. Then Tom has 2 times as many apples.
    How many apples does Tom have now?                                    (level 2, answer 38)

Sentences about other people and other things are mixed in and change nothing. Every intermediate
value stays within the bounds of the configuration, so digits, not magnitudes, are what is learned.

A problem belongs to a split by a hash of its question's text, never by the seed that drew it: two
seeds may draw the same question, and both draws then fall on the same side. It is a function of
(configuration, split, level, seed, index), so asking for more problems keeps the first ones.
Distractors lengthen some short problems, so that the number of sentences does not tell the level.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from repro.data.problem import Problem, Split
from repro.spec.checks import require
from repro.spec.config import derive_seed

Operator = Literal["+", "-", "*"]

# Draws without a new question of the wanted split after which the space counts as exhausted.
_DRAWS_PER_PROBLEM = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation of a worked solution: `before operator operand = after`."""

    operator: Operator
    before: int
    operand: int
    after: int

    @classmethod
    def taken(cls, operator: Operator, before: int, operand: int, slip: int = 0) -> Step:
        """Return an operation on `before`, its result off by `slip`."""
        result = {"+": before + operand, "-": before - operand, "*": before * operand}[operator]
        return cls(operator=operator, before=before, operand=operand, after=result + slip)

    def __str__(self) -> str:
        return f"{self.before} {self.operator} {self.operand} = {self.after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblem:
    """A generated question with its steps, the first of which changes `start`."""

    question: str
    start: int
    steps: tuple[Step, ...]

    @property
    def level(self) -> int:
        """Number of operations."""
        return len(self.steps)

    @property
    def answer(self) -> int:
        """The number after the last step."""
        return self.steps[-1].after


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig:
    """What the problems look like.

    Attributes
    ----------
    max_value
        Every number that the story reaches lies in [1, max_value].
    max_start, max_operand
        The first number lies in [2, max_start]; what is added or taken in [2, max_operand].
    factors, multiply_share
        Multipliers, and the share of operations that multiply where the bound allows it.
    distractor_share
        Probability of a sentence without effect before each operation.
    names, things
        Who has what. A distractor takes another name or another thing.
    starts, additions, subtractions, multiplications, distractors, questions
        Sentence templates over {name}, {other}, {thing}, {stray}, {n}.
    development_percent, test_percent
        Shares of the hash space of questions that these splits take; the rest is `train`.
    """

    levels: tuple[int, ...] = (1, 2, 3, 4, 5)
    max_value: int = 99
    max_start: int = 40
    max_operand: int = 24
    factors: tuple[int, ...] = (2, 3)
    multiply_share: float = 0.15
    distractor_share: float = 0.15
    names: tuple[str, ...] = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ivy")
    things: tuple[str, ...] = ("apples", "books", "cards", "coins", "eggs", "pens", "shells")
    starts: tuple[str, ...] = (
        "{name} has {n} {thing}.",
        "{name} starts with {n} {thing}.",
        "At first {name} owns {n} {thing}.",
    )
    additions: tuple[str, ...] = (
        "{name} buys {n} more {thing}.",
        "{name} finds {n} {thing}.",
        "{name} gets {n} {thing} from {other}.",
        "Then {other} gives {n} {thing} to {name}.",
    )
    subtractions: tuple[str, ...] = (
        "{name} loses {n} {thing}.",
        "{name} sells {n} {thing}.",
        "{name} gives {n} {thing} to {other}.",
        "Then {other} takes {n} {thing} from {name}.",
    )
    multiplications: tuple[str, ...] = (
        "Then {name} has {n} times as many {thing}.",
        "The number of {thing} becomes {n} times as large.",
    )
    distractors: tuple[str, ...] = (
        "{other} has {n} {stray}.",
        "{name} also has {n} {stray}.",
        "{other} buys {n} {stray}.",
    )
    questions: tuple[str, ...] = (
        "How many {thing} does {name} have now?",
        "How many {thing} does {name} have in the end?",
    )
    development_percent: int = 5
    test_percent: int = 10


DEFAULT_GENERATOR = GeneratorConfig()


def split_of(question: str) -> Split:
    """Return the split that a question's text belongs to, the same for every seed and machine."""
    bucket = int(_digest(question), 16) % 100
    if bucket < DEFAULT_GENERATOR.test_percent:
        return "test"
    if bucket < DEFAULT_GENERATOR.test_percent + DEFAULT_GENERATOR.development_percent:
        return "development"
    return "train"


def _draw_step(value: int, rng: random.Random, config: GeneratorConfig) -> Step:
    """Draw an operation on `value` whose result stays within the bounds."""
    factors = [factor for factor in config.factors if value * factor <= config.max_value]
    if factors and rng.random() < config.multiply_share:
        return Step.taken("*", value, rng.choice(factors))
    most_added = min(config.max_operand, config.max_value - value)
    most_taken = min(config.max_operand, value - 1)
    adds = rng.random() < 0.5 if min(most_added, most_taken) >= 2 else most_added >= 2
    operand = rng.randint(2, most_added if adds else most_taken)
    return Step.taken("+" if adds else "-", value, operand)


def draw_word_problem(level: int, rng: random.Random) -> WordProblem:
    """Draw one problem of `level` operations from `rng`, whatever its split."""
    config = DEFAULT_GENERATOR
    name, other = rng.sample(config.names, 2)
    thing, stray = rng.sample(config.things, 2)

    def sentence(templates: Sequence[str], n: int = 0) -> str:
        return rng.choice(templates).format(name=name, other=other, thing=thing, stray=stray, n=n)

    start = value = rng.randint(2, config.max_start)
    told: dict[Operator, tuple[str, ...]] = {
        "+": config.additions,
        "-": config.subtractions,
        "*": config.multiplications,
    }
    sentences = [sentence(config.starts, start)]
    steps: list[Step] = []
    for _ in range(level):
        if rng.random() < config.distractor_share:
            sentences.append(sentence(config.distractors, rng.randint(2, config.max_start)))
        step = _draw_step(value, rng, config)
        sentences.append(sentence(told[step.operator], step.operand))
        steps.append(step)
        value = step.after
    sentences.append(sentence(config.questions))
    question = " ".join(sentences)
    return WordProblem(question=question, start=start, steps=tuple(steps))


def iterate_word_problems(split: Split, levels: Sequence[int], seed: int) -> Iterator[WordProblem]:
    """Yield problems of `split`, no question twice; `ValueError` where there are no more."""
    known = DEFAULT_GENERATOR.levels
    chosen_levels = tuple(levels) or known
    unknown = sorted(set(chosen_levels) - set(known))
    require(not unknown, f"level {unknown} is asked for; the generator has {known}")
    rng = random.Random(derive_seed(seed, "problems", split, *chosen_levels))
    seen: set[str] = set()
    for level in itertools.cycle(chosen_levels):
        for _ in range(_DRAWS_PER_PROBLEM):
            problem = draw_word_problem(level, rng)
            key = _digest(problem.question)
            if key not in seen and split_of(problem.question) == split:
                break
        else:
            raise ValueError(
                f"no new {split} question of level {level} in {_DRAWS_PER_PROBLEM} draws after "
                f"{len(seen)} problems; ask for fewer"
            )
        seen.add(key)
        yield problem


def _digest(question: str) -> str:
    return hashlib.blake2b(question.encode(), digest_size=8).hexdigest()


def generate_problems(
    split: Split, count: int, levels: Sequence[int] = (), seed: int = 2025
) -> list[Problem]:
    """Return `count` problems of a split, levels in turn.

    Splits are disjoint sets of questions for every seed, and the first of a longer list are the
    same. Levels are numbers of operations; empty takes all of the configuration. Raises
    `ValueError` when a level is unknown or the configuration has too few questions.
    """
    drawn = iterate_word_problems(split, levels, seed)
    return [
        Problem(
            id=f"generated-{_digest(word.question)}",
            question=word.question,
            answer=str(word.answer),
            solution="\n".join([*map(str, word.steps), f"#### {word.answer}"]),
            source="generated",
            level=word.level,
        )
        for word in itertools.islice(drawn, count)
    ]
