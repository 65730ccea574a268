"""Claims judged: a comparison each, one correction over the family, one status each.

The statuses and what leads to each stand in `repro.evidence.verdicts.verdict`, sizes and assays in
`repro.evidence.verdicts.sizes`, the tests in `repro.evidence.verdicts.comparison`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from repro.evidence.verdicts import statistics as st
from repro.evidence.verdicts.claim_sentences import could_show, measured, sized
from repro.evidence.verdicts.comparison import (
    RANKED,
    Compared,
    blocks_of,
    compare,
    values_and_bound,
)
from repro.evidence.verdicts.sizes import Pair, Sizes, Values, not_testable, sizes_of
from repro.evidence.verdicts.verdict import (
    MINIMUM_REPEATS,
    MINIMUM_SEEDS,
    Status,
    Verdict,
)
from repro.spec.claim import Claim, Metric
from repro.spec.effect import ALPHA


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tested:
    """A comparison before the family's correction, with what takes decisions away."""

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
    by_prompt: Mapping[str, Values] | None = None,
    alpha: float = ALPHA,
    shown: Collection[str] = (),
    fewest: int = MINIMUM_SEEDS,
) -> list[Verdict]:
    """Return one verdict per claim.

    Parameters
    ----------
    values
        {metric: {arm: {pair: value}}}; of a target whose repeats are timed, one each.
    absent
        {arm: sentence} for arms without usable records.
    lost
        {arm: sentence} for arms with planned seeds that failed or have no record.
    by_prompt
        {metric: {arm: {prompt: value}}}, for claims that are paired by prompt.
    alpha
        The level spent here: all of it, but at an interim look.
    shown
        Claims that an earlier look has reproduced: as positive controls they hold.
    fewest
        Seeds, or prompts, that a verdict needs; of timed repeats it needs `MINIMUM_REPEATS`.
    """
    prompts = by_prompt or {}
    tested = [
        _test(
            claim,
            metrics,
            (prompts if claim.paired_by == "prompt" else values).get(claim.metric, {}),
            values,
            absent,
            lost,
            MINIMUM_REPEATS if claim.paired_by == "repeat" else fewest,
        )
        for claim in claims
    ]
    final = [item if isinstance(item, Verdict) else item.verdict for item in tested]
    for mechanism in (False, True):
        family = {
            index: item
            for index, (claim, item) in enumerate(zip(claims, tested, strict=True))
            if claim.mechanism is mechanism and isinstance(item, _Tested)
        }
        adjusted = st.holm([item.compared.p for item in family.values()])
        for (index, item), p in zip(family.items(), adjusted, strict=True):
            final[index] = _decide(claims[index], item, p, len(family), alpha)
    return _controlled(claims, final, shown)


def _test(
    claim: Claim,
    metrics: Mapping[str, Metric],
    by_arm: Values,
    values: Mapping[str, Values],
    absent: Mapping[str, str],
    lost: Mapping[str, str],
    fewest: int,
) -> _Tested | Verdict:
    """Return the comparison of a claim, or its verdict where nothing is to be tested."""
    verdict = undecided(claim, metrics[claim.metric], "not run", "")
    for arm in claim.arms:
        if arm in absent:
            return replace(verdict, sentence=absent[arm])
    blocks = blocks_of(claim, {**values, claim.metric: by_arm})
    if not blocks:
        sentence = f"no {claim.paired_by} has {claim.metric} for {', '.join(claim.arms)}"
        return replace(verdict, sentence=sentence)
    verdict = replace(verdict, n=len(blocks))
    blocked = _blocked(claim, by_arm, lost)
    sizes = sizes_of(claim, metrics, by_arm, values)
    reason = not_testable(claim, metrics, by_arm, values, sizes)
    if reason:
        sentence = f"{reason}. {_point(claim, verdict, blocks)}"
        effect = _mean(claim, blocks)
        verdict = _with_sizes(claim, verdict, sizes)
        return replace(verdict, status="not testable", sentence=sentence, effect=effect)
    if len(blocks) < fewest:
        return _too_few(claim, verdict, blocks, blocked, fewest)
    return _Tested(verdict=verdict, compared=compare(claim, blocks), sizes=sizes, blocked=blocked)


def undecided(claim: Claim, metric: Metric, status: Status, sentence: str) -> Verdict:
    """Return the verdict of a claim without any number."""
    return Verdict(
        name=claim.name,
        statement=claim.statement,
        source=claim.source,
        about="mechanism" if claim.mechanism else "claim",
        status=status,
        sentence=sentence,
        unit=_effect_unit(metric.unit, claim),
    )


