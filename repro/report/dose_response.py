r"""The dose-response: how large each arm's dose is, and what it does to the take-off.

dose
    Where `dose_start` has records: KL(BF16 policy || arm's policy), nats per token of completions,
    before training; mean over rounding draws. Otherwise the entropy of the deciding token over the
    BF16 arm's, in the first ten steps of the trained runs, seed by seed. An arm with added noise
    has none of the latter: a record's entropy is the policy's own, without its noise.
response
    Steps to the take-off over those of the BF16 arm, seed by seed: the mean of the logarithm, with
    an interval that holds for all arms drawn together (Bonferroni's). Below one is sooner.

The paper shows no KL. It shows that rounding to NVFP4 raises the entropy by 23 % (Fig. 5, step 0).
Its dose stands where the entropy of the *deciding token* rises by as much; on the axis of KL, that
is straight between neighbouring rounded arms, on the logarithm of the KL. The entropy of all tokens
that a policy samples would be the paper's own measure, but here it falls with the largest dose (two
bits: -9 %), because answers change their length with it.

Easy to get wrong: comparing a noisy arm with the format below it. Both doses here are from BF16.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from repro.evidence.statistics import Interval, mean_interval
from repro.judge.check import Checked
from repro.judge.gathering import Evidence
from repro.spec.arm import Arm
from repro.spec.effect import ALPHA
from repro.targets import paper_effects
from repro.targets.ladder.dose_start import DOSE_START
from repro.targets.ladder.doses import NEEDLE_DOSE
from repro.targets.ladder.needle import BF16, NEEDLE_4

Kind = Literal["rounding", "added noise", "Gaussian noise"]
Axis = Literal["kl", "decision"]
# Chosen: neighbours further apart than half a decade leave the place between them open.
_WIDE = math.sqrt(10)
# Of runs that do not take off the steps are not known: of more than half, no quotient is left.
_TOOK_OFF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Dose:
    """An arm's dose, from BF16.

    Attributes
    ----------
    kl
        Nats per token of completions, positive but for the BF16 arm; None without records.
    rise
        By what share the deciding token's entropy lies above the BF16 arm's, with its interval over
        seeds (95 %), each of which rounds differently; None of an arm with added noise.
    draws
        Rounding draws behind the KL, or behind the rise where there is no KL.
    """

    arm: Arm
    kl: float | None
    rise: Interval | None
    draws: int

    @property
    def kind(self) -> Kind:
        """Where the noise comes from; added noise goes on top of a format's rounding."""
        if self.arm.noise is not None:
            return "added noise"
        return "rounding" if self.arm.weight_noise is None else "Gaussian noise"

    def on(self, axis: Axis) -> float:
        """Return its place on an axis that it has one on."""
        place = self.kl if axis == "kl" else None if self.rise is None else self.rise.value
        if place is None:
            raise ValueError(f"dose of {self.arm.name}: it has no place on the axis {axis}")
        return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An arm's dose with what it did to the take-off.

    Attributes
    ----------
    ratio, low, high
        Steps to the take-off over the BF16 arm's, with the simultaneous interval; the latter is
        None of fewer than two pairs, and where too few runs took off.
    pairs
        Seeds that both arms have.
    took_off
        Whether at least half of the runs of both arms did.
    """

    dose: Dose
    ratio: float
    low: float | None
    high: float | None
    pairs: int
    took_off: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the paper's dose lies among those recorded.

    Attributes
    ----------
    at
        On the axis: a share of entropy, or an interpolated KL in nats per token.
    below, above
        The neighbouring arms.
    is_wide
        Whether it was interpolated between arms too far apart for a single place.
    """

    at: float
    below: Dose
    above: Dose
    is_wide: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DoseResponse:
    """All of it on one device.

    Attributes
    ----------
    axis
        What doses are measured by.
    responses
        By rising dose.
    place
        The paper's dose; None where no two neighbours have its entropy between them.
    paper_ratio
        The paper's own quotient of steps.
    """

    axis: Axis
    responses: tuple[Response, ...]
    place: Place | None
    paper_ratio: float


