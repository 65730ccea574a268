"""Verdicts: from values per seed and a claim (or an expectation) to one of four words.

`reproduced`: the interval lies inside what was claimed. `contradicted`: wholly outside.
`inconclusive`: overlapping, or fewer than five paired seeds (three repeats); with the effect that
as many could have shown. `not run`: with the reason. Silence is never success, and a claim of the
paper's that does not hold is a finding.

Rules: differences are paired by seed; 95 % t intervals; the claims of one target form a family with
Holm's correction (those about the machinery a family of their own); an order of arms is tested as a
trend first. A seed that failed takes `reproduced` away: its value is unknown, and it may be the
arm's fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from repro.evidence import statistics as st
from repro.evidence.expectation import Expectation
from repro.spec.target import Claim, Metric

Status = Literal["reproduced", "contradicted", "inconclusive", "not run"]
Values = Mapping[str, Mapping[int, float]]

MINIMUM_SEEDS = 5
# Timed repeats: of two, a 95 % interval is 9 deviations to either side; of three, 2.5.
MINIMUM_REPEATS = 3
_MINIMUM = {"seed": MINIMUM_SEEDS, "prompt": MINIMUM_SEEDS, "repeat": MINIMUM_REPEATS}
ALPHA = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one claim or expectation.

    Attributes
    ----------
    about
        `claim` (of the paper), `mechanism` (of this suite's machinery), `expectation` (derived or
        blessed) or `paper value`.
    effect, low, high, unit
        Estimate with its 95 % interval, not corrected for multiplicity; None where there is none.
    n
        Paired seeds behind it.
    p
        Two-sided p against the claim's bound, Holm's correction included once `judge` returned.
    detectable
        Smallest effect that n seeds would have shown with probability 0.8.
    needed
        How many seeds (or prompts) would decide if the effect is as measured; None where there is
        none, too many to name, or ranks are tested (orders and trends).
    """

    name: str
    statement: str
    source: str
    about: str
    status: Status
    sentence: str
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    n: int = 0
    p: float | None = None
    detectable: float | None = None
    needed: int | None = None

    @property
    def own_fault(self) -> bool:
        """Whether it says that this suite is broken, rather than something about the paper."""
        return self.status == "contradicted" and self.about in ("mechanism", "expectation")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tested:
    """A comparison before the family's correction: a verdict-to-be and its bound's direction."""

    verdict: Verdict
    above: bool
    below: bool
    deviation: float = 0.0
    blocked: str = ""


def judge(
    claims: Sequence[Claim],
    metrics: Mapping[str, Metric],
    values: Mapping[str, Values],
    absent: Mapping[str, str],
    failed: Mapping[str, int],
    by_prompt: Mapping[str, Values] | None = None,
) -> list[Verdict]:
    """Return one verdict per claim.

    Parameters
    ----------
    values
        {metric: {arm: {seed: value}}}.
    absent
        {arm: sentence} for arms without usable records.
    failed
        {arm: number of seeds that failed}.
    by_prompt
        {metric: {arm: {prompt: value}}}, for claims that are paired by prompt.
    """
    # Of a target whose repeats are timed, `values` holds those, one each.
    sources = {"seed": values, "prompt": by_prompt or {}, "repeat": values}
    tested = [_test(claim, metrics, sources[claim.paired_by], absent, failed) for claim in claims]
    final: list[Verdict] = [item.verdict for item in tested]
    for mechanism in (False, True):
        family = [
            index
            for index, claim in enumerate(claims)
            if claim.mechanism is mechanism and tested[index].verdict.p is not None
        ]
        adjusted = st.holm([tested[index].verdict.p or 0.0 for index in family])
        for index, p in zip(family, adjusted, strict=True):
            final[index] = _decide(claims[index], tested[index], p, len(family))
    return final