def _blocked(claim: Claim, by_arm: Values, lost: Mapping[str, str]) -> str:
    """Return which values are missing, and so may be the arm's fault; empty for none."""
    reasons = [lost[arm] for arm in claim.arms if lost.get(arm)]
    if claim.paired_by == "seed":
        seeds = [set(by_arm.get(arm, {})) for arm in claim.arms]
        every: set[Pair] = set().union(*seeds)
        odd = sorted(every - set.intersection(*seeds))
        missing = f"{claim.metric} is missing in an arm of seed(s) {_listed(odd)}"
        reasons += [missing] * bool(odd)
    return "; ".join(dict.fromkeys(reasons))


def _listed(pairs: Iterable[Pair]) -> str:
    """Return seeds, or timed repeats, for a message."""
    return ", ".join(
        f"{pair[0]} (repeat {pair[1]})" if isinstance(pair, tuple) else str(pair) for pair in pairs
    )


def _mean(claim: Claim, blocks: Sequence[Sequence[float]]) -> float:
    numbers = values_and_bound(claim, blocks)[0]
    mean = st.paired(numbers).mean if len(numbers) > 1 else numbers[0]
    return math.exp(mean) if claim.is_ratio else mean


def _point(claim: Claim, verdict: Verdict, blocks: Sequence[Sequence[float]]) -> str:
    sign = "" if claim.is_ratio else "+"
    return f"Point estimate {_mean(claim, blocks):{sign}.3g} {verdict.unit}"


def _too_few(
    claim: Claim, verdict: Verdict, blocks: Sequence[Sequence[float]], blocked: str, needed: int
) -> Verdict:
    sentence = (
        f"{len(blocks)} paired {claim.paired_by}(s); a verdict needs {needed}. "
        + (f"{blocked}. " if blocked else "")
        + _point(claim, verdict, blocks)
    )
    effect = _mean(claim, blocks)
    return replace(verdict, status="inconclusive", sentence=sentence, effect=effect)


def _decide(claim: Claim, tested: _Tested, p: float, family: int, alpha: float) -> Verdict:
    """Apply the family's correction and put the verdict into words."""
    compared, sizes = tested.compared, tested.sizes
    low, high, confidence = compared.interval(1 - alpha / family)
    status = _status(claim, tested, p < alpha, low, high)
    # Holm decides more than Bonferroni's intervals show: of those, the interval ends at the bound,
    # which is the simultaneous one that goes with a step-down test (Strassburger and Bretz, 2008).
    if p < alpha and claim.kind != "equivalent":
        low = max(low, compared.bound) if compared.above else low
        high = min(high, compared.bound) if compared.below and not compared.above else high
    detectable = (
        st.minimum_detectable_effect(compared.deviation, compared.n)
        if compared.test == "t"
        else None
    )
    needed = _needed(claim, compared, sizes, family)
    verdict = _shown(
        claim,
        replace(
            _with_sizes(claim, tested.verdict, sizes),
            status=status,
            effect=compared.effect,
            low=low,
            high=high,
            p=p,
            p_alone=compared.p,
            detectable=detectable,
            needed=needed,
        ),
    )
    # Of few values, not even the range of an exact test has the confidence asked for.
    together = 1 - alpha if confidence >= 1 - alpha / family else confidence
    words = measured(claim, verdict, compared, family, together)
    words += sized(verdict, sizes)
    reasons = [tested.blocked]
    if compared.unresolved and status == "inconclusive":
        reasons.append(f"not resolved: {', '.join(compared.unresolved)}")
    words += "".join(f". {reason}" for reason in reasons if reason)
    if status == "inconclusive" and detectable is not None:
        words += f". {could_show(claim, verdict, compared)}"
    return replace(verdict, sentence=words)


def _status(claim: Claim, tested: _Tested, shown: bool, low: float, high: float) -> Status:
    compared, sizes = tested.compared, tested.sizes
    supports, opposes = compared.above, compared.below
    if claim.kind == "no_gain":
        supports, opposes = opposes, supports
    if tested.blocked:
        return "contradicted" if claim.mechanism and shown and opposes else "inconclusive"
    # The whole interval lies there: an estimate alone decides no size.
    below = sizes is not None and sizes.tenth is not None and high < sizes.tenth
    if sizes is None or _is_bound_the_size(claim):
        status = _by_bound(shown and supports and not compared.unresolved, shown and opposes)
    else:
        status = _by_size(compared, sizes, shown and supports, shown and opposes, below=below)
    if status == "reproduced" and below:
        status = "below a tenth"
    # Without any spread a t interval is none.
    spread = compared.deviation > 0 or compared.test == "mcnemar"
    if status != "inconclusive" or sizes is None or not spread:
        return status
    if not _is_bound_the_size(claim) and -sizes.matters < low and high < sizes.matters:
        return "no difference"
    return "excluded" if sizes.paper is not None and high < sizes.paper else "inconclusive"


