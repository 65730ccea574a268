"""The rules of judging as an analysis plan holds them: what they make of results that are made up.

A plan must fix the code that judges, and a digest of its source would change with every comment.
So a plan holds the outcomes of fixed cases: metrics formed of a made-up run, and verdicts on
made-up values, with their intervals in four digits. A rule that changes an outcome is seen as
another plan. A case that a plan does not have came with a rule that its claims do not use.

Nothing here was measured. Add cases; changing one makes verdicts on all earlier runs post hoc.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from repro.evidence.derived import derive
from repro.evidence.verdicts.claim_verdicts import judge
from repro.evidence.verdicts.verdict import Verdict
from repro.spec.claim import Claim, Dose, Effect, Metric, slope
from repro.spec.facts import Facts

# Values of eight seeds, in percent, and what each arm adds to them.
_SEEDS = (70.0, 71.0, 70.5, 72.5, 71.0, 69.0, 70.2, 71.7)
_ADDED = {
    "base": (0.0,) * 8,
    "same": (0.1, -0.2, 0.3, -0.1, 0.0, 0.2, -0.3, 0.1),
    "low": (0.4, 0.9, -0.2, 1.1, 0.3, 0.8, 0.1, 0.6),
    "high": (6.0, 7.0, 6.5, 7.5, 6.0, 5.5, 8.0, 6.6),
    "wild": (9.0, -8.0, 12.0, -6.0, 5.0, 3.0, -2.0, 7.0),
    "fallen": (-70.0, 0.6, 5.4, -10.0, 8.0, 4.0, 6.0, 3.0),
}
_METRICS = {
    "accuracy": Metric(name="accuracy", unit="percent", title="accuracy"),
    "entropy": Metric(name="entropy", unit="nats", title="entropy"),
    "gain_greedy": Metric(name="gain_greedy", unit="points", title="gain"),
}
_EIGHT = Effect(paper=8.0, measure="units")
_ONE = Effect(paper=2.0, smallest=1.0, measure="units")
_RATIO = Effect(paper=1.2, smallest=1.01, measure="ratio")


def _claim(name: str, *arms: str, **more: Any) -> Claim:
    """Return a claim on one arm, or on the first above the second."""
    stated: dict[str, Any] = {"contrast": dict(zip(arms, (1, -1, -1, 1), strict=False))}
    stated |= {"metric": "accuracy", "statement": "-", "source": "-"}
    return Claim(name=name, **(stated | more))


_ORDER = ("base", "low", "high")
_CLAIMS = (
    _claim("above", "high", "base", effect=_EIGHT),
    _claim("small", "low", "base", effect=_EIGHT),
    _claim("none", "same", "base", effect=_EIGHT),
    _claim("below", "base", "high", effect=_ONE),
    _claim("open", "wild", "base", effect=_ONE),
    _claim("of gain", "low", "base", effect=Effect(paper=0.2, measure="of gain")),
    _claim("of shortfall", "high", "base", effect=Effect(paper=0.2, measure="of shortfall")),
    _claim("of baseline", "low", "base", effect=Effect(paper=0.02, measure="of baseline")),
    _claim("headroom", "high", "base", effect=Effect(paper=40.0, measure="units"), headroom=True),
    _claim("one draw", "high", "base", effect=_EIGHT, draws=1),
    _claim("not worse", "same", "base", bound=-1.5, because="-"),
    _claim("within", "same", "base", side="within", bound=1.0, because="-"),
    _claim("quotient", "high", "base", log=True, bound=1.0, effect=_RATIO),
    _claim("interaction", "high", "low", "wild", "base", effect=_ONE),
    _claim("median", "fallen", "base", effect=_EIGHT, test="sign_flip"),
    _claim("order", contrast=slope(_ORDER), test="page", effect=_ONE),
    _claim("slope", contrast=dict.fromkeys(_ORDER, 0), effect=_ONE, dose=Dose("entropy", 0.1)),
    _claim(
        "slope given",
        contrast=dict.fromkeys((*_ORDER, "wild"), 0),
        effect=_ONE,
        dose=Dose("entropy", 0.1, ("gain_greedy",)),
    ),
    _claim("machinery", "low", mechanism=True),
    _claim("control", "low", mechanism=True, side="below", bound=15.0, because="-"),
)

_TWO = {"effect": _ONE, "secondary": ("iqm", "improvement")}
_DECLARED = (
    _claim("equivalent", "same", "base", test="tost", side="within", bound=1.0, because="-"),
    _claim("not equivalent", "low", "base", test="tost", side="within", bound=0.6, because="-"),
    _claim("too wide", "wild", "base", widest=2.0, effect=_ONE),
    _claim("unpaired", "fallen", "base", unpaired_below=0.3, **_TWO),
    _claim("paired", "high", "base", unpaired_below=0.3, **_TWO),
)

# Steps of a run that learns and then breaks down, and answers to 100 problems, two samples each.
_RIGHT = (0.1, 0.12, 0.15, 0.2, 0.3, 0.42, 0.4, 0.45, 0.5, 0.48, 0.52, *(0.15,) * 11)
_STEPS = len(_RIGHT)
_SERIES = {
    "accuracy_sampled": _RIGHT,
    "reward": _RIGHT,
    "tokens_sampled": tuple(1000.0 * step for step in range(1, _STEPS + 1)),
    "entropy": tuple(0.4 - 0.01 * step for step in range(_STEPS)),
    "entropy_finished": tuple(0.38 - 0.01 * step for step in range(_STEPS)),
    "completion_tokens": (200.0,) * _STEPS,
    "truncation_rate": (0.05,) * _STEPS,
    "evaluation_tokens": (0.0, 6000.0, 12000.0),
    "evaluation_accuracy": (12.0, 40.0, 46.0),
    "test_steps": (8, 15, 18),
    "test_accuracy": (30.0, 44.0, 47.0),
    "test_accuracy_greedy": (31.0, 45.0, 49.0),
}
_TALLY = {"right": [40, 25, 35], "right_lenient": [38, 26, 36], "format": [10, 20, 70]}
_TALLY |= {"working": [5, 15, 80], "truncated": [90, 8, 2]}
_GREEDY = {"right": [55, 45]}
_FACTS = Facts(
    answers={"accuracy": _TALLY, "accuracy_greedy": _GREEDY, "accuracy_greedy_start": _GREEDY}
    | {"accuracy_explored": _TALLY},
    explored={"entropy_sum": 250.0, "tokens": 1000},
    seconds={"rollout_seconds": 3.0, "update_seconds": 2.0},
)
_SCALE = {"steps": _STEPS, "evaluation": {"threshold": 40.0, "token_budget": 10_000}}


@functools.cache
def rules() -> dict[str, str]:
    """Return the outcome of each case by its name."""
    formed = derive("train", _SCALE, _SERIES, _FACTS)
    sent = ("base", "high", "same")
    absent = {arm: "not sent" for arm in _ADDED if arm not in sent}
    return (
        {f"metric {name}": f"{item.value:.4g}" for name, item in formed.items()}
        | _outcomes("all arms", judge(_CLAIMS, _METRICS, _values(8), {}, {}))
        | _outcomes("declared", judge(_DECLARED, _METRICS, _values(8), {}, {}))
        | _outcomes("three arms", judge(_CLAIMS, _METRICS, _values(8, sent), absent, {}))
        | _outcomes("a seed lost", judge(_CLAIMS, _METRICS, _values(7), {}, {"high": "failed"}))
        | _outcomes("four seeds", judge(_CLAIMS, _METRICS, _values(4), {}, {}))
        | _outcomes("repeats", judge(_CLAIMS, _METRICS, _values(3), {}, {}, timed=True))
    )


def _values(
    seeds: int, arms: Sequence[str] = tuple(_ADDED)
) -> dict[str, dict[str, dict[int, float]]]:
    """Return the values of so many seeds by metric, arm and seed."""

    def by_arm(value: Callable[[str, int], float]) -> dict[str, dict[int, float]]:
        return {arm: {seed: value(arm, seed) for seed in range(seeds)} for arm in arms}

    places = {arm: place for place, arm in enumerate(_ADDED)}
    return {
        "accuracy": by_arm(lambda arm, seed: _SEEDS[seed] + _ADDED[arm][seed]),
        "entropy": by_arm(lambda arm, seed: 0.3 + 0.05 * places[arm] + 0.01 * (seed % 3)),
        "gain_greedy": by_arm(lambda arm, seed: 10.0 + places[arm] ** 2 + 3 * seed % 5),
    }


def _outcomes(case: str, verdicts: Sequence[Verdict]) -> dict[str, str]:
    return {f"{case}: {verdict.name}": _outcome(verdict) for verdict in verdicts}


def _outcome(verdict: Verdict) -> str:
    numbers = (verdict.effect, verdict.low, verdict.high, verdict.p)
    return " ".join([verdict.status, *(f"{x:.4g}" for x in numbers if x is not None)])
