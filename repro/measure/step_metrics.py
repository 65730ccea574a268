"""What a run has measured of steps, and the metrics that it comes to.

Per point `p`, the metrics are

    step_seconds_p, rollout_seconds_p, reward_seconds_p, update_seconds_p, optimizer_seconds_p,
    idle_seconds_p, tokens_per_second_p,
    peak_bytes_p (reserved by the allocator, and the driver's context), predicted_bytes_p,
    prediction_error_p (percent of the measured peak),

and where there is a baseline, `speedup_p`, `update_ratio_p` and `rollout_ratio_p`: the baseline's
time over the arm's, repeat by repeat. Spread rows with an equal twin have `rollout_over_equal_p`,
`update_over_equal_p` and `step_over_equal_p`, the arm's own time over that with equal rows. Each
metric is the median over the repeats, which the record has as a series of the metric's name. A
point that samples part of its rows' tokens has no metric in which the rollout's time takes part;
one that measures memory only has the last three.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from kernels.timing import copy_rate
from repro.evidence.record import Estimate, Record
from repro.measure.fresh_process import LeftOut
from repro.models.memory_plan import StepShape
from repro.rl.clock import PHASES
from repro.spec.step_scale import StepArm, StepPoint, StepScale

Entry = dict[str, Any]
_RATIOS = {"speedup": "total", "update_ratio": "update", "rollout_ratio": "rollout"}
_OVER_EQUAL = {"rollout": "rollout", "update": "update", "step": "total"}
# Metrics that say nothing where rows were filled up instead of sampled.
_OF_THE_ROLLOUT = ("step_seconds", "rollout_seconds", "tokens_per_second", "speedup",
                   "rollout_ratio")  # fmt: skip


def way_of(arm: StepArm) -> str:
    """Return the name of an arm's way of training: its format, and what is unusual about it."""
    name: str = arm.weight_format
    if arm.linears != "kernels":
        name += f"_{arm.linears}"
    return name if arm.training == "lora" else f"{name}_{arm.training}"


class StepResults:
    """What one run has measured, by point and way of training.

    Parameters
    ----------
    steps
        Repeats of each point.
    left_out
        Points that do not fit, which a fresh process must know of.
    """

    def __init__(self, steps: int, left_out: LeftOut) -> None:
        self._steps = steps
        self._left_out = left_out
        self._entries: dict[str, Entry] = {}

    @property
    def not_fitting(self) -> int:
        """Points that were found not to fit."""
        return len(self._left_out.sentences)

    def entry(self, arm: StepArm, point: StepPoint) -> Entry:
        """Return `repeats` (a list), `facts`, and `out_of_memory`: None, or what was needed."""
        key = _key(arm, point)
        entry = self._entries.get(key, {"repeats": [], "facts": {}})
        return entry | {"out_of_memory": self._left_out.sentences.get(key)}

    def missing(self, arm: StepArm, point: StepPoint) -> int:
        """Return how many repeats are to be measured still."""
        entry = self.entry(arm, point)
        return 0 if entry["out_of_memory"] else max(0, self._steps - len(entry["repeats"]))

    def add(self, arm: StepArm, point: StepPoint, repeat: Entry, facts: Entry) -> None:
        """Add a repeat and renew the facts."""
        repeats = [*self.entry(arm, point)["repeats"], repeat]
        self._entries[_key(arm, point)] = {"repeats": repeats, "facts": facts}

    def take_over(self, arm: StepArm, points: Iterable[StepPoint], record: Record) -> None:
        """Take over what a record of the same scale has of the points it measured that way."""
        way = way_of(arm)
        for point in points:
            key, facts = _key(arm, point), record.effects["points"].get(point.name, {}).get(way)
            if facts is not None:
                repeats = _recorded_repeats(point, record) or [{}] * self._steps
                self._entries[key] = {"repeats": repeats, "facts": facts}
            for sentence in record.effects["out_of_memory"]:
                if sentence.startswith(f"{key}: "):
                    self.out_of_memory(arm, point, sentence.removeprefix(f"{key}: "))

    def begin_again(self, arm: StepArm, point: StepPoint) -> None:
        """Forget the repeats of a point, whose steps must be alike."""
        self._entries.pop(_key(arm, point), None)

    def out_of_memory(self, arm: StepArm, point: StepPoint, sentence: str) -> None:
        """Note that a point does not fit."""
        self.begin_again(arm, point)
        self._left_out.note([_key(arm, point)], sentence)


def _recorded_repeats(point: StepPoint, record: Record) -> list[Entry]:
    """Return the repeats behind a record's series of a point; none where nothing was timed."""
    names = {"total": "step_seconds"} | {phase: f"{phase}_seconds" for phase in PHASES}
    columns = {
        part: record.series[f"{name}_{point.name}"]
        for part, name in names.items()
        if f"{name}_{point.name}" in record.series
    }
    slowed = record.effects.get("timed_slowed", {})
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) | {"slowed": slowed} for row in rows]


def _key(arm: StepArm, point: StepPoint) -> str:
    return f"{point.name} {way_of(arm)}"


