"""Verdicts: from values per seed and a claim (or an expectation) to one status.

The status depends on the estimated effect with its simultaneous interval, the size of the paper's
effect, and the smallest effect that matters:

=================  =================================================================================
`reproduced`       shown in the claimed direction, and at least the smallest effect that matters
`below a tenth`    shown, but the interval ends below a tenth of the paper's effect
`contradicted`     shown in the other direction, and at least the smallest effect that matters
`no difference`    the whole interval is within plus or minus the smallest effect that matters
`excluded`         none of the above, and the interval ends below the paper's effect
`inconclusive`     none of the above, or values are missing; with the smallest detectable effect
`not judged`       the interval is wider than the claim allows
`not testable`     no room for the effect, a confounded design, or too few draws of a rounding
`not run`          no records; with the reason
`not addressed`    a claim of the paper at a tier that judges only this suite's machinery
=================  =================================================================================

*Shown* means significant after Holm's correction over the claims of one target; claims about the
machinery are a separate family. Intervals are simultaneous over the same family (Bonferroni), so
that *excluded* and *no difference* hold jointly. The family is the target's claims whichever arms
were run: one without a test (an arm is absent, or seeds are too few) counts with p = 1, so that
leaving arms out makes no verdict stronger, and only those that are not testable are left out.
An order of arms is first tested as a trend. A planned seed without a record counts as
failed; with a failed seed the only possible decision is a fault of this suite's machinery.
`repro.report.verdict_words` has the words that pages use for a status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from repro.evidence.estimate import mean_interval
from repro.evidence.verdicts import statistics as st
from repro.evidence.verdicts.expectation import Expectation
from repro.evidence.verdicts.sizes import MINIMUM_DRAWS, Pair
from repro.spec.claim import ALPHA, OWN_BAR, Metric

Status = Literal[
    "reproduced",
    "below a tenth",
    "contradicted",
    "no difference",
    "excluded",
    "inconclusive",
    "not judged",
    "not testable",
    "not run",
    "not addressed",
]
# Statuses in which a direction is significant, whatever its size.
SHOWN: tuple[Status, ...] = ("reproduced", "below a tenth", "contradicted")
# Those of claims that nothing is corrected for.
OUTSIDE_FAMILY: tuple[Status, ...] = ("not testable", "not addressed")

# Marks of verdicts. An exploratory one is of settings that no target states, and is no result; in
# repeats of one process processes do not differ; of mixed versions the libraries may.
POST_HOC, EXPLORATORY = "post hoc", "exploratory"
MIXED_VERSIONS, ONE_PROCESS = "mixed versions", "within one process"
MINIMUM_SEEDS = MINIMUM_DRAWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one claim or expectation.

    Attributes
    ----------
    about
        `claim` (of the paper), `mechanism` (of this suite's machinery), `expectation` (a bar) or
        `paper value`.
    effect, low, high, unit
        Estimate with its interval: 95 % simultaneously over the family for claims, 95 % for
        expectations; None if there is none.
    n
        Paired seeds behind it.
    p
        Two-sided p-value against the claim's bound, with Holm's correction in results of `judge`.
    p_alone, q
        The p-value without correction, and adjusted for the false-discovery rate over the whole
        study (`with_discovery_rate`).
    detectable
        Smallest effect that n seeds show with probability 0.8.
    paper, matters
        The paper's effect in these units, and the smallest that matters; None if not declared.
    marks
        {mark: reason} of what a reader of the verdict must know (`marked`); most have none.
    before
        Of a bar, the status by the records that are blessed on the same kind of device; None where
        there are none.
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
    p_alone: float | None = None
    q: float | None = None
    detectable: float | None = None
    paper: float | None = None
    matters: float | None = None
    marks: Mapping[str, str] = field(default_factory=dict)
    before: Status | None = None

    @property
    def is_bar(self) -> bool:
        """Whether it is about something that this suite requires of itself."""
        return self.about == "expectation" or self.source == OWN_BAR

    @property
    def own_fault(self) -> bool:
        """Whether the verdict shows a fault of this suite's machinery."""
        return self.status == "contradicted" and self.about == "mechanism"

    @property
    def worse(self) -> bool:
        """Whether it is a bar that is missed and was met by the blessed records."""
        return self.is_bar and self.status == "contradicted" and self.before == "reproduced"


