"""Verdicts on claims: a test per claim, a correction over the family, a status per claim.

`repro.evidence.verdicts.verdict` defines the statuses and the family, `sizes` the effect sizes, and
`comparison` the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from repro.evidence.verdicts import statistics as st
from repro.evidence.verdicts.comparison import Compared, blocks_of, bound_of, compare, contrasts
from repro.evidence.verdicts.secondary import secondary_text
from repro.evidence.verdicts.sizes import Pair, Sizes, Values, not_testable, sizes_of, undecidable
from repro.evidence.verdicts.verdict import MINIMUM_SEEDS, OUTSIDE_FAMILY, Status, Verdict
from repro.spec.claim import ALPHA, Claim, Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tested:
    """A comparison before the family's correction; `blocked` says why it cannot decide, if so."""

    verdict: Verdict
    compared: Compared
    sizes: Sizes | None
    blocked: str


def judge(
    claims: Sequence[Claim],
    metrics: Mapping[str, Metric],
    values: Mapping[str, Values],
    absent: Mapping[str, str],
    lost: Mapping[str, str],
    *,
    settled: Mapping[str, Verdict] | None = None,
    fewest: int = MINIMUM_SEEDS,
    timed: bool = False,
) -> list[Verdict]:
    """Return one verdict per claim.

    Parameters
    ----------
    claims
        All that the target states, whose arms have records or not.
    values
        {metric: {arm: {pair: value}}}.
    absent
        {arm: sentence} for arms without usable records.
    lost
        {arm: sentence} for arms with planned seeds that failed or have no record.
    settled
        {claim: verdict} for claims that no test decides.
    fewest
        Seeds that a verdict needs; timed repeats need `MINIMUM_REPEATS`.
    timed
        Whether the pairs are timed repeats.
    """
    needed, pair = (st.MINIMUM_REPEATS, "repeat") if timed else (fewest, "seed")
    tested = [
        (settled or {}).get(claim.name) or _test(claim, metrics, values, absent, lost, needed, pair)
        for claim in claims
    ]
    final = [item if isinstance(item, Verdict) else item.verdict for item in tested]
    for mechanism in (False, True):
        family = [
            index
            for index, (claim, item) in enumerate(zip(claims, tested, strict=True))
            if claim.mechanism is mechanism and _counts(claim, item)
        ]
        items = [tested[index] for index in family]
        alone = [item.compared.p if isinstance(item, _Tested) else 1.0 for item in items]
        for index, item, p in zip(family, items, st.holm(alone), strict=True):
            if isinstance(item, _Tested):
                final[index] = _decide(claims[index], item, p, len(family), pair)
    return final


def _counts(claim: Claim, item: _Tested | Verdict) -> bool:
    """Whether a claim is one of its family: tested, or stated and without a test."""
    if isinstance(item, _Tested):
        return True
    return not undecidable(claim) and item.status not in OUTSIDE_FAMILY


def _test(
    claim: Claim,
    metrics: Mapping[str, Metric],
    values: Mapping[str, Values],
    absent: Mapping[str, str],
    lost: Mapping[str, str],
    fewest: int,
    pair: str,
) -> _Tested | Verdict:
    """Return the comparison of a claim, or its verdict if it cannot be tested."""
    verdict = undecided(claim, metrics[claim.metric], "not run", "")
    by_arm = values.get(claim.metric, {})
    for arm in claim.arms:
        if arm in absent:
            return replace(verdict, sentence=absent[arm])
    blocks = blocks_of(claim, values)
    if not blocks:
        sentence = f"no {pair} has {claim.metric} for {', '.join(claim.arms)}"
        return replace(verdict, sentence=sentence)
    numbers = contrasts(claim, blocks)
    mean = st.mean(numbers)
    verdict = replace(verdict, n=len(blocks))
    blocked = _blocked(claim, by_arm, lost, pair)
    sizes = sizes_of(claim, metrics, values)
    reason = not_testable(claim, metrics, by_arm, sizes)
    status: Status = "not testable"
    if not reason and len(blocks) < fewest:
        status = "inconclusive"
        reason = f"{len(blocks)} paired {pair}(s); a verdict needs {fewest}"
        reason += f". {blocked}" if blocked else ""
    elif sizes is not None:
        verdict = replace(verdict, paper=sizes.paper, matters=sizes.matters)
    if not reason:
        compared = compare(claim, blocks)
        return _Tested(verdict=verdict, compared=compared, sizes=sizes, blocked=blocked)
    verdict = _shown(claim, replace(verdict, status=status, effect=mean))
    point = f"Point estimate {verdict.effect:{'' if claim.log else '+'}.3g} {verdict.unit}"
    return replace(verdict, sentence=f"{reason}. {point}")


