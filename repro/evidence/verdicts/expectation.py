"""Expectations: the interval in which a number should be, its source and its reason.

There are two sources:

* `paper`: typed from the paper, with the place (`expected/paper/*.json`); read by
  `repro.evidence.paper`.
* `derived`: the suite's bars, typed with the formula or the reason (`expected/bars/<tier>.toml`);
  read here.

The question that decides whether an expectation is worth having: would a wrong implementation fall
outside?
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from repro.spec.whole_files import stamp_of

Source = Literal["paper", "derived"]
Statistic = Literal["mean", "every_seed"]
# Fields of a bar that are not an expectation's as they stand.
_BOUNDS = ("at_least", "at_most", "stated")


class ExpectationError(ValueError):
    """Expectations that cannot be read; the message names the file and the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """An interval in which a number should lie.

    `accept` is (low, high) in the metric's unit; None is unbounded. `goal` is a better value than
    that asks for, printed beside it; None where there is none. The statistic `mean` compares the
    mean's interval, `every_seed` each seed's value. `stated` says when a bar was first committed
    with these bounds; None for one older than the store.
    """

    arm: str
    metric: str
    accept: tuple[float | None, float | None]
    source: Source
    because: str
    statistic: Statistic = "mean"
    goal: float | None = None
    stated: datetime | None = None

    def __post_init__(self) -> None:
        low, high = self.accept
        bounds = [bound for bound in self.accept if bound is not None]
        if not bounds or bounds != sorted(bounds):
            raise ValueError(f"{self.arm} {self.metric}: accepts {low} to {high}; needs bounds")
        if self.stated is not None and self.stated.tzinfo is None:
            raise ValueError(f"{self.arm} {self.metric}: stated {self.stated}; needs an offset (Z)")

    def holds(self, value: float) -> bool:
        """Whether a value is in the accepted interval."""
        low, high = self.accept
        return (low is None or value >= low) and (high is None or value <= high)

    def late(self, started: Iterable[str]) -> str:
        """Return why it is younger than runs that started at these times; empty if it is not."""
        if self.stated is None:
            return ""
        first = min(map(datetime.fromisoformat, started), default=self.stated)
        if first >= self.stated:
            return ""
        at = "%Y-%m-%d %H:%M"
        when = f"{self.stated:{at}}, after the run began ({first:{at}})"
        return f"Post hoc: the bar was stated at {when}"

    def text(self) -> str:
        """Return the accepted interval as text."""
        low, high = self.accept
        if low is None:
            return f"at most {high:g}"
        if high is None:
            return f"at least {low:g}"
        return f"{low:.4g} to {high:.4g}"


def load_bars(
    expected: Path, tier: str, target: str, device: str | None = None
) -> list[Expectation]:
    """Return the bars of a target at a tier, in the order in which they are typed.

    `device` adds the bars that are stated for this kind of device alone.

    Raises `ExpectationError` if the file cannot be read, or a group or bar has a field missing or
    too many.
    """
    path = expected / "bars" / f"{tier}.toml"
    if not path.is_file():
        return []
    try:
        groups = _read_bars(path, stamp_of(path)).get(target, ())
        every = [_group(**group) for group in groups if group.get("device") in (None, device)]
    except (OSError, ValueError, TypeError) as error:
        raise ExpectationError(f"{path}: {target}: {error}") from error
    return [bar for group in every for bar in group]


# A page asks for the bars of every target in turn; the stamp tells when a file was changed.
@functools.lru_cache(maxsize=8)
def _read_bars(path: Path, stamp: str) -> Mapping[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _group(
    because: str,
    bars: Sequence[Mapping[str, Any]],
    statistic: Statistic = "mean",
    device: str | None = None,
    stated: datetime | None = None,
) -> list[Expectation]:
    own: dict[str, Any] = {"because": because, "statistic": statistic, "source": "derived"}
    return [
        Expectation(
            accept=(bar.get("at_least"), bar.get("at_most")),
            stated=bar.get("stated", stated),
            **own,
            **{name: value for name, value in bar.items() if name not in _BOUNDS},
        )
        for bar in bars
    ]