def marked(verdict: Verdict, marks: Mapping[str, str]) -> Verdict:
    """Return a verdict with the marks that have a reason; as it was where nothing was run.

    `repro.judge.check` calls this. A further mark needs an entry there and nothing else: what shows
    or counts verdicts (terminal, JSON, tables, report, page, README's blocks) prints the marks that
    there are, in their order. A mark is the words that follow the verdict's own wherever it stands,
    such as `post hoc`; its reason is a sentence added to the verdict's, and an empty one sets no
    mark.
    """
    if verdict.status in ("not run", "not addressed"):
        return verdict
    given = {mark: reason for mark, reason in marks.items() if reason}
    return replace(verdict, marks=given, sentence=". ".join([verdict.sentence, *given.values()]))


def with_discovery_rate(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts of a study with q, the false-discovery rate at which each is shown.

    By Benjamini and Hochberg's method over all claims but those about the machinery, which are
    expected to hold; one without a test has p = 1, if it is testable.
    """
    study = [v for v in verdicts if v.about == "claim" and v.status not in OUTSIDE_FAMILY]
    rates = st.false_discovery([1.0 if v.p_alone is None else v.p_alone for v in study])
    by_verdict = {id(v): q for v, q in zip(study, rates, strict=True) if v.p_alone is not None}
    found = []
    for verdict in verdicts:
        q, words = by_verdict.get(id(verdict)), verdict.sentence
        if q is not None and q >= ALPHA and verdict.status in SHOWN:
            words += f". Over the study's {len(study)} statements q = {q:.2g}: not shown at a rate "
            words += "of 5 %"
        found.append(replace(verdict, q=q, sentence=words))
    return found


def judge_expectation(
    expectation: Expectation,
    metric: Metric,
    values: Mapping[Pair, float],
    absent: str | None,
    lost: str = "",
) -> Verdict:
    """Return the verdict of one expectation on the values of its arm, one per seed or repeat.

    `lost` is a sentence on planned seeds of the arm that failed or have no record; else empty.
    """
    verdict = Verdict(
        name=f"{expectation.arm}.{expectation.metric}",
        statement=f"{metric.title} of {expectation.arm}: {expectation.text()} {metric.unit}"
        + (" in every seed" if expectation.statistic == "every_seed" else ""),
        source=f"{expectation.source}: {expectation.because}",
        about="paper value" if expectation.source == "paper" else "expectation",
        status="not run",
        sentence=absent or f"no record has {expectation.metric}",
        unit=metric.unit,
        n=len(values),
    )
    if absent or not values:
        return verdict
    interval = mean_interval(list(values.values()))
    low, high = interval.low, interval.high
    if expectation.statistic == "every_seed" or low is None or high is None:
        low = high = None
        inside = [expectation.holds(value) for value in values.values()]
        status: Status = "reproduced" if all(inside) else "contradicted"
        listed = ", ".join(f"{value:.4g}" for value in values.values())
        sentence = f"{sum(inside)} of {len(inside)} inside: {listed}"
    else:
        least, most = expectation.accept
        outside = (least is not None and high < least) or (most is not None and low > most)
        inside_whole = expectation.holds(low) and expectation.holds(high)
        status = "contradicted" if outside else "reproduced" if inside_whole else "inconclusive"
        ends = f"95 % interval {low:.4g} to {high:.4g}"
        sentence = f"mean {interval.value:.4g}, {ends}, n = {interval.n}"
    sentence += "" if expectation.goal is None else f"; goal {expectation.goal:g}"
    if lost and status == "reproduced":
        status, sentence = "inconclusive", f"{sentence}. {lost}"
    effect = interval.value
    return replace(verdict, status=status, sentence=sentence, effect=effect, low=low, high=high)
