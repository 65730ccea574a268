"""The learning rates that the proxy tier's sweep chose, read from the file that `choose` wrote.

The rule, fixed before any run of the sweep: for each format and way of training, the rate of the
grid with the best mean held-out accuracy at the last step on the development split, over the tuning
seeds and the arms that share the rate. Rates whose means lie within two of the evaluation's
standard errors of the best count as ties, and a tie goes to the smallest rate: chance must not set
formats at different rates. The error is the binomial one at the best mean p (a share): the square
root of p (1 - p) / n, where n is the development problems times the seeds, and arms, behind that
mean. Two, because both means err: of two rates equally good the larger is taken in 8 cases of 100;
with one error it would be in 24. Tuning seeds are not test seeds.

The ladder of exploration has a sweep and a rule of its own: one absolute rate for all of its arms,
the one with the highest training reward over the steps, and inside the grid. At the first rule's
ties all arms landed on the grid's smallest rate, a ninth of where training collapses; the paper
trains at a third. The ladder's `skill` has a third sweep, at that target's own scale: full
fine-tuning, and all arms with LoRA together, get the rate that ends most accurate, in the quantity
that the statement is about and on problems of the sweep's own, and inside the grid.

A choice belongs to the scale of its sweep, whose digest it carries. Where there is none for the
present scale, arms have the middle of the grid, and nothing but the sweep may be trained
(`repro.targets.rates.lacking_rates`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.spec.config import TrainScale, digest_of
from repro.spec.resolve import plain_values

CHOICE_FILE = Path(__file__).with_name("chosen_rates.json")
_SWEEP = "learning_rates"
SCHEMA = 2
TIE_ERRORS = 2.0
RULE = (
    "largest mean over tuning seeds and arms that share the rate; means within two of the "
    "evaluation's standard errors of it, sqrt(p (1 - p) / n) at the best mean p of n questions, "
    "are ties; of ties the smallest rate"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a sweep's records choose, fixed before they are there.

    Attributes
    ----------
    metric
        Higher is better; a run that failed counts as 0.
    one_for_all
        One rate for all arms with LoRA, under the key `EVERY_ARM`, instead of one per format.
    interior
        An optimum at an end of the grid is refused: the best rate may lie beyond.
    tie_errors
        Rates within so many binomial standard errors of the best are ties, and the smallest is
        taken; None where the metric is no share of questions, so that only equals are ties.
    words
        The rule as a choice prints it.
    """

    metric: str
    one_for_all: bool = False
    interior: bool = False
    tie_errors: float | None = None
    words: str


EVERY_ARM = "every_arm"
BY_ACCURACY = Rule(metric="heldout_last", tie_errors=TIE_ERRORS, words=RULE)
BY_REWARD = Rule(
    metric="train_reward_mean",
    one_for_all=True,
    interior=True,
    words="the one rate for all arms with the largest mean over arms and tuning seeds, which must "
    "not be the smallest or the largest of the grid; of equals the smallest",
)
BY_END = Rule(
    metric="accuracy",
    one_for_all=True,
    interior=True,
    words="the rate with the largest accuracy of sampled answers after the last step, mean over "
    "tuning seeds and, with LoRA, over arms, which all get it; it must not be the smallest or the "
    "largest of the grid; of equals the smallest",
)
_RULES = {"learning_rates_needle": BY_REWARD, "learning_rates_skill": BY_END}


def rule_of(sweep: str) -> Rule:
    """Return the rule of the sweep of that name."""
    return _RULES.get(sweep, BY_ACCURACY)


def choice_file(sweep: str) -> Path:
    """Return where the choice of the sweep of that name stands: beside the proxy tier's."""
    return CHOICE_FILE.with_stem(f"{CHOICE_FILE.stem}{sweep.removeprefix(_SWEEP)}")


def sweep_digest(sweep: TrainScale) -> str:
    """Return what ties a choice to the scale that its sweep ran at."""
    return digest_of(plain_values(sweep))


def read_choice(sweep: TrainScale, path: Path = CHOICE_FILE) -> dict[str, Any] | None:
    """Return the choice with the values behind it, or None where none was made at this scale.

    Raises
    ------
    ValueError
        If the file is of another schema.
    """
    if not path.is_file():
        return None
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if raw.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema is {raw.get('schema')!r}; this program reads {SCHEMA}")
    return raw if raw["sweep"] == sweep_digest(sweep) else None


def chosen_rates(sweep: TrainScale, path: Path = CHOICE_FILE) -> tuple[tuple[str, float], ...]:
    """Return (key, rate) as `LearningRates.chosen` takes it; empty where none was made."""
    choice = read_choice(sweep, path)
    return () if choice is None else tuple(sorted(choice["chosen"].items()))