def _test(
    claim: Claim,
    metrics: Mapping[str, Metric],
    values: Mapping[str, Values],
    absent: Mapping[str, str],
    failed: Mapping[str, int],
) -> _Tested:
    verdict = Verdict(
        name=claim.name,
        statement=claim.statement,
        source=claim.source,
        about="mechanism" if claim.mechanism else "claim",
        status="not run",
        sentence="",
        unit=_effect_unit(metrics[claim.metric].unit, claim),
    )
    for arm in claim.arms:
        if arm in absent:
            return _Tested(verdict=replace(verdict, sentence=absent[arm]), above=False, below=False)
    by_arm = values.get(claim.metric, {})
    seeds = sorted(set.intersection(*(set(by_arm.get(arm, {})) for arm in claim.arms)))
    if not seeds:
        sentence = f"no {claim.paired_by} has {claim.metric} for {', '.join(claim.arms)}"
        return _Tested(verdict=replace(verdict, sentence=sentence), above=False, below=False)
    blocks = [[by_arm[arm][seed] for arm in claim.arms] for seed in seeds]
    verdict = replace(verdict, n=len(seeds))
    lost = {arm: failed[arm] for arm in claim.arms if failed.get(arm)}
    blocked = "; ".join(f"{count} run(s) of {arm} failed" for arm, count in lost.items())
    if claim.kind == "at_most":
        return _at_most(claim, verdict, [block[0] for block in blocks])
    if claim.kind in ("trend", "order"):
        return _trend(claim, verdict, blocks, blocked)
    return _difference(claim, verdict, blocks, blocked)


def _difference(
    claim: Claim, verdict: Verdict, blocks: Sequence[Sequence[float]], blocked: str
) -> _Tested:
    differences, bound = _differences(claim, blocks)
    if len(differences) < _MINIMUM[claim.paired_by]:
        return _too_few(claim, verdict, differences)
    result = st.paired(differences, bound)
    verdict = replace(
        verdict,
        effect=result.mean,
        low=result.low,
        high=result.high,
        p=result.p_two_sided,
        detectable=st.minimum_detectable_effect(result.deviation, result.n),
    )
    return _Tested(
        verdict=verdict,
        above=result.mean > bound,
        below=result.mean < bound,
        deviation=result.deviation,
        blocked=blocked,
    )