def undecided(claim: Claim, metric: Metric, status: Status, sentence: str) -> Verdict:
    """Return a verdict without numbers."""
    return Verdict(
        name=claim.name,
        statement=claim.statement,
        source=claim.source,
        about="mechanism" if claim.mechanism else "claim",
        status=status,
        sentence=sentence,
        unit="x" if claim.log else "points" if metric.unit == "percent" else metric.unit,
    )


def _blocked(claim: Claim, by_arm: Values, lost: Mapping[str, str], pair: str) -> str:
    """Return a sentence on missing values, which a fault of an arm may have caused; else ""."""
    reasons = [lost[arm] for arm in claim.arms if lost.get(arm)]
    if pair == "seed":
        seeds = [set(by_arm.get(arm, {})) for arm in claim.arms]
        every: set[Pair] = set().union(*seeds)
        odd = ", ".join(map(str, sorted(every - set.intersection(*seeds))))
        missing = f"{claim.metric} is missing in an arm of seed(s) {odd}"
        reasons += [missing] * bool(odd)
    return "; ".join(dict.fromkeys(reasons))


def _decide(claim: Claim, tested: _Tested, p: float, family: int, pair: str) -> Verdict:
    """Return the verdict after the family's correction, with its sentence."""
    compared, sizes = tested.compared, tested.sizes
    level = compared.level
    low, high, confidence = compared.interval(1 - level / family)
    status = _status(claim, tested, p < ALPHA, low, high)
    # Holm's test can reject where Bonferroni's interval still includes the bound. The simultaneous
    # interval of a step-down test then ends at the bound (Strassburger and Bretz, 2008).
    if p < ALPHA and claim.side != "within":
        low = max(low, bound_of(claim)) if compared.above else low
        high = min(high, bound_of(claim)) if compared.below else high
    detectable = None
    if compared.test != "sign_flip":
        detectable = st.minimum_detectable_effect(compared.deviation, compared.n)
    decided = replace(
        tested.verdict,
        status=status,
        effect=compared.effect,
        low=low,
        high=high,
        p=p,
        p_alone=compared.p,
        detectable=detectable,
    )
    verdict = _shown(claim, decided)
    # With few values, even the full range of an exact test has less than the nominal confidence.
    together = 1 - level if confidence >= 1 - level / family else confidence
    words = _measured(claim, verdict, compared, family, together)
    if sizes is not None:
        share = f" ({sizes.share})" if sizes.share and verdict.unit != "x" else ""
        if verdict.paper is None:
            words += f"; from {verdict.matters:.3g} {verdict.unit} on it would matter{share}"
        else:
            words += f"; the paper's size here is {verdict.paper:.3g} {verdict.unit}{share}"
    words += secondary_text(compared.secondary, verdict.unit, log=claim.log)
    if status == "not judged":
        words += f". The interval may reach {claim.widest:g} {verdict.unit} to either side at most"
    words += f". {tested.blocked}" if tested.blocked else ""
    if status == "inconclusive" and detectable is not None:
        words += f". {_could_show(claim, verdict, compared, pair)}"
    return replace(verdict, sentence=words)


