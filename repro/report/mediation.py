r"""Mediation: whether a format moves the take-off by as much as its shift in entropy should.

On a rung of the needle the exploration controls say what the entropy of the deciding token is
worth, and the formats say how much of it they bring:

    slope      of log(steps to the take-off) on that entropy (nats), over BF16 and the controls,
               both centred within each seed
    mediated   slope * mean over seeds of (format's entropy - BF16's)
    observed   mean over seeds of log(format's steps / BF16's)

If the paper's mechanism is all that a format does, the two agree; a mediated effect near nothing
says that the format's shift is too small to matter here, whatever the observed one is.

Intervals are Student's t over the jackknife's pseudo-values, seeds being the blocks
(`jackknife_interval`): a slope and a product are no means over seeds, and a percentile bootstrap of
so few seeds is too narrow.

The entropy of a record is the policy's own, at the scale's temperature, also where the rollout is
drawn warmer: exploration leaves the policy alone. What such an arm explores with is the entropy of
what it *draws* from. The decision is between two tokens, so it follows from the record's (`drawn`):
with the smaller share p of entropy h, odds to the power 1 / T. The mean over prompts of h stands in
for each prompt's.

Easy to get wrong: regressing on the recorded entropies of the controls, which hardly differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from repro.evidence.statistics import Interval, jackknife_interval
from repro.evidence.verdict import MINIMUM_SEEDS
from repro.judge.check import Checked
from repro.judge.gathering import Evidence
from repro.report.dose_response import arm_name
from repro.report.tables import table
from repro.spec.arm import Arm
from repro.spec.target import Target
from repro.targets.ladder.needle import BF16, NEEDLE_05, NEEDLE_4, NEEDLE_40

ENTROPY, STEPS, TOOK_OFF = "entropy_decision_first", "take_off_steps", "took_off"
RUNGS = (NEEDLE_40, NEEDLE_4, NEEDLE_05)
# {arm: (entropy that it draws with, log steps)} of one seed.
Block = Mapping[str, tuple[float, float]]
HEADS = ["rung", "format", "entropy of the decision, nats", "steps over BF16's, by the entropy"]
HEADS += ["steps over BF16's, observed", "seeds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mediated:
    """One format on one rung.

    Attributes
    ----------
    slope
        Logarithm of steps per nat, negative where entropy helps.
    shift
        Of the decision's entropy, nats.
    mediated, observed
        Logarithms of the quotient of steps, the format's over BF16's.
    """

    rung: Target
    arm: Arm
    slope: Interval
    shift: Interval
    mediated: Interval
    observed: Interval


def drawn(entropy: float, temperature: float) -> float:
    """Return the entropy of a choice between two at a temperature, nats, given that at 1."""
    from scipy.optimize import brentq

    if entropy <= 0 or temperature == 1:
        return max(0.0, entropy)
    share = 0.5
    if entropy < math.log(2):
        share = brentq(lambda p: _of_two(p) - entropy, 1e-300, 0.5, xtol=1e-15)
    odds = (share / (1 - share)) ** (1 / temperature)
    return _of_two(odds / (1 + odds))


def _of_two(share: float) -> float:
    return -share * math.log(share) - (1 - share) * math.log1p(-share) if share > 0 else 0.0


def mediation(checks: Sequence[Checked]) -> list[Mediated]:
    """Return each format on each rung that has the records, from the checks of one device."""
    by_name = {checked.selection.target.name: checked.evidence for checked in checks}
    rungs = [rung for rung in RUNGS if rung.name in by_name]
    return [row for rung in rungs for row in of_rung(rung, by_name[rung.name])]


def of_rung(rung: Target, evidence: Evidence) -> list[Mediated]:
    """Return the formats of a rung; none without five seeds of BF16, a control and a format.

    Arms of which less than half of the runs took off are left out: their steps are not known.
    """
    took_off = evidence.values(TOOK_OFF)
    arms = {
        arm.name: arm
        for arm in rung.arms
        if (runs := took_off.get(arm.name)) and fmean(runs.values()) >= 0.5
    }
    controls = [arm.name for arm in arms.values() if arm.exploration is not None]
    if BF16.name not in arms or not controls:
        return []
    # Noise of a rollout is not in the recorded entropy either, and has no such simple form.
    formats = [
        arm for arm in arms.values()
        if arm.weight_format != BF16.weight_format and arm.noise is None
    ]  # fmt: skip
    rows = []
    for arm in formats:
        blocks = _blocks(evidence, [arms[name] for name in (BF16.name, arm.name, *controls)])
        if len(blocks) >= MINIMUM_SEEDS and _spread(blocks, controls) > 0:
            rows.append(mediated(rung, arm, blocks, controls))
    return rows


def _blocks(evidence: Evidence, arms: Sequence[Arm]) -> list[Block]:
    """Return the seeds that all of the arms have."""
    entropies, steps = evidence.values(ENTROPY), evidence.values(STEPS)
    per_arm = [
        {
            seed: (_explored(arm, entropies[arm.name][seed]), math.log(steps[arm.name][seed]))
            for seed in set(entropies.get(arm.name, {})) & set(steps.get(arm.name, {}))
        }
        for arm in arms
    ]
    shared = sorted(set.intersection(*(set(values) for values in per_arm)))
    return [
        {arm.name: values[seed] for arm, values in zip(arms, per_arm, strict=True)}
        for seed in shared
    ]


def _explored(arm: Arm, entropy: float) -> float:
    """Return the entropy that an arm draws the decision with."""
    return entropy if arm.exploration is None else drawn(entropy, arm.exploration.temperature)


def mediated(rung: Target, arm: Arm, blocks: Sequence[Block], controls: Sequence[str]) -> Mediated:
    """Return one format's estimates, with their intervals over the seeds."""

    def slope(of: Sequence[Block]) -> float:
        return _slope(of, controls)

    def shift(of: Sequence[Block]) -> float:
        return fmean(block[arm.name][0] - block[BF16.name][0] for block in of)

    def observed(of: Sequence[Block]) -> float:
        return fmean(block[arm.name][1] - block[BF16.name][1] for block in of)

    def product(of: Sequence[Block]) -> float:
        return slope(of) * shift(of)

    def interval(statistic: Callable[[Sequence[Block]], float]) -> Interval:
        return jackknife_interval(statistic, blocks)

    return Mediated(
        rung=rung,
        arm=arm,
        slope=interval(slope),
        shift=interval(shift),
        mediated=interval(product),
        observed=interval(observed),
    )


