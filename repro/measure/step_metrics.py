"""The measurements of timed steps, and the metrics computed from them.

Per point `p`, the metrics are

    step_seconds_p, rollout_seconds_p, reward_seconds_p, update_seconds_p, optimizer_seconds_p,
    idle_seconds_p, tokens_per_second_p,
    peak_bytes_p (reserved by the allocator, and the driver's context), predicted_bytes_p,
    prediction_error_p (percent of the measured peak),

and where there is a baseline, `speedup_p`, `update_ratio_p` and `rollout_ratio_p`: the baseline's
time over the arm's, repeat by repeat. Spread rows with an equal twin have `rollout_over_equal_p`,
`update_over_equal_p` and `step_over_equal_p`, the arm's own time over that with equal rows. Each
metric is the median over the repeats, which the record has as a series of the metric's name. A
point of several GPUs has `efficiency_p`, the tokens a second and GPU of all repeats together over
those of its twin on one GPU: repeats draw rows of their own, so they are added up, not paired; and
`exchange_share_p`, the first rank's seconds of exchanges but of grades, once all had come, over the
step's. A point that measures memory only has the last three of the first list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kernels.timing import copy_rate
from repro.evidence.record import Estimate
from repro.models.memory_plan import StepShape
from repro.rl.clock import PHASES
from repro.spec.facts import Facts, Named, Timing
from repro.spec.step_scale import StepArm, StepPoint

_RATIOS = {"speedup": "total", "update_ratio": "update", "rollout_ratio": "rollout"}
_OVER_EQUAL = {"rollout": "rollout", "update": "update", "step": "total"}
# Of the metrics of repeats; all others are ratios.
_UNITS = {
    "tokens_per_second": "tokens per second",
    "exchange_share": "share",
    **{f"{part}_seconds": "seconds" for part in ("step", *PHASES)},
}

StepTimes = Mapping[str, Any]


def way_of(arm: StepArm) -> str:
    """Return the name of an arm's way of training: its format, and what is unusual about it."""
    name: str = arm.weight_format
    if arm.linears != "kernels":
        name += f"_{arm.linears}"
    if arm.rollout_adapter != "apart":
        name += f"_{arm.rollout_adapter}"
    return name if arm.training == "lora" else f"{name}_{arm.training}"


_NAMES_OF_FACTS = (
    *("adapter_modules", "linears", "parameters_trainable", "moved", "folded", "road", "ranks"),
    *("micro_tokens", "kept_blocks", "fallbacks", "slots", "keeps_cache", "preemptions"),
    *("measured_rows", "decode_steps", "generated_tokens", "sampler_trainer_kl"),
    *("allocated_bytes", "context_bytes", "reserved_bytes", "peak_bytes", "weight_bytes"),
    *("plan", "predicted_bytes", "product_tflops", "update_share"),
)


class PointFacts(Named[str]):
    """What was done at a point with one way of training, and what memory it took."""

    what = "facts.points"
    names = frozenset(_NAMES_OF_FACTS)


@dataclass(slots=True, eq=False)
class PointResult:
    """What was measured of a point with one way of training.

    Each timed step is a repeat (`step_training.timed_step`), and facts are of the last. Where the
    point does not fit, there is none, and `out_of_memory` says what was needed.
    """

    repeats: list[dict[str, Any]] = field(default_factory=list)
    facts: PointFacts = field(default_factory=PointFacts)
    out_of_memory: str | None = None


# By the names of a point and of a way of training.
Results = dict[tuple[str, str], PointResult]


def series_of(
    point: StepPoint, entry: PointResult, base: PointResult | None, equal: PointResult | None = None
) -> dict[str, list[float | None]]:
    """Return one value per repeat of every metric that is timed, by its name.

    `base` is the baseline's entry, `equal` the arm's own at the same point with equal lengths.
    """
    if point.memory_only:
        return {}
    repeats = entry.repeats
    series = {"step_seconds": [repeat["total"] for repeat in repeats]}
    for part in PHASES:
        series[f"{part}_seconds"] = [repeat[part] for repeat in repeats]
    if point.ranks > 1:
        series["exchange_share"] = _quotients(repeats, repeats, "exchange", "total")
    series["tokens_per_second"] = _quotients(repeats, repeats, "completion_tokens", "rollout")
    if base is not None:
        for name, phase in _RATIOS.items():
            series[name] = _quotients(base.repeats, repeats, phase)
    if equal is not None and equal.repeats:
        for name, phase in _OVER_EQUAL.items():
            series[f"{name}_over_equal"] = _quotients(repeats, equal.repeats, phase)
    return {f"{name}_{point.name}": list(values) for name, values in series.items()}