PAPER_RISE = paper_effects.ENTROPY["nvfp4"].paper or 0.0
PAPER_RATIO = 1 / (paper_effects.FORMAT_TAKE_OFF["bf16"].paper or 1.0)


def dose_response(checks: Sequence[Checked]) -> DoseResponse | None:
    """Return the dose-response from the checks of one device; None without records of it."""
    by_name = {checked.selection.target.name: checked.evidence for checked in checks}
    trained = [by_name[name] for name in (NEEDLE_DOSE.name, NEEDLE_4.name) if name in by_name]
    planted = doses(by_name.get(DOSE_START.name, Evidence()), trained)
    axis: Axis = "kl" if any(dose.kl is not None for dose in planted) else "decision"
    planted = _on(axis, planted)
    steps, took_off = (_merged(trained, name) for name in ("take_off_steps", "took_off"))
    responses = _responses(planted, steps, took_off)
    if not responses:
        return None
    place = place_of(planted, PAPER_RISE, axis)
    return DoseResponse(axis=axis, responses=tuple(responses), place=place, paper_ratio=PAPER_RATIO)


def doses(start: Evidence, trained: Sequence[Evidence]) -> list[Dose]:
    """Return each arm's dose, as far as the records before training and of it have one."""
    kls = start.values("kl_completions")
    entropies = _merged(trained, "entropy_decision_first")
    base = entropies.get(BF16.name, {})
    planted = []
    for arm in DOSE_START.arms:
        own = {} if arm.noise is not None else entropies.get(arm.name, {})
        # Seed by seed: an entropy moves with the problems more than with the rounding.
        rises = [own[seed] / base[seed] - 1 for seed in sorted(set(own) & set(base))]
        kl = fmean(of.values()) if (of := kls.get(arm.name)) else None
        rise = mean_interval(rises) if rises else None
        draws = len(kls.get(arm.name, rises))
        planted.append(Dose(arm=arm, kl=kl, rise=rise, draws=draws))
    return planted


def _on(axis: Axis, planted: Sequence[Dose]) -> list[Dose]:
    """Return the doses that have a place on an axis, by it."""
    known = [dose for dose in planted if (dose.kl if axis == "kl" else dose.rise) is not None]
    return sorted(known, key=lambda dose: dose.on(axis))


def place_of(planted: Sequence[Dose], rise: float, axis: Axis) -> Place | None:
    """Return where the deciding token's entropy rises by a share, or None outside of what there is.

    Between the first neighbours, by rising dose, that have the rise between them; on the axis of KL
    straight on its logarithm.
    """
    rounded = [
        dose
        for dose in _on(axis, planted)
        if dose.kind == "rounding" and dose.rise is not None and (axis != "kl" or dose.on(axis) > 0)
    ]
    for below, above in itertools.pairwise(rounded):
        low, high = below.on("decision"), above.on("decision")
        if not (low <= rise <= high and low < high):
            continue
        if axis == "decision":
            return Place(at=rise, below=below, above=above, is_wide=False)
        quotient = above.on("kl") / below.on("kl")
        at = below.on("kl") * quotient ** ((rise - low) / (high - low))
        return Place(at=at, below=below, above=above, is_wide=quotient > _WIDE)
    return None


def _merged(trained: Sequence[Evidence], metric: str) -> dict[str, Mapping[int, float]]:
    """Return {arm: {seed: value}} of several targets; the first that has an arm counts."""
    merged: dict[str, Mapping[int, float]] = {}
    for evidence in reversed(trained):
        merged |= evidence.values(metric)
    return merged


def _responses(
    planted: Sequence[Dose],
    steps: Mapping[str, Mapping[int, float]],
    took_off: Mapping[str, Mapping[int, float]],
) -> list[Response]:
    base = steps.get(BF16.name, {})
    compared = {
        dose.arm.name: [math.log(own[seed] / base[seed]) for seed in sorted(set(own) & set(base))]
        for dose in planted
        if dose.arm.name != BF16.name and (own := steps.get(dose.arm.name))
    }
    compared = {arm: values for arm, values in compared.items() if values}
    return [
        _response(dose, compared[dose.arm.name], took_off, len(compared))
        for dose in planted
        if dose.arm.name in compared
    ]