def series_of(
    point: StepPoint, entry: Entry, base: Entry | None, equal: Entry | None = None
) -> dict[str, list[float | None]]:
    """Return one value per repeat of every metric that is timed, by its name.

    `base` is the baseline's entry, `equal` the arm's own at the same point with equal lengths.
    """
    if point.memory_only:
        return {}
    repeats = entry["repeats"]
    tokens = entry["facts"]["generated_tokens"]
    series = {"step_seconds": [repeat["total"] for repeat in repeats]}
    for part in PHASES:
        series[f"{part}_seconds"] = [repeat[part] for repeat in repeats]
    series["tokens_per_second"] = [tokens / repeat["rollout"] for repeat in repeats]
    if base is not None:
        for name, phase in _RATIOS.items():
            series[name] = _quotients(base["repeats"], repeats, phase)
    if equal is not None and equal["repeats"]:
        for name, phase in _OVER_EQUAL.items():
            series[f"{name}_over_equal"] = _quotients(repeats, equal["repeats"], phase)
    if not point.whole:
        series = {name: values for name, values in series.items() if name not in _OF_THE_ROLLOUT}
    return {f"{name}_{point.name}": list(values) for name, values in series.items()}


def _quotients(above: list[Entry], below: list[Entry], phase: str) -> list[float | None]:
    return [a[phase] / b[phase] for a, b in zip(above, below, strict=False)]


def metrics_of(
    point: StepPoint, entry: Entry, base: Entry | None, equal: Entry | None = None
) -> dict[str, Estimate]:
    """Return the metrics of one point."""
    metrics = {}
    for name, values in series_of(point, entry, base, equal).items():
        known = [value for value in values if value is not None]
        metrics[name] = Estimate(
            value=median(known),
            unit=_unit(name),
            low=min(known),
            high=max(known),
            n=len(known),
            method="median of timed steps after a warm-up, device events; from least to most",
        )
    facts = entry["facts"]
    peak, predicted = facts["peak_bytes"], facts.get("predicted_bytes")
    n = len(entry["repeats"])
    metrics[f"peak_bytes_{point.name}"] = Estimate(
        value=peak, unit="bytes", n=n, method="most reserved by the allocator, and context"
    )
    if predicted is not None and peak:
        metrics[f"predicted_bytes_{point.name}"] = Estimate(
            value=predicted, unit="bytes", n=n, method="the memory plan's peak"
        )
        metrics[f"prediction_error_{point.name}"] = Estimate(
            value=100 * abs(predicted - peak) / peak,
            unit="percent",
            n=n,
            method="|predicted - measured| of the measured peak",
        )
    return metrics


def share_facts(planned: StepShape, repeat: Entry, rate: float | None, *, full: bool) -> Entry:
    """Return the product rate, given in FLOP per second, and a timed update's share of it."""
    if rate is None:
        return {}
    sizes = planned.prompts, planned.rows, planned.prompt_tokens, repeat["completion_tokens"]
    flop = planned.shape.update_flop(*sizes, kept=planned.kept_blocks, full=full)
    return {"product_tflops": rate / 1e12, "update_share": flop / repeat["update"] / rate}


def step_line(point: StepPoint, way: str, repeat: Entry, facts: Entry) -> str:
    """Return the seconds of a timed step by phase, with its update's share of the product rate."""
    text = f"update {repeat['update']:.1f} s"
    if "update_share" in facts:
        share, rate = 100 * facts["update_share"], facts["product_tflops"]
        text += f" ({share:.0f} % of {rate:.0f} TFLOP/s)"
    if point.whole:
        text = f"rollout {repeat['rollout']:.1f} s, {text}, step {repeat['total']:.1f} s"
    return f"{point.name} {way}: {text}"


def _unit(metric: str) -> str:
    if metric.startswith("tokens_per_second"):
        return "tokens per second"
    is_ratio = metric.startswith(tuple(_RATIOS)) or "_over_equal_" in metric
    return "ratio" if is_ratio else "seconds"


def summary(
    points: dict[str, dict[str, Any]], results: StepResults, own: StepArm, scale: StepScale
) -> dict[str, Any]:
    """Return the receipts of the whole run: formats, adapters, and a rate that must be possible."""
    name = way_of(own)
    own_facts = [facts_by_way[name] for facts_by_way in points.values() if name in facts_by_way]
    if not own_facts:
        return {}
    seconds = 0.0
    nbytes = 0
    for point in scale.points:
        entry = results.entry(own, point)
        for repeat in entry["repeats"]:
            seconds += repeat["rollout"]
            # Every decode step reads every projection once.
            nbytes += entry["facts"]["decode_steps"] * entry["facts"]["weight_bytes"]
    return {
        "linears": own_facts[0]["linears"],
        "adapter_modules": own_facts[0]["adapter_modules"],
        "parameters_trainable": own_facts[0]["parameters_trainable"],
        "timing": {
            "method": "device_events",
            "seconds": seconds,
            "bytes": nbytes,
            "bytes_per_second": copy_rate(),
        },
    }
