"""Receipts of the added noise: how often, on how many norms and channels, and how strong."""

from __future__ import annotations

from collections.abc import Iterator

from repro.evidence.record import Record
from repro.spec.shapes import shape_by_name

# Realised sigma over hundreds of channels; five standard errors at 400 channels are 18 %.
SIGMA_RATIO = (0.75, 1.25)
# float32 draws are hardly ever 0; rounded to bfloat16, most of them may leave a gain unchanged.
CHANNELS_LEAST = 0.99


def noise(record: Record) -> list[str]:
    """Return why the added noise was not there, or was where there should be none."""
    noise = record.config["arm"]["noise"]
    asked = [value or 0.0 for value in record.series.get("sigma", [])]
    realised = [value or 0.0 for value in record.series.get("sigma_realised", [])]
    done = record.facts.get("noise") or {}
    touched = done.get("modules", 0)
    if noise is None or noise["form"] == "as_published":
        what = "without added noise" if noise is None else "of the published, inert code"
        return [f"an arm {what} perturbed {touched} norms"] if touched or any(realised) else []
    if not touched or not done.get("channels_changed"):
        return [
            f"the added noise touched nothing ({touched} norms, "
            f"{done.get('channels_changed', 0)} channels)"
        ]
    if not any(asked) or len(asked) != len(realised):
        return ["series sigma and sigma_realised do not show the added noise step by step"]
    if noise["form"] != "as_described":
        return []
    if done.get("rollouts_perturbed") != done.get("rollouts_asked"):
        return [
            f"{done.get('rollouts_perturbed')} of {done.get('rollouts_asked')} noisy rollouts were "
            "really perturbed"
        ]
    low, high = SIGMA_RATIO
    for step, (planned, drawn) in enumerate(zip(asked, realised, strict=True)):
        if planned and not low <= drawn / planned <= high:
            return [
                f"step {step}: added noise had a deviation of {drawn:.3g}; asked for {planned:.3g}"
            ]
    return []


def touched(record: Record) -> Iterator[str]:
    """Yield why norms and channels are not those that the form perturbs."""
    done, noise = record.facts.get("noise") or {}, record.config["arm"]["noise"] or {}
    form, asked = noise.get("form", "none"), done.get("rollouts_asked") or 0
    shape = shape_by_name(record.config["scale"]["checkpoint"])
    norms = (record.facts.get("norms_wrapped") or 1) - (form != "as_released")
    if form in ("none", "as_published") or not asked:
        norms = 0
    if done.get("modules") != norms:
        yield f"facts.noise.modules is {done.get('modules')}; the form perturbs {norms}"
    if shape is None:
        return
    most = asked * norms * shape.hidden
    least = CHANNELS_LEAST * most if form == "as_described" else 0
    if not least <= (done.get("channels_changed") or 0) <= most:
        yield (
            f"facts.noise.channels_changed is {done.get('channels_changed')}; {asked} rollouts "
            f"with {norms} norms of {shape.hidden} channels have {most}"
        )


def at_start(record: Record) -> list[str]:
    """Return why noise of an arm that is measured before training was not there."""
    done = record.facts.get("noise_at_start") or {}
    if record.config["arm"]["noise"] and not done.get("channels_changed"):
        return ["the added noise touched nothing (facts.noise_at_start)"]
    return []
