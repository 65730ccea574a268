"""The sentence of a claim's verdict: estimate, interval, p-value and the sizes compared with."""

from __future__ import annotations

from repro.evidence.verdicts.comparison import Compared
from repro.evidence.verdicts.sizes import Sizes
from repro.evidence.verdicts.verdict import Verdict
from repro.spec.claim import Claim


def measured(
    claim: Claim, verdict: Verdict, compared: Compared, family: int, confidence: float
) -> str:
    """Return a text with estimate, interval and p-value.

    Parameters
    ----------
    family
        Claims that were corrected together.
    confidence
        Of the interval, for the whole family together; with few values in an exact test, the
        confidence of their range.
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


def sized(verdict: Verdict, sizes: Sizes | None) -> str:
    """Return the size that the effect is compared with: the paper's, else the smallest."""
    if sizes is None:
        return ""
    share = f" ({sizes.share})" if sizes.share and verdict.unit != "x" else ""
    if verdict.paper is None:
        return f"; from {verdict.matters:.3g} {verdict.unit} on it would matter{share}"
    return f"; the paper's size here is {verdict.paper:.3g} {verdict.unit}{share}"


def could_show(claim: Claim, verdict: Verdict, compared: Compared, pair: str) -> str:
    """Return what an inconclusive comparison could have shown."""
    if compared.deviation == 0:
        return "All seeds agree to the last digit, so no test can decide"
    what = "a factor" if claim.log else "an effect"
    return (
        f"{verdict.n} {pair}s would have shown {what} of {verdict.detectable:.3g} "
        f"{verdict.unit} (80 % power)"
    )