def _differences(claim: Claim, blocks: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """Return the per-seed values that are tested, and the bound they are tested against."""
    if claim.kind in ("gain", "no_gain"):
        return [block[0] for block in blocks], claim.margin or 0.0
    if claim.kind == "ratio":
        if any(value <= 0 for block in blocks for value in block):
            raise ValueError(f"claim {claim.name}: a ratio needs positive values")
        return [math.log(a / b) for a, b in blocks], math.log(claim.margin or 1.0)
    if claim.kind == "interaction":
        return [(a - b) - (c - d) for a, b, c, d in blocks], 0.0
    return [a - b for a, b in blocks], -(claim.margin or 0.0)


def _trend(
    claim: Claim, verdict: Verdict, blocks: Sequence[Sequence[float]], blocked: str
) -> _Tested:
    slopes = [st.trend_slope(block) for block in blocks]
    if len(blocks) < _MINIMUM[claim.paired_by]:
        return _too_few(claim, verdict, slopes)
    result = st.paired(slopes)
    upward = st.page_trend(blocks)[1]
    downward = st.page_trend([block[::-1] for block in blocks])[1]
    verdict = replace(
        verdict,
        effect=result.mean,
        low=result.low,
        high=result.high,
        p=min(1.0, 2 * min(upward, downward)),
        detectable=st.minimum_detectable_effect(result.deviation, result.n),
    )
    above, below = upward < downward, downward < upward
    if claim.kind == "order":
        unresolved, reversed_pairs = _adjacent_pairs(claim.arms, blocks)
        below = below or bool(reversed_pairs)
        if above and unresolved:
            blocked = "; ".join(filter(None, [blocked, f"not resolved: {', '.join(unresolved)}"]))
    return _Tested(
        verdict=verdict, above=above, below=below, deviation=result.deviation, blocked=blocked
    )


def _adjacent_pairs(
    arms: Sequence[str], blocks: Sequence[Sequence[float]]
) -> tuple[list[str], list[str]]:
    """Return the adjacent pairs not resolved, and those resolved the other way round."""
    tests = [
        st.paired([block[place + 1] - block[place] for block in blocks])
        for place in range(len(arms) - 1)
    ]
    adjusted = st.holm([test.p_two_sided for test in tests])
    unresolved, reversed_pairs = [], []
    for place, (test, p) in enumerate(zip(tests, adjusted, strict=True)):
        pair = f"{arms[place]} < {arms[place + 1]}"
        if p >= ALPHA:
            unresolved.append(pair)
        elif test.mean < 0:
            reversed_pairs.append(pair)
    return unresolved, reversed_pairs


def _at_most(claim: Claim, verdict: Verdict, values: Sequence[float]) -> _Tested:
    limit = claim.margin or 0.0
    within = [value <= limit for value in values]
    status: Status = (
        "reproduced" if all(within) else "inconclusive" if any(within) else "contradicted"
    )
    sentence = f"largest of {len(values)}: {max(values):.4g}; allowed {limit:.4g}"
    verdict = replace(verdict, status=status, sentence=sentence, effect=max(values))
    return _Tested(verdict=verdict, above=False, below=False)


def _too_few(claim: Claim, verdict: Verdict, values: Sequence[float]) -> _Tested:
    ratio, mean = claim.kind == "ratio", sum(values) / len(values)
    mean = math.exp(mean) if ratio else mean
    sentence = (
        f"{len(values)} paired {claim.paired_by}(s); a verdict needs {_MINIMUM[claim.paired_by]}. "
        f"Point estimate {mean:{'' if ratio else '+'}.3g} {verdict.unit}"
    )
    verdict = replace(verdict, status="inconclusive", sentence=sentence, effect=mean)
    return _Tested(verdict=verdict, above=False, below=False)


def _decide(claim: Claim, tested: _Tested, p: float, family: int) -> Verdict:
    """Apply the family's correction and put the verdict into words."""
    verdict = replace(tested.verdict, p=p)
    supports, opposes = tested.above, tested.below
    if claim.kind == "no_gain":
        supports, opposes = opposes, supports
    status: Status = "inconclusive"
    if p < ALPHA and supports and not tested.blocked:
        status = "reproduced"
    elif p < ALPHA and opposes:
        status = "contradicted"
    words = _measured(claim, verdict)
    p_text = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
    words += f"; {p_text}" + (f" after Holm over {family}" if family > 1 else "")
    if tested.blocked:
        words += f". {tested.blocked}"
    if status == "inconclusive":
        words += f". {_could_show(claim, verdict, tested.deviation, family)}"
    needed = _needed(claim, verdict, tested.deviation, family)
    return replace(_shown(claim, verdict), status=status, sentence=words, needed=needed)


def _shown(claim: Claim, verdict: Verdict) -> Verdict:
    """Return the verdict with a ratio's logarithms turned back into ratios."""
    if claim.kind != "ratio" or verdict.effect is None:
        return verdict
    assert verdict.low is not None
    assert verdict.high is not None
    return replace(
        verdict,
        effect=math.exp(verdict.effect),
        low=math.exp(verdict.low),
        high=math.exp(verdict.high),
        detectable=None if verdict.detectable is None else math.exp(verdict.detectable),
    )


def _measured(claim: Claim, verdict: Verdict) -> str:
    shown = _shown(claim, verdict)
    sign = "" if claim.kind == "ratio" else "+"
    what = {
        "ratio": f"{' / '.join(claim.arms)}: ",
        "trend": "slope per place ",
        "order": "slope per place ",
        "difference": f"{' - '.join(claim.arms)}: ",
        "non_inferior": f"{' - '.join(claim.arms)}: ",
        "interaction": f"({' - '.join(claim.arms[:2])}) - ({' - '.join(claim.arms[2:])}): ",
    }.get(claim.kind, "")
    margin = "" if claim.margin is None else f" (margin {claim.margin:g})"
    prompts = " prompts" if claim.paired_by == "prompt" else ""
    return (
        f"{what}{shown.effect:{sign}.3g} {shown.unit}, 95 % interval {shown.low:{sign}.3g} to "
        f"{shown.high:{sign}.3g}, n = {shown.n}{prompts}{margin}"
    )


def _could_show(claim: Claim, verdict: Verdict, deviation: float, family: int) -> str:
    if deviation == 0:
        return "All seeds agree to the last digit, so no test can decide"
    shown = _shown(claim, verdict)
    what = "a factor" if claim.kind == "ratio" else "an effect"
    words = (
        f"{verdict.n} {claim.paired_by}s would have shown {what} of {shown.detectable:.3g} "
        f"{shown.unit} (80 % power)"
    )
    needed = _needed(claim, verdict, deviation, family)
    if needed is not None and needed > verdict.n:
        words += f"; if the effect is as measured, {needed} {claim.paired_by}s would decide"
    return words


def _needed(claim: Claim, verdict: Verdict, deviation: float, family: int) -> int | None:
    """Return how many pairs would decide at the effect measured, Holm's first step included."""
    if verdict.effect is None or verdict.p is None or claim.kind in ("trend", "order"):  # ranks
        return None
    bound = {"ratio": math.log(claim.margin or 1.0), "non_inferior": -(claim.margin or 0.0)}.get(
        claim.kind, claim.margin or 0.0
    )
    return st.seeds_needed(verdict.effect - bound, deviation, alpha=ALPHA / family)


def _effect_unit(unit: str, claim: Claim) -> str:
    if claim.kind == "ratio":
        return "x"
    return "points" if unit == "percent" and claim.kind != "at_most" else unit


def judge_expectation(
    expectation: Expectation,
    metric: Metric,
    values: Mapping[int, float],
    absent: str | None,
    about: str = "expectation",
) -> Verdict:
    """Return the verdict of one expectation on the values of its arm, one per seed."""
    verdict = Verdict(
        name=f"{expectation.arm}.{expectation.metric}",
        statement=f"{metric.title} of {expectation.arm}: {expectation.text()} {metric.unit}"
        + (" in every seed" if expectation.statistic == "every_seed" else ""),
        source=f"{expectation.source}: {expectation.because}",
        about=about,
        status="not run",
        sentence=absent or f"no record has {expectation.metric}",
        unit=metric.unit,
        n=len(values),
    )
    if absent or not values:
        return verdict
    interval = st.mean_interval(list(values.values()))
    goal = "" if expectation.goal is None else f"; goal {expectation.goal:g}"
    if expectation.statistic == "every_seed" or interval.low is None or interval.high is None:
        inside = [expectation.holds(value) for value in values.values()]
        status: Status = "reproduced" if all(inside) else "contradicted"
        listed = ", ".join(f"{value:.4g}" for value in values.values())
        sentence = f"{sum(inside)} of {len(inside)} inside: {listed}{goal}"
        return replace(verdict, status=status, sentence=sentence, effect=interval.value)
    low, high = expectation.accept
    outside = (low is not None and interval.high < low) or (
        high is not None and interval.low > high
    )
    inside_whole = expectation.holds(interval.low) and expectation.holds(interval.high)
    status = "contradicted" if outside else "reproduced" if inside_whole else "inconclusive"
    sentence = (
        f"mean {interval.value:.4g}, 95 % interval {interval.low:.4g} to {interval.high:.4g}, "
        f"n = {interval.n}{goal}"
    )
    return replace(
        verdict,
        status=status,
        sentence=sentence,
        effect=interval.value,
        low=interval.low,
        high=interval.high,
    )
