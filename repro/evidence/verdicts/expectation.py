"""Expectations: what a number should be, from whom that is known, and why.

Three ways in, each from a place of its own:

* `paper`: typed from the paper, with the place (`expected/paper/*.json`); read by
  `repro.evidence.paper`.
* `derived`: the suite's bars, typed with the formula or the reason (`expected/bars/<tier>.toml`);
  read here.
* `measured`: computed from the blessed records by `repro.evidence.verdicts.measured`, and stored
  nowhere.

The question that decides whether an expectation is worth having: would a wrong implementation fall
outside?
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from repro.spec.whole_files import stamp_of

Source = Literal["paper", "measured", "derived"]
Statistic = Literal["mean", "every_seed"]


class ExpectationError(ValueError):
    """An expectation that cannot be used; the message names the file and the field."""


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


_GROUP = {"because", "statistic", "device", "bars"}
_BAR = {"arm", "metric", "at_least", "at_most", "goal"}


def load_bars(
    expected: Path, tier: str, target: str, device: str | None = None
) -> list[Expectation]:
    """Return the bars of a target at a tier, in the order in which they are typed.

    Parameters
    ----------
    device
        Adds the bars that are stated for this kind of device alone.

    Raises
    ------
    ExpectationError
        If the file cannot be read, or a group or bar has a field missing or too many.
    """
    path = expected / "bars" / f"{tier}.toml"
    if not path.is_file():
        return []
    try:
        raw = _read_bars(path, stamp_of(path))
    except (OSError, ValueError) as error:
        raise ExpectationError(f"{path}: not readable: {error}") from error
    groups = raw.get(target, [])
    if not isinstance(groups, list):
        raise ExpectationError(f"{path}: {target} needs groups, each under [[{target}]]")
    return [
        bar
        for number, group in enumerate(groups, 1)
        if group.get("device") in (None, device)
        for bar in _group(group, f"{path}: {target}, group {number}")
    ]


# A page asks for the bars of every target in turn; the stamp tells when a file was changed.
@functools.lru_cache(maxsize=8)
def _read_bars(path: Path, stamp: str) -> Mapping[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _group(group: Mapping[str, Any], where: str) -> list[Expectation]:
    _require_fields(group, _GROUP, {"because", "bars"}, where)
    return [
        _bar(bar, group, f"{where}, bar {number}") for number, bar in enumerate(group["bars"], 1)
    ]


def _bar(bar: Mapping[str, Any], group: Mapping[str, Any], where: str) -> Expectation:
    _require_fields(bar, _BAR, {"arm", "metric"}, where)
    try:
        return Expectation(
            arm=bar["arm"],
            metric=bar["metric"],
            accept=(bar.get("at_least"), bar.get("at_most")),
            goal=bar.get("goal"),
            source="derived",
            because=group["because"],
            statistic=group.get("statistic", "mean"),
        )
    except ExpectationError as error:
        raise ExpectationError(f"{where}: {error}") from error


def _require_fields(
    table: Mapping[str, Any], known: set[str], needed: set[str], where: str
) -> None:
    missing, unknown = sorted(needed - table.keys()), sorted(table.keys() - known)
    if missing or unknown:
        raise ExpectationError(
            f"{where}: the fields are {sorted(table)}; needs {missing or 'none more'}, and does "
            f"not know {unknown or 'none'}"
        )