def _quotients(
    above: Sequence[StepTimes], below: Sequence[StepTimes], phase: str, of: str = ""
) -> list[float]:
    return [a[phase] / b[of or phase] for a, b in zip(above, below, strict=False)]


def metrics_of(
    point: StepPoint,
    entry: PointResult,
    series: Mapping[str, Sequence[float | None]],
    alone: PointResult | None = None,
) -> dict[str, Estimate]:
    """Return the metrics of one point, of whose series (`series_of`) each gives its median.

    `alone` is the entry of its twin on one GPU.
    """
    metrics = {}
    for name in series:
        values = [value for value in series[name] if value is not None]
        clock = "the host's clock" if name.startswith("exchange_share") else "device events"
        metrics[name] = Estimate(
            value=median(values),
            unit=_UNITS.get(name.removesuffix(f"_{point.name}"), "ratio"),
            low=min(values),
            high=max(values),
            n=len(values),
            method=f"median of timed steps after a warm-up, {clock}; from least to most",
        )
    facts = entry.facts
    peak, predicted = facts["peak_bytes"], facts.get("predicted_bytes")
    n = len(entry.repeats)
    beside: dict[str, tuple[float, str, str]] = {}
    if alone is not None and alone.repeats:
        how = "tokens of all timed steps over their seconds and GPUs, over those of one GPU"
        beside["efficiency"] = (_rate(entry) / _rate(alone) / point.ranks, "ratio", how)
    beside["peak_bytes"] = (peak, "bytes", "most reserved by the allocator, and context")
    if predicted is not None and peak:
        error = 100 * abs(predicted - peak) / peak
        beside["predicted_bytes"] = (predicted, "bytes", "the memory plan's peak")
        how = "|predicted - measured| of the measured peak"
        beside["prediction_error"] = (error, "percent", how)
    return metrics | {
        f"{name}_{point.name}": Estimate(value=value, unit=unit, n=n, method=method)
        for name, (value, unit, method) in beside.items()
    }


def _rate(entry: PointResult) -> float:
    """Return the sampled tokens a second of all timed steps."""
    tokens = sum(repeat["completion_tokens"] for repeat in entry.repeats)
    return float(tokens / sum(repeat["total"] for repeat in entry.repeats))


def share_facts(
    planned: StepShape, repeat: StepTimes, rate: float | None, ranks: int, *, full: bool
) -> dict[str, float]:
    """Return a GPU's product rate, given in FLOP per second, and a timed update's share of it."""
    if rate is None:
        return {}
    tokens = repeat["completion_tokens"] / ranks  # the repeat's are those of all
    sizes = planned.prompts, planned.rows, planned.prompt_tokens, tokens
    flop = planned.shape.update_flop(*sizes, kept=planned.kept_blocks, full=full)
    return {"product_tflops": rate / 1e12, "update_share": flop / repeat["update"] / rate}


def step_line(point: StepPoint, way: str, repeat: StepTimes, facts: PointFacts) -> str:
    """Return the seconds of a timed step by phase, with its update's share of the product rate."""
    text = f"update {repeat['update']:.1f} s"
    if "update_share" in facts:
        share, rate = 100 * facts["update_share"], facts["product_tflops"]
        text += f" ({share:.0f} % of {rate:.0f} TFLOP/s)"
    rollout, step = f"rollout {repeat['rollout']:.1f} s", f"step {repeat['total']:.1f} s"
    return f"{point.name} {way}: {rollout}, {text}, {step}"


def summary(own: StepArm, points: Sequence[StepPoint], results: Results) -> Facts:
    """Return the receipts of the whole run: formats, adapters, and a rate that must be possible."""
    measured = [results[point.name, way_of(own)] for point in points]
    measured = [entry for entry in measured if entry.repeats]
    if not measured:
        return Facts()
    first = measured[0].facts
    seconds = sum(repeat["rollout"] for entry in measured for repeat in entry.repeats)
    # Every decode step reads every projection once.
    nbytes = sum(
        len(entry.repeats) * entry.facts["decode_steps"] * entry.facts["weight_bytes"]
        for entry in measured
    )
    return Facts(
        linears=first["linears"],
        adapter_modules=first["adapter_modules"],
        parameters_trainable=first["parameters_trainable"],
        **Timing(seconds=seconds, bytes=nbytes, bytes_per_second=copy_rate()).fact(),
    )
