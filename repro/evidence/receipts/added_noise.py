"""Receipts of the added noise: how often, on how many norms and channels, and how strong."""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.evidence.record import Record
from repro.spec.shapes import shape_by_name

# Realised sigma over hundreds of channels; five standard errors at 400 channels are 18 %.
SIGMA_RATIO = (0.75, 1.25)
# float32 draws are hardly ever 0; rounded to bfloat16, most of them may leave a gain unchanged.
CHANNELS_LEAST = 0.99


def noise(record: Record) -> Iterator[str]:
    """Yield why the noise of rollouts was not what its form adds: to how much, and how strong."""
    done, planned = record.facts.get("noise") or {}, record.config["arm"]["noise"] or {}
    form, rollouts = planned.get("form", "none"), done.get("rollouts_asked") or 0
    inert = form in ("none", "as_published")
    if not inert and not (done.get("modules") and done.get("channels_changed")):
        yield f"the added noise touched nothing: facts.noise is {done}"
        return
    norms = 0
    if not inert and rollouts:
        norms = (record.facts.get("norms_wrapped") or 1) - (form != "as_released")
    if done.get("modules") != norms:
        yield f"facts.noise.modules is {done.get('modules')}; the form perturbs {norms}"
    shape = shape_by_name(record.config["scale"]["checkpoint"])
    most = rollouts * norms * shape.hidden if shape is not None else math.inf
    least = CHANNELS_LEAST * most if shape is not None and form == "as_described" else 0
    if not least <= (done.get("channels_changed") or 0) <= most:
        yield (
            f"facts.noise.channels_changed is {done.get('channels_changed')}; {rollouts} rollouts "
            f"with {norms} norms have {most}"
        )
    if form == "as_described" and done.get("rollouts_perturbed") != rollouts:
        yield f"{done.get('rollouts_perturbed')} of {rollouts} noisy rollouts were really perturbed"
    yield from _strength(record, form, inert=inert)


def _strength(record: Record, form: str, *, inert: bool) -> Iterator[str]:
    """Yield why no noise of the asked strength was drawn, or some where there should be none."""
    asked, realised = (
        [value or 0.0 for value in record.series.get(name, [])]
        for name in ("sigma", "sigma_realised")
    )
    if inert:
        if any(realised):
            yield "series sigma_realised shows noise in an arm that adds none"
    elif not any(asked) or len(asked) != len(realised):
        yield "series sigma and sigma_realised do not show the added noise step by step"
    elif form == "as_described":
        low, high = SIGMA_RATIO
        for step, (planned, drawn) in enumerate(zip(asked, realised, strict=True)):
            if planned and not low <= drawn / planned <= high:
                yield (
                    f"step {step}: added noise had a deviation of {drawn:.3g}; "
                    f"asked for {planned:.3g}"
                )
                return


def at_start(record: Record) -> Iterator[str]:
    """Yield why noise of an arm that is measured before training was not there."""
    done = record.facts.get("noise_at_start") or {}
    if record.config["arm"]["noise"] and not done.get("channels_changed"):
        yield "the added noise touched nothing (facts.noise_at_start)"