def _response(
    dose: Dose,
    logarithms: Sequence[float],
    took_off: Mapping[str, Mapping[int, float]],
    together: int,
) -> Response:
    interval = mean_interval(logarithms, 1 - ALPHA / together)
    arms = [took_off.get(name, {}) for name in (dose.arm.name, BF16.name)]
    enough = all(of and fmean(of.values()) >= _TOOK_OFF for of in arms)

    def end(value: float | None) -> float | None:
        return math.exp(value) if enough and value is not None else None

    return Response(
        dose=dose,
        ratio=math.exp(interval.value),
        low=end(interval.low),
        high=end(interval.high),
        pairs=interval.n,
        took_off=enough,
    )


def in_words(response: DoseResponse) -> str:
    """Return what the picture shows, for a page: the axis, what is sooner, the paper's place."""
    return f"{_axis_words(response)} {_sooner_words(response)} {_place_words(response)}"


def _axis_words(response: DoseResponse) -> str:
    if response.axis == "kl":
        return (
            "A dose is the KL from BF16 before training, per token of completions; the paper's is "
            "placed by the entropy of the deciding token."
        )
    lowered = [
        arm_name(one.dose.arm)
        for one in response.responses
        if one.dose.rise is not None and (one.dose.rise.high or 0.0) < 0
    ]
    but = f" ({', '.join(lowered)} lowers it)" if lowered else ""
    return (
        "A dose here is how much an arm adds to the entropy of the deciding token, in the first "
        f"ten steps{but}. It grows with multiples of NVFP4's rounding and with two bits; the "
        "entropy of all tokens does not, for it changes with the length of answers. The KL before "
        "training is not recorded yet, and added noise is in no recorded entropy."
    )


def _sooner_words(response: DoseResponse) -> str:
    sooner = [one for one in response.responses if one.high is not None and one.high < 1]
    words = "none takes off after fewer steps than BF16"
    if sooner:
        words = (
            f"{len(sooner)} take off after fewer steps than BF16, the smallest dose of them "
            f"{_dose_words(response.axis, sooner[0].dose.on(response.axis))} ({_named(sooner[0])})"
        )
    return f"Of {len(response.responses)} doses on `{NEEDLE_4.name}`, {words}."


def _place_words(response: DoseResponse) -> str:
    rise = f"{100 * PAPER_RISE:+.0f} %"
    paper = f"the paper's runs take {response.paper_ratio:.2g} of the steps"
    if response.place is None:
        return f"No two recorded arms have the paper's rise of {rise} between them; {paper}."
    place = response.place
    between = " and ".join(_raised(dose) for dose in (place.below, place.above))
    at = "" if response.axis == "decision" else f", {_dose_words('kl', place.at)}"
    return f"The paper's dose, {rise}{at}, lies between {between}; there {paper}."


def _dose_words(axis: Axis, dose: float) -> str:
    return f"{100 * dose:+.2g} %" if axis == "decision" else f"a KL of {dose:.2g} nats"


def _raised(dose: Dose) -> str:
    return f"{arm_name(dose.arm)} ({100 * dose.on('decision'):+.2g} %)"


def _named(one: Response) -> str:
    return f"{arm_name(one.dose.arm)}: {one.ratio:.2f}, {one.low:.2f} to {one.high:.2f}"


def arm_name(arm: Arm) -> str:
    """Return an arm's dose in a few letters: `NVFP4 x3`, `AQN 0.1`, `INT2`."""
    if arm.noise is not None:
        return f"AQN {arm.noise.sigma_start:g}"
    if arm.weight_noise is not None:
        return f"Gaussian as {arm.weight_noise.matched_to.upper()}"
    if arm.rounding is not None:
        factor = "" if arm.rounding.factor == 1 else f" x{arm.rounding.factor:g}"
        return f"{arm.rounding.format.upper()}{factor}"
    return arm.weight_format.upper()