def _status(claim: Claim, tested: _Tested, shown: bool, low: float, high: float) -> Status:
    compared, sizes = tested.compared, tested.sizes
    supports, opposes = compared.above, compared.below
    if claim.side == "below":
        supports, opposes = opposes, supports
    if tested.blocked:
        return "contradicted" if claim.mechanism and shown and opposes else "inconclusive"
    if claim.widest is not None:
        widest = math.log(claim.widest) if claim.log else claim.widest
        if (high - low) / 2 > widest:
            return "not judged"
    # Compare the whole interval: a point estimate does not decide a size.
    below = sizes is not None and sizes.tenth is not None and high < sizes.tenth
    of_bound = sizes is None or _is_bound_the_size(claim)
    least = 0.0 if of_bound or sizes is None else sizes.matters
    status: Status = "inconclusive"
    if shown and supports and (of_bound or below or compared.effect >= least):
        status = "reproduced"
    elif shown and opposes and (of_bound or compared.effect <= -least):
        status = "contradicted"
    if status == "reproduced" and below:
        status = "below a tenth"
    # A t interval needs a spread.
    if status != "inconclusive" or sizes is None or not compared.deviation:
        return status
    if not _is_bound_the_size(claim) and -sizes.matters < low and high < sizes.matters:
        return "no difference"
    return "excluded" if sizes.paper is not None and high < sizes.paper else "inconclusive"


def _is_bound_the_size(claim: Claim) -> bool:
    """Whether the bound is the smallest effect that matters: equivalence, or ratios without one."""
    own = claim.effect is not None and claim.effect.smallest is not None
    return claim.log and (claim.side == "within" or not own)


def _shown(claim: Claim, verdict: Verdict) -> Verdict:
    """Return the verdict with logarithms of ratios converted back to ratios."""
    if not claim.log:
        return verdict
    names = ("effect", "low", "high", "detectable", "paper", "matters")
    known = {name: value for name in names if (value := getattr(verdict, name)) is not None}
    back: dict[str, Any] = {name: math.exp(value) for name, value in known.items()}
    return replace(verdict, **back)


def _measured(
    claim: Claim, verdict: Verdict, compared: Compared, family: int, confidence: float
) -> str:
    """Return a text with estimate, interval and p-value.

    The claims of a `family` were corrected together, and `confidence` is that of the interval for
    all of it; with few values in an exact test, the confidence of their range.
    """
    sign = "" if claim.log else "+"
    margin = f" (margin {abs(claim.bound):g})" if claim.log or claim.is_bounded else ""
    together = f" (simultaneous over {family})" if family > 1 else ""
    p_text = "p < 0.001" if verdict.p is not None and verdict.p < 0.001 else f"p = {verdict.p:.2g}"
    flipped = compared.test == "sign_flip"
    test = ", exact sign-flip test of the claimed direction" if flipped else ""
    test = ", two one-sided tests" if compared.test == "tost" else test
    if compared.welch is not None:
        test += f", unpaired (correlation within pairs {compared.welch.correlation:.2f})"
    after = f" after Holm over {family}" if family > 1 else ""
    return (
        f"{_contrast(claim)}{'median ' * flipped}{verdict.effect:{sign}.3g} {verdict.unit}, "
        f"{100 * confidence:.3g} % interval{together} {verdict.low:{sign}.3g} to "
        f"{verdict.high:{sign}.3g}, n = {verdict.n}{margin}; {p_text}{test}{after}"
    )


def _contrast(claim: Claim) -> str:
    """Return which arms are compared; empty for an arm's own value."""
    if claim.test == "page":
        return "slope per place "
    if claim.dose is not None:
        given = f", given {' and '.join(claim.dose.given)}" if claim.dose.given else ""
        return f"at {claim.dose.size:+g} of {claim.dose.metric}{given}: "
    if len(claim.contrast) == 1:
        return ""
    plus, minus, times = (" * ", " / ", "^") if claim.log else (" + ", " - ", " ")
    words = ""
    for arm, weight in claim.contrast.items():
        sign = minus if weight < 0 else plus if words else ""
        size = f"{abs(weight):.3g}"
        several = f"{arm}{times}{size}" if claim.log else f"{size}{times}{arm}"
        words += sign + (arm if size == "1" else several)
    return f"{words.strip()}: "


def _could_show(claim: Claim, verdict: Verdict, compared: Compared, pair: str) -> str:
    """Return what an inconclusive comparison could have shown."""
    if compared.deviation == 0:
        return "All seeds agree to the last digit, so no test can decide"
    what = "a factor" if claim.log else "an effect"
    return (
        f"{verdict.n} {pair}s would have shown {what} of {verdict.detectable:.3g} "
        f"{verdict.unit} (80 % power)"
    )