def _centred(blocks: Sequence[Block], controls: Sequence[str]) -> list[tuple[float, float]]:
    """Return (entropy, log steps) of BF16 and the controls, each less its seed's mean."""
    pairs = []
    for block in blocks:
        points = [block[name] for name in (BF16.name, *controls)]
        x_mean, y_mean = fmean(x for x, _ in points), fmean(y for _, y in points)
        pairs += [(x - x_mean, y - y_mean) for x, y in points]
    return pairs


def _spread(blocks: Sequence[Block], controls: Sequence[str]) -> float:
    return sum(x * x for x, _ in _centred(blocks, controls))


def _slope(blocks: Sequence[Block], controls: Sequence[str]) -> float:
    pairs = _centred(blocks, controls)
    return sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)


def in_words(rows: Sequence[Mediated]) -> str:
    """Return the sentence about NVFP4 on the rung of 4 %; empty where it has no records."""
    row = next(
        (row for row in rows if (row.rung.name, row.arm.weight_format) == (NEEDLE_4.name, "nvfp4")),
        None,
    )
    if row is None:
        return ""
    return (
        f"NVFP4 shifts the deciding token's entropy by {_nats(row.shift)}. By what the exploration "
        "controls show such a shift to be worth, NVFP4 would take "
        f"{_quotient(row.mediated)} times BF16's steps; it took {_quotient(row.observed)}."
    )


def mediation_table(rows: Sequence[Mediated]) -> list[str]:
    """Return the table for the folded details, with the method; nothing without records."""
    if not rows:
        return []
    slopes = {row.rung.name: row.slope for row in rows}
    worth = "; ".join(
        f"`{name}` {interval.value:+.3g} ({interval.low:+.3g} to {interval.high:+.3g})"
        for name, interval in slopes.items()
    )
    lines = [
        f"""\
What a nat of the deciding token's entropy is worth, in the logarithm of the steps to the take-off,
over BF16 and the exploration controls of each rung, within seeds: {worth}. Times a format's shift
in that entropy, beside what was observed. Controls count with the entropy that they draw with.
Intervals: 95 %, Student's t over jackknife pseudo-values of seeds, not adjusted for several rows;
no part of any verdict.""",
        "",
    ]
    return lines + table(
        HEADS,
        [
            [
                f"`{row.rung.name}`",
                arm_name(row.arm),
                _nats(row.shift),
                _quotient(row.mediated),
                _quotient(row.observed),
                f"{row.shift.n}",
            ]
            for row in rows
        ],
    )


def _nats(interval: Interval) -> str:
    assert interval.low is not None
    assert interval.high is not None
    return f"{interval.value:+.2g} nats, {interval.low:+.2g} to {interval.high:+.2g}"


def _quotient(interval: Interval) -> str:
    assert interval.low is not None
    assert interval.high is not None
    value, low, high = (math.exp(end) for end in (interval.value, interval.low, interval.high))
    return f"{value:.3g} ({low:.3g} to {high:.3g})"
