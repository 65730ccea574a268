"""The proxy policies' recipes: two sizes of one shape, the smaller with two lengths of training.

Sizes are multiples of 64, the largest block of the 4-bit formats, and heads are 64 wide. A recipe
fixes its steps and tokens, never its time: 2000 steps of about 64 thousand tokens are some 130
million tokens, four and a half for each parameter of the smaller policy, and took 363 s on one
H200: 61 of its teraFLOPS at six a parameter and token. The larger policy has 695 million of those a
token; at the same rate (larger products may raise it, which nobody has measured) its 450 steps take
336 s, so that all of it stays within 8 minutes. They are 29 million tokens, a quarter for each
parameter: how much it solves is not known before it has run.

After those 2000 steps the policy `30m` can solve nearly every problem when made to work, in any
format, so that all that is left to learn is a habit. `30m-early` stops before arithmetic is
mastered on the harder levels, and its corpus is careless more often: there is skill to gain, and
room for a format to do harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from repro.data.human_working import WorkedProblem, worked_problems
from repro.data.load import DATA_VARIABLE
from repro.data.problem import DataError, Problem, read_problems
from repro.data.proxy_corpus import ProxyCorpusConfig
from repro.procedures.pretrain_recipe import Recipe
from repro.spec.config import require

# Human-written problems, by folder: those trained on, and those that are only asked.
_TRAINED_ON = "mawps"
_ASKED = ("mawps", "svamp", "gsm8k")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRecipe(Recipe):
    """A proxy policy's shape, corpus and training.

    Attributes
    ----------
    tokens_per_batch
        Tokens of a step, about, the padding not counted.
    parts
        Passes that a step's tokens are cut into, each of one length of document: less padding,
        while every step sees every length.
    prompt_weight
        Weight of a prompt's tokens in the loss; a completion's have 1.
    corpus
        The documents.
    quality_samples
        Completions a problem at temperature 1 when the quality is measured.
    """

    hidden_size: int = 512
    layers: int = 9
    heads: int = 8
    key_value_heads: int = 2
    intermediate_size: int = 1536
    initializer_range: float = 0.02
    steps: int = 2000
    tokens_per_batch: int = 65_536
    parts: int = 4
    learning_rate: float = 1.5e-3
    warmup_steps: int = 100
    prompt_weight: float = 0.25
    quality_problems: int = 1000
    quality_samples: int = 4
    corpus: ProxyCorpusConfig = field(default_factory=ProxyCorpusConfig)

    def __post_init__(self) -> None:
        # The zero-argument form of super does not survive `slots=True`.
        Recipe.__post_init__(self)
        require(self.parts >= 1, f"parts is {self.parts}; it must be 1 or more")
        require(
            0 <= self.prompt_weight <= 1,
            f"prompt_weight is {self.prompt_weight}; it must lie in [0, 1]",
        )


_MORE_CARELESS = ProxyCorpusConfig(careless_share=(0.30, 0.45, 0.55, 0.62, 0.67))

RECIPES: dict[str, ProxyRecipe] = {
    "30m": ProxyRecipe(),
    "30m-early": ProxyRecipe(steps=750, corpus=_MORE_CARELESS),
    "120m": ProxyRecipe(
        hidden_size=1024,
        layers=10,
        heads=16,
        key_value_heads=4,
        intermediate_size=2816,
        steps=450,
        learning_rate=8e-4,
        corpus=_MORE_CARELESS,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanData:
    """Human-written problems from a named folder.

    Attributes
    ----------
    worked
        Training problems with worked steps.
    left_out
        Training problems whose equation gives no steps.
    asked
        Test problems by set, never trained on.
    """

    worked: tuple[WorkedProblem, ...] = ()
    left_out: int = 0
    asked: dict[str, list[Problem]] = field(default_factory=dict)


def read_human_data(folder: str | None) -> HumanData:
    """Read `mawps/train.jsonl`, and what there is of `{mawps,svamp,gsm8k}/test.jsonl`.

    Parameters
    ----------
    folder
        The folder that holds them.

    Raises
    ------
    DataError
        When no folder is named, it has no MAWPS training problems, or a file is broken.
    """
    if not folder:
        raise DataError(
            f"human-written problems are asked for and no folder is named: give --human-data, or "
            f"set {DATA_VARIABLE}"
        )
    root = Path(folder).expanduser()
    train = root / _TRAINED_ON / "train.jsonl"
    if not train.is_file():
        raise DataError(f"{train} is missing; --human-data needs a folder that holds it")
    problems = read_problems(train)
    worked = worked_problems(problems)
    asked = {
        name: read_problems(root / name / "test.jsonl")
        for name in _ASKED
        if (root / name / "test.jsonl").is_file()
    }
    return HumanData(worked=tuple(worked), left_out=len(problems) - len(worked), asked=asked)