def _is_bound_the_size(claim: Claim) -> bool:
    """Whether what matters is the margin itself: of equivalence, of ratios without their own."""
    own = claim.effect is not None and claim.effect.smallest is not None
    return claim.is_ratio and (claim.kind == "equivalent" or (claim.kind == "ratio" and not own))


def _by_bound(supported: bool, opposed: bool) -> Status:
    """Return the status of a claim whose bound itself is what matters."""
    return "reproduced" if supported else "contradicted" if opposed else "inconclusive"


def _by_size(
    compared: Compared, sizes: Sizes, supported: bool, opposed: bool, *, below: bool
) -> Status:
    """Return the status of a direction that counts from the smallest effect that matters."""
    if supported and not compared.unresolved and (below or compared.effect >= sizes.matters):
        return "reproduced"
    if opposed and compared.effect <= -sizes.matters:
        return "contradicted"
    return "inconclusive"


def _controlled(
    claims: Sequence[Claim], verdicts: Sequence[Verdict], earlier: Collection[str]
) -> list[Verdict]:
    """Return the verdicts, those whose positive control is not reproduced as not testable."""
    shown = {verdict.name for verdict in verdicts if verdict.status == "reproduced"} | {*earlier}
    final = []
    for claim, verdict in zip(claims, verdicts, strict=True):
        failed = [
            assay for assay in claim.assays if assay.kind == "control" and assay.claim not in shown
        ]
        if failed and verdict.status not in ("not run", "not testable"):
            reason = (
                f"its positive control {failed[0].claim} is not reproduced: {failed[0].because}"
            )
            sentence = f"{reason}. {verdict.sentence}"
            verdict = replace(verdict, status="not testable", sentence=sentence)
        final.append(verdict)
    return final


def _shown(claim: Claim, verdict: Verdict) -> Verdict:
    """Return the verdict with a ratio's logarithms turned back into ratios."""
    if not claim.is_ratio:
        return verdict

    def ratio(logarithm: float | None) -> float | None:
        return None if logarithm is None else math.exp(logarithm)

    return replace(
        verdict,
        effect=ratio(verdict.effect),
        low=ratio(verdict.low),
        high=ratio(verdict.high),
        detectable=ratio(verdict.detectable),
    )


def _with_sizes(claim: Claim, verdict: Verdict, sizes: Sizes | None) -> Verdict:
    """Return the verdict with the paper's size here and the smallest that matters."""
    if sizes is None:
        return verdict
    paper, matters = sizes.paper, sizes.matters
    if claim.is_ratio:
        paper, matters = None if paper is None else math.exp(paper), math.exp(matters)
    return replace(verdict, paper=paper, matters=matters)


def _needed(claim: Claim, compared: Compared, sizes: Sizes | None, family: int) -> int | None:
    """Return how many pairs would decide at the effect measured, Holm's first step included.

    The fewest that lead to any of the words that an effect of this size can have. Shares of runs,
    which an exact test compares, are taken by the t test's power, which needs slightly fewer.
    """
    if compared.test == "sign_flip" or claim.kind in RANKED:
        return None
    counts = [
        st.seeds_needed(distance, compared.deviation, alpha=ALPHA / family)
        for distance in _distances(claim, compared, sizes)
    ]
    return min((count for count in counts if count is not None), default=None)


def _distances(claim: Claim, compared: Compared, sizes: Sizes | None) -> list[float]:
    """Return how far the effect lies from each bound that decides once it is told from it."""
    effect, to_bound = compared.effect, abs(compared.effect - compared.bound)
    if claim.kind == "equivalent":
        margin = claim.margin or 0.0
        return [abs((math.log(margin) if claim.is_ratio else margin) - abs(effect))]
    if sizes is None:
        return [to_bound]
    below_the_papers = [] if sizes.paper is None else [max(0.0, sizes.paper - effect)]
    if _is_bound_the_size(claim):
        return [to_bound, *below_the_papers]
    # A direction counts from the smallest effect that matters, or told from a tenth of the paper's.
    direction = [to_bound] if abs(effect) >= sizes.matters else []
    if sizes.tenth is not None and 0 < effect < sizes.tenth:
        direction.append(min(to_bound, sizes.tenth - effect))
    return [*direction, max(0.0, sizes.matters - abs(effect)), *below_the_papers]


def _effect_unit(unit: str, claim: Claim) -> str:
    if claim.is_ratio:
        return "x"
    return "points" if unit == "percent" else unit
