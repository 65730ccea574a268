"""Measures that are shown beside the means of two arms, with bootstrap intervals.

The interquartile mean leaves out a quarter of the runs at either end, so that a collapse does not
decide it; the probability of improvement is that a run of one arm is better than one of the other,
ties half. Both are common in reports on reinforcement learning (arXiv 2108.13264). They decide no
verdict: at eight runs the 95 % interval covers the truth in about 90 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from repro.evidence.estimate import Interval
from repro.spec.claim import Claim

_RESAMPLES = 9999
# Of the bootstrap's generator: the same values give the same interval.
_SEED = 0
_QUARTER = 0.25


def secondary(
    claim: Claim, blocks: Sequence[Sequence[float]], *, paired: bool
) -> dict[str, Interval]:
    """Return the measures that a claim of two arms declares, by name.

    `iqm` is the difference of the arms' interquartile means, or the logarithm of their quotient, in
    the claimed direction; `improvement` a probability.

    Parameters
    ----------
    blocks
        Pairs of values in the order of the claim's arms.
    paired
        Whether seeds are drawn, so that both values of a pair go together, or each arm's runs.
    """
    from scipy.stats import bootstrap

    measures = {"iqm": _iqm_log if claim.log else _iqm, "improvement": _improvement}
    first, second = zip(*blocks, strict=True)
    if next(iter(claim.contrast.values())) < 0:
        first, second = second, first
    found = {}
    for name in claim.secondary:
        measure = measures[name]
        value = float(measure([*first], [*second]))
        drawn = bootstrap(
            (first, second),
            measure,
            paired=paired,
            vectorized=True,
            n_resamples=_RESAMPLES,
            method="percentile",
            rng=_SEED,
        ).confidence_interval
        found[name] = Interval(
            value=value, low=float(drawn.low), high=float(drawn.high), n=len(blocks)
        )
    return found


def _iqm(first: Any, second: Any, axis: int = -1) -> Any:
    from scipy.stats import trim_mean

    return trim_mean(first, _QUARTER, axis=axis) - trim_mean(second, _QUARTER, axis=axis)


def _iqm_log(first: Any, second: Any, axis: int = -1) -> Any:
    import numpy as np
    from scipy.stats import trim_mean

    one, other = (np.asarray(trim_mean(column, _QUARTER, axis=axis)) for column in (first, second))
    return np.log(one) - np.log(other)


def _improvement(first: Any, second: Any, axis: int = -1) -> Any:
    """Return the share of pairs of runs, all with all, in which the first is above, ties half."""
    import numpy as np

    one = np.expand_dims(np.moveaxis(np.asarray(first), axis, -1), -1)
    other = np.expand_dims(np.moveaxis(np.asarray(second), axis, -1), -2)
    return np.mean((one > other) + 0.5 * (one == other), axis=(-2, -1))


def secondary_text(measures: dict[str, Interval], unit: str, *, log: bool) -> str:
    """Return the measures as the end of a sentence."""
    words = []
    for name, of in measures.items():
        ends = (of.value, of.low or 0.0, of.high or 0.0)
        if name == "improvement":
            what = "probability of improvement {:.2f} ({:.2f} to {:.2f})"
        elif log:
            what, ends = "IQM {:.3g} x ({:.3g} to {:.3g})", tuple(map(math.exp, ends))
        else:
            what = f"IQM {{:+.3g}} {unit} ({{:+.3g}} to {{:+.3g}})"
        words.append(what.format(*ends))
    return f"; {', '.join(words)}, by bootstrap" if words else ""
