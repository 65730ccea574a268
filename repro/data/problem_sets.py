"""The problems that a run of a scale reads, and their digests, by which its record names them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from repro.data.load import load_problems
from repro.data.problem import Problem, Split, digest_of_problems
from repro.spec.config import DataConfig, TrainScale


def digested(scale: TrainScale) -> dict[str, tuple[DataConfig, Split]]:
    """Return the splits of which a record of a scale may have digests, by their names in it."""
    splits = get_args(Split) if scale.accuracy_over == "split" else ("train", "development")
    own = {f"{split}_problems": (scale.data, split) for split in splits}
    return own | {f"test_problems_{one.name}": (one.data, "test") for one in scale.test_sets}


@dataclass(frozen=True, kw_only=True)
class ProblemSets:
    """The problems of a scale.

    `train` and `development` are empty where nothing is trained, the latter also where training is
    not evaluated. `accuracy` is computed on `test`: the test split, or all `further` sets together,
    which are there by name. `rewarded` says whether a user's reward pays, which may read any
    column.
    """

    train: list[Problem]
    development: list[Problem]
    test: list[Problem]
    further: dict[str, list[Problem]]
    rewarded: bool = False

    @classmethod
    def of(cls, scale: TrainScale, *, trains: bool, rewarded: bool = False) -> ProblemSets:
        """Load a scale's problems; those of training only if `trains`, or for their prompts."""
        further = {item.name: load_problems(item.data, "test") for item in scale.test_sets}
        develops = trains and scale.evaluation.every > 0
        prompted = trains or scale.evaluation.prompts_of_steps
        test = [problem for problems in further.values() for problem in problems]
        return cls(
            train=load_problems(scale.data, "train") if prompted else [],
            development=load_problems(scale.data, "development") if develops else [],
            test=load_problems(scale.data, "test") if scale.accuracy_over == "split" else test,
            further=further,
            rewarded=rewarded,
        )

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of the test sets, by their names in a record."""
        further = {f"test_problems_{name}": problems for name, problems in self.further.items()}
        every = {"test_problems": self.test, **further}
        return {name: digest_of_problems(problems) for name, problems in every.items()}

    @cached_property
    def train_digest(self) -> str:
        """Digest of the training problems, with the columns that a user's reward may read."""
        return digest_of_problems(self.train, rows=self.rewarded)
