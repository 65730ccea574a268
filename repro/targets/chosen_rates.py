"""The learning rates that a tier's sweep chose, read from the file that `choose` wrote.

The rule, fixed before any run of a sweep: for each format and way of training, the rate of the grid
with the best mean held-out accuracy at the last step on the development split, over the tuning
seeds and the arms that share the rate. Rates whose means lie within two of the evaluation's
standard errors of the best count as ties, and a tie goes to the smallest rate: chance must not set
formats at different rates. The error is the binomial one at the best mean p (a share): the square
root of p (1 - p) / n, where n is the development problems times the seeds, and arms, behind that
mean. Two, because both means err: of two rates equally good the larger is taken in 8 cases of 100;
with one error it would be in 24. Tuning seeds are not test seeds.

A choice belongs to the scale of its sweep, whose digest it carries. Where there is none for the
present scale, arms have the middle of the grid.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from repro.spec.arm import Arm
from repro.spec.config import TrainScale, digest_of
from repro.spec.resolve import plain_values

# The grid of a sweep, as factors of an arm's rate.
FACTORS = {"low": 1 / 3, "middle": 1.0, "high": 3.0}
SCHEMA = 2
# Higher is better; a run that failed counts as 0.
METRIC = "heldout_last"
TIE_ERRORS = 2.0
RULE = (
    "largest mean over tuning seeds and arms that share the rate; means within two of the "
    "evaluation's standard errors of it, sqrt(p (1 - p) / n) at the best mean p of n questions, "
    "are ties; of ties the smallest rate"
)


def at_rate(arm: Arm, name: str) -> Arm:
    """Return an arm at one of the sweep's rates."""
    factor, label = FACTORS[name], f"{arm.label}, {name} rate"
    return dataclasses.replace(
        arm, name=f"{arm.name}_{name}", label=label, learning_rate_factor=factor
    )


def choice_file(sweep: str) -> Path:
    """Return where the choice of the sweep of that name stands, in the package."""
    return Path(__file__).with_name(f"chosen_rates{sweep.removeprefix('learning_rates')}.json")


def sweep_digest(sweep: TrainScale) -> str:
    """Return what ties a choice to the scale that its sweep ran at."""
    return digest_of(plain_values(sweep))


def read_choice(sweep: TrainScale, path: Path) -> dict[str, Any] | None:
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


def chosen_rates(sweep: TrainScale, path: Path) -> tuple[tuple[str, float], ...]:
    """Return (key, rate) as `LearningRates.chosen` takes it; empty where none was made."""
    choice = read_choice(sweep, path)
    return () if choice is None else tuple(sorted(choice["chosen"].items()))
