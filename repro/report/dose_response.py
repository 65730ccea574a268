r"""The dose-response: what each arm's dose is before training, and what it does to the take-off.

Two sets of records meet by the arms' names: `dose_start` measures each arm before its first step,
`needle_dose` and the rung that it shares arms with train it.

dose
    KL(BF16 policy || arm's policy), nats per token of completions; mean over rounding draws.
response
    Steps to the take-off over those of the BF16 arm, seed by seed: the mean of the logarithm, with
    an interval that holds for all arms drawn together (Bonferroni's). Below one is sooner.

The paper shows no KL. It shows that rounding to NVFP4 raises the entropy by 23 % (Fig. 5, step 0),
so its dose is looked for where the rounded arms' own entropy rises by as much: straight between
neighbours on the logarithm of the KL. Noise on the norms is left out of it: the paper's figure is
of rounding alone.

Easy to get wrong: comparing a noisy arm with the format below it. Both doses here are from BF16.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from repro.evidence.statistics import mean_interval
from repro.judge.check import Checked
from repro.judge.gathering import Evidence
from repro.spec.arm import Arm
from repro.spec.effect import ALPHA
from repro.targets import paper_effects
from repro.targets.ladder.dose_start import DOSE_START
from repro.targets.ladder.doses import NEEDLE_DOSE
from repro.targets.ladder.needle import BF16, NEEDLE_4

Kind = Literal["rounding", "added noise", "Gaussian noise"]
# Chosen: neighbours further apart than half a decade leave the place between them open.
_WIDE = math.sqrt(10)
# Of runs that do not take off the steps are not known: of more than half, no quotient is left.
_TOOK_OFF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Dose:
    """An arm before training.

    Attributes
    ----------
    kl
        Nats per token of completions; positive but for the BF16 arm.
    rise
        By what share its own entropy lies above the BF16 arm's.
    draws
        Rounding draws behind both.
    """

    arm: Arm
    kl: float
    rise: float
    draws: int

    @property
    def kind(self) -> Kind:
        """Where the noise comes from; added noise goes on top of a format's rounding."""
        if self.arm.noise is not None:
            return "added noise"
        return "rounding" if self.arm.weight_noise is None else "Gaussian noise"


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
    kl
        Interpolated, nats per token.
    below, above
        The neighbouring arms.
    """

    kl: float
    below: Dose
    above: Dose

    @property
    def is_wide(self) -> bool:
        """Whether the neighbours are too far apart for a single place."""
        return self.above.kl > _WIDE * self.below.kl


@dataclass(frozen=True, slots=True, kw_only=True)
class DoseResponse:
    """All of it on one device.

    Attributes
    ----------
    responses
        By rising dose.
    place
        The paper's dose; None where no two neighbours have its entropy between them.
    paper_ratio
        The paper's own quotient of steps.
    """

    responses: tuple[Response, ...]
    place: Place | None
    paper_ratio: float


PAPER_RISE = paper_effects.ENTROPY["nvfp4"].paper or 0.0
PAPER_RATIO = 1 / (paper_effects.FORMAT_TAKE_OFF["bf16"].paper or 1.0)


def dose_response(checks: Sequence[Checked]) -> DoseResponse | None:
    """Return the dose-response from the checks of one device; None without records of either."""
    by_name = {checked.selection.target.name: checked.evidence for checked in checks}
    start = by_name.get(DOSE_START.name)
    planted = doses(start) if start is not None else []
    trained = [by_name[name] for name in (NEEDLE_DOSE.name, NEEDLE_4.name) if name in by_name]
    steps, took_off = (_merged(trained, name) for name in ("take_off_steps", "took_off"))
    responses = _responses(planted, steps, took_off)
    if not responses:
        return None
    return DoseResponse(
        responses=tuple(responses), place=place_of(planted, PAPER_RISE), paper_ratio=PAPER_RATIO
    )


def doses(start: Evidence) -> list[Dose]:
    """Return each recorded arm's dose, by rising KL; none without the BF16 arm."""
    kls, entropies = start.values("kl_completions"), start.values("entropy_own")
    base = entropies.get(BF16.name, {})
    planted = []
    for arm in DOSE_START.arms:
        # Seed by seed: an entropy moves with the problems' samples more than with the rounding.
        shared = sorted(set(kls.get(arm.name, {})) & set(entropies.get(arm.name, {})) & set(base))
        if shared:
            own, plain = (fmean(of[seed] for seed in shared) for of in (entropies[arm.name], base))
            kl = fmean(kls[arm.name][seed] for seed in shared)
            planted.append(Dose(arm=arm, kl=kl, rise=own / plain - 1, draws=len(shared)))
    return sorted(planted, key=lambda dose: dose.kl)


def place_of(planted: Sequence[Dose], rise: float) -> Place | None:
    """Return where the entropy of rounded arms rises by a share, or None outside of what there is.

    Straight on log KL between the first neighbours, by rising KL, that have the rise between them.
    """
    rounded = [dose for dose in planted if dose.kind == "rounding" and dose.kl > 0]
    for below, above in itertools.pairwise(rounded):
        if below.rise <= rise <= above.rise and below.rise < above.rise:
            share = (rise - below.rise) / (above.rise - below.rise)
            kl = below.kl * (above.kl / below.kl) ** share
            return Place(kl=kl, below=below, above=above)
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
        if dose.arm.name != BF16.name and dose.kl > 0 and (own := steps.get(dose.arm.name))
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
    """Return what the picture shows in two sentences, for a page."""
    sooner = [one for one in response.responses if one.high is not None and one.high < 1]
    words = "none of them takes off after fewer steps than BF16"
    if sooner:
        first = sooner[0]
        words = (
            f"{len(sooner)} take off after fewer steps than BF16, the smallest at a KL of "
            f"{first.dose.kl:.2g} nats ({_named(first)})"
        )
    where = "No two recorded arms have the paper's rise of entropy between them"
    if response.place is not None:
        neighbours = " and ".join(
            arm_name(dose.arm) for dose in (response.place.below, response.place.above)
        )
        where = (
            f"The paper's dose, own entropy {100 * PAPER_RISE:+.0f} %, lies at a KL of "
            f"{response.place.kl:.2g} nats (between {neighbours})"
        )
    return (
        f"Of {len(response.responses)} doses on the rung of 4 %, {words}. {where}; the paper has "
        f"{response.paper_ratio:.2g} of the steps."
    )


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
