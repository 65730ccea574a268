"""Expectations: what a number should be, from whom that is known, and why.

Three ways in, each visible in the file it stands in:

* `paper`: typed from the paper, with the place (`expected/paper/*.json`); read by
  `repro.evidence.paper`.
* `derived`: typed here with the formula or the reason (`expected/<tier>/<target>.derived.json`).
* `measured`: written by `bless` from this suite's own records (`expected/<tier>/[<device>/]
  <target>.json`), with raw values a seed, device, commit and date.

The question that decides whether an expectation is worth having: would a wrong implementation fall
outside?
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

Source = Literal["paper", "measured", "derived"]
Statistic = Literal["mean", "every_seed"]

SCHEMA = 1


class ExpectationError(ValueError):
    """An expectation file that cannot be read; the message names the file and the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """An interval in which a number should lie.

    Attributes
    ----------
    arm, metric
        What is expected of.
    accept
        (low, high) in the metric's unit; None is unbounded.
    goal
        A better value than `accept` asks for, printed beside it; None where there is none.
    statistic
        `mean` compares the mean's interval; `every_seed` compares each seed's value.
    source
        `paper`, `measured` or `derived`.
    because
        The reason, the formula, or where the paper says so.
    values
        Measured ones: the raw value of each seed.
    """

    arm: str
    metric: str
    accept: tuple[float | None, float | None]
    source: Source
    because: str
    statistic: Statistic = "mean"
    goal: float | None = None
    values: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"expectation of {self.arm} {self.metric}"
        low, high = self.accept
        if low is None and high is None:
            raise ExpectationError(f"{where}: accepts everything; it needs a bound")
        if low is not None and high is not None and low > high:
            raise ExpectationError(f"{where}: accepts from {low} to {high}, which is nothing")
        if self.source not in get_args(Source) or self.statistic not in get_args(Statistic):
            raise ExpectationError(f"{where}: source {self.source}, statistic {self.statistic}")
        if not self.because:
            raise ExpectationError(f"{where}: it has no reason; fill `because`")

    def holds(self, value: float) -> bool:
        """Whether a single value lies in the accepted interval."""
        low, high = self.accept
        return (low is None or value >= low) and (high is None or value <= high)

    def text(self) -> str:
        """Return the accepted interval in words."""
        low, high = self.accept
        if low is None:
            return f"at most {high:g}"
        if high is None:
            return f"at least {low:g}"
        return f"{low:.4g} to {high:.4g}"


def load_expectations(
    expected: Path, tier: str, target: str, device: str | None = None
) -> list[Expectation]:
    """Return the derived and measured expectations of a target at a tier; the paper's are apart.

    Raises
    ------
    ExpectationError
        If a file cannot be read.
    """
    folder = expected / tier
    places = [folder, *([folder / device] if device else [])]
    names = [f"{target}.derived.json"]
    if tier != "paper":
        # `expected/paper/<name>.json` holds the paper's own numbers; nothing is blessed there.
        names.append(f"{target}.json")
    found = []
    for place in places:
        for name in names:
            if (place / name).is_file():
                found += read_expectations(place / name, target)
    return found


def read_expectations(path: Path, target: str) -> list[Expectation]:
    """Return the expectations of one file.

    Raises
    ------
    ExpectationError
        If the file is not what it should be; the message names file and field.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ExpectationError(f"{path}: not readable: {error}") from error
    if raw.get("schema") != SCHEMA:
        raise ExpectationError(f"{path}: schema is {raw.get('schema')!r}; needs {SCHEMA}")
    if raw.get("target") != target:
        raise ExpectationError(f"{path}: it is of target {raw.get('target')!r}, not {target}")
    wanted = "derived" if path.name.endswith(".derived.json") else "measured"
    found = []
    for index, item in enumerate(raw.get("expectations", [])):
        found.append(_parse(item, f"{path}: expectations[{index}]"))
        if found[-1].source != wanted:
            raise ExpectationError(
                f"{path}: expectations[{index}] has source {found[-1].source}; this file holds "
                f"{wanted} ones"
            )
    return found


def _parse(item: Any, where: str) -> Expectation:
    if not isinstance(item, dict):
        raise ExpectationError(f"{where}: needs an object; found {item!r}")
    accept = item.get("accept")
    if not isinstance(accept, list) or len(accept) != 2:
        raise ExpectationError(f"{where}: accept is {accept!r}; needs [low, high]")
    try:
        return Expectation(**{**item, "accept": tuple(accept)})
    except TypeError as error:
        raise ExpectationError(f"{where}: {error}") from error
