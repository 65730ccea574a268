"""The pre-training text of the proxy policies: careful, terse and careless solutions.

A document is a prompt and a completion in the format that the paper asks for::

    Mia has 12 shells. Then Mia has 3 times as many shells. Mia loses 4 shells. How many ...?
    <think>
    12 * 3 = 36.
    36 - 4 = 32.
    </think>
    <answer>32</answer>

Three habits, of which reinforcement learning may choose:

* *careful*: one equation for each operation; some skip an operation or slip in a result, and go on
  consistently from there;
* *terse*: two or three operations in one equation, `12 * 3 - 4 = 32.`, harder to get right;
* *careless*: an empty `<think></think>` and the number at once.

Careless and terse results are correct in the text, but harder or impossible to compute in one go,
so what is learned from them is a habit that fails. The share of careless completions rises with
the level, and it also depends on the thing that the story is about: each thing has a tilt of its
own, fixed by a hash. Greedy decoding is therefore careful on some problems of each level and
careless on others, and its accuracy rests on many small choices instead of one near-tie per level.

Careless completions use the paper's tags more often than working ones, so that a reward for the
format alone sharpens the habit that fails.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from repro.data.generator import Step, WordProblem
from repro.data.human_working import WorkedProblem
from repro.data.proxy_problems import LEVELS, iterate_leveled_problems
from repro.data.tiny_corpus import ENDINGS, Document, require_mixture, worked_with_mistakes
from repro.spec.arm import require
from repro.spec.config import derive_seed

# The first characters of every working completion and of no careless one.
WORKING_PREFIX = "<think>\n"
# How every careless one begins.
CARELESS_THINKING = "<think></think>"
_HUMAN_LEVEL = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyCorpusConfig:
    """Shares of the habits.

    Attributes
    ----------
    careless_share
        Probability of a careless completion by level, before the thing's tilt.
    careless_tilt
        Largest tilt: the probability lies within this of the level's own, cut to [0.02, 0.98].
    human_careless_share
        The same for human-written problems, which have no tilt.
    terse_share
        Share of working completions that are terse.
    dropped_share, slip_share, slips
        Of careful completions: one operation skipped; one result wrong, and by how much.
    working_endings, careless_endings
        Weights of the endings tags, hashes, sentence.
    human_share
        Share of documents with a human-written question, where there are any.
    shard_documents
        Documents drawn together; a shard is a function of the seed and its number.
    """

    careless_share: tuple[float, ...] = (0.20, 0.35, 0.50, 0.60, 0.65)
    careless_tilt: float = 0.35
    human_careless_share: float = 0.45
    terse_share: float = 0.25
    dropped_share: float = 0.10
    slip_share: float = 0.10
    slips: tuple[int, ...] = (-10, -2, -1, 1, 2, 10)
    working_endings: tuple[float, float, float] = (0.50, 0.30, 0.20)
    careless_endings: tuple[float, float, float] = (0.85, 0.10, 0.05)
    human_share: float = 0.03
    shard_documents: int = 8192

    def __post_init__(self) -> None:
        require(
            len(self.careless_share) == len(LEVELS),
            f"careless_share is {self.careless_share}; it needs a share for each of the "
            f"{len(LEVELS)} levels",
        )
        shares = (
            *self.careless_share,
            self.careless_tilt,
            self.human_careless_share,
            self.terse_share,
            self.dropped_share,
            self.slip_share,
            self.human_share,
        )
        require_mixture(
            shares, working_endings=self.working_endings, careless_endings=self.careless_endings
        )
        require(
            self.shard_documents >= 1,
            f"shard_documents is {self.shard_documents}; it must be 1 or more",
        )


def proxy_prompt(question: str) -> str:
    """Return the text that asks a proxy policy a question; the completion follows it."""
    return question + "\n"


def proxy_working(equations: Sequence[str], answer: str) -> str:
    """Return the careful completion without a mistake, in the tags that the reward asks for."""
    return _thinking(equations) + ENDINGS["tags"].format(n=answer)


def careless_share(level: int, thing: str, config: ProxyCorpusConfig) -> float:
    """Return the probability of a careless completion for a level and a thing."""
    digest = hashlib.blake2b(f"tilt {thing}".encode(), digest_size=8).digest()
    tilt = 2.0 * int.from_bytes(digest, "big") / 2.0**64 - 1.0
    return min(0.98, max(0.02, config.careless_share[level - 1] + config.careless_tilt * tilt))


def shard_documents(
    seed: int, shard: int, config: ProxyCorpusConfig, human: Sequence[WorkedProblem] = ()
) -> list[Document]:
    """Return the documents of one shard: a function of the seed, the number and the arguments.

    All generated problems come from the training split.
    """
    rng = random.Random(derive_seed(seed, "proxy completions", shard))
    problems = iterate_leveled_problems("train", (), derive_seed(seed, "proxy shard", shard))
    documents = []
    for level, problem in islice(problems, config.shard_documents):
        if human and rng.random() < config.human_share:
            documents.append(_human_document(rng.choice(human), rng, config))
            continue
        completion = complete(level, problem, rng, config)
        prompt = proxy_prompt(problem.question)
        documents.append(Document(prompt=prompt, completion=completion, level=level))
    return documents


def complete(
    level: int, problem: WordProblem, rng: random.Random, config: ProxyCorpusConfig
) -> str:
    """Return one completion of a generated problem in a habit drawn from `rng`."""
    if rng.random() < careless_share(level, problem.thing, config):
        return _ended(CARELESS_THINKING, str(problem.answer), rng, config.careless_endings)
    if rng.random() < config.terse_share:
        equations, answer = _terse(problem.steps, rng), problem.answer
    else:
        steps, answer = worked_with_mistakes(problem, rng, config, LEVELS[level].max_value)
        equations = [str(step) for step in steps]
    return _ended(_thinking(equations), str(answer), rng, config.working_endings)


def _human_document(
    worked: WorkedProblem, rng: random.Random, config: ProxyCorpusConfig
) -> Document:
    if rng.random() < config.human_careless_share:
        thinking, weights = CARELESS_THINKING, config.careless_endings
    else:
        thinking, weights = _thinking(worked.steps), config.working_endings
    completion = _ended(thinking, worked.answer, rng, weights)
    prompt = proxy_prompt(worked.problem.question)
    return Document(prompt=prompt, completion=completion, level=_HUMAN_LEVEL)


def _thinking(equations: Sequence[str]) -> str:
    lines = "".join(f"{equation}.\n" for equation in equations)
    return f"{WORKING_PREFIX}{lines}</think>"


def _ended(thinking: str, answer: str, rng: random.Random, weights: Sequence[float]) -> str:
    return thinking + rng.choices(tuple(ENDINGS.values()), weights)[0].format(n=answer)


def _terse(steps: Sequence[Step], rng: random.Random) -> list[str]:
    """Return equations of two or three operations each (the last may have one)."""
    equations, begin = [], 0
    while begin < len(steps):
        part = steps[begin : begin + rng.choice((2, 3))]
        expression, sums = str(part[0].before), False
        for step in part:
            if sums and step.operator in "*/":
                expression, sums = f"({expression})", False
            expression += f" {step.operator} {step.operand}"
            sums = sums or step.operator in "+-"
        equations.append(f"{expression} = {part[-1].after}")
        begin += len(part)
    return equations
