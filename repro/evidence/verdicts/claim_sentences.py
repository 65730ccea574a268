"""The sentence of a claim's verdict: what was measured, how surely, and beside which size."""

from __future__ import annotations

from repro.evidence.verdicts.comparison import RANKED, Compared
from repro.evidence.verdicts.sizes import Sizes
from repro.evidence.verdicts.verdict import Verdict
from repro.spec.claim import Claim, Test

_ONE_ARM = ("gain", "no_gain")
_TESTS: dict[Test, str] = {
    "t": "",
    "sign_flip": ", exact sign-flip test of the claimed direction",
    "mcnemar": ", McNemar's exact test",
}


def measured(
    claim: Claim, verdict: Verdict, compared: Compared, family: int, confidence: float
) -> str:
    """Return estimate, interval and p in words.

    Parameters
    ----------
    family
        Claims that were corrected together.
    confidence
        Of the interval, for all of the family together; of the few values of an exact test, what
        their range has.
    """
    sign = "" if claim.is_ratio else "+"
    margin = "" if claim.margin is None else f" (margin {claim.margin:g})"
    counted = " prompts" if claim.paired_by == "prompt" else ""
    together = f" (simultaneous over {family})" if family > 1 else ""
    p_text = "p < 0.001" if verdict.p is not None and verdict.p < 0.001 else f"p = {verdict.p:.2g}"
    test = _TESTS[compared.test]
    after = f" after Holm over {family}" if family > 1 else ""
    median = "median " if compared.test == "sign_flip" else ""
    return (
        f"{_contrast(claim)}{median}{verdict.effect:{sign}.3g} {verdict.unit}, "
        f"{100 * confidence:.3g} % interval{together} {verdict.low:{sign}.3g} to "
        f"{verdict.high:{sign}.3g}, n = {verdict.n}{counted}{margin}; {p_text}{test}{after}"
    )


def _contrast(claim: Claim) -> str:
    """Return what is compared with what; empty for an arm's own gain."""
    if claim.kind in RANKED:
        return "slope per place "
    if claim.kind == "slope":
        given = f", given {' and '.join(claim.given)}" if claim.given else ""
        return f"at {claim.dose:+g} of {claim.against}{given}: "
    if claim.kind == "interaction":
        sign = "/" if claim.is_ratio else "-"
        first, second = (f" {sign} ".join(pair) for pair in (claim.arms[:2], claim.arms[2:]))
        return f"({first}) {sign} ({second}): "
    if claim.kind in _ONE_ARM:
        return ""
    return f"{(' / ' if claim.is_ratio else ' - ').join(claim.arms)}: "


def sized(verdict: Verdict, sizes: Sizes | None) -> str:
    """Return what the effect is held against: the paper's size here, or what matters."""
    if sizes is None:
        return ""
    share = f" ({sizes.share})" if sizes.share and verdict.unit != "x" else ""
    if verdict.paper is None:
        return f"; from {verdict.matters:.3g} {verdict.unit} on it would matter{share}"
    return f"; the paper's size here is {verdict.paper:.3g} {verdict.unit}{share}"


def could_show(claim: Claim, verdict: Verdict, compared: Compared) -> str:
    """Return what an inconclusive comparison could have shown, and how many pairs would decide."""
    if compared.deviation == 0:
        return "All seeds agree to the last digit, so no test can decide"
    what = "a factor" if claim.is_ratio else "an effect"
    words = (
        f"{verdict.n} {claim.paired_by}s would have shown {what} of {verdict.detectable:.3g} "
        f"{verdict.unit} (80 % power)"
    )
    if verdict.needed is not None and verdict.needed > verdict.n:
        words += f"; if the effect is as measured, {verdict.needed} {claim.paired_by}s would decide"
    return words
