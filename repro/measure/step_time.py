"""Time and memory of whole GRPO steps on real shapes: the rows of Table 3 and the memory claims.

A run goes through its points model by model. Each model is built once with the baseline's format
and once with the arm's; every point gets an engine on those same weights and an optimiser, warms
up, and is timed as often as the scale says. Only a finished run is kept, as a record; one that was
stopped is measured again from its beginning. A baseline that the same source has recorded on this
kind of device, as an arm of the target with the same seed and scale, is taken from its record
(`effects["baseline_record"]` is that run's digest). The metrics: `repro.measure.step_metrics`.

A point that does not fit has no metrics; `effects["out_of_memory"]` says so. One that fails in
another way costs its own metrics alone: `effects["failed"]` says how, and the log has a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kernels.timing import matmul_rate
from repro.evidence.environment import capture_environment, device_of
from repro.evidence.procedure import Measured, Progress, Stopped
from repro.evidence.record import Estimate, Record, read_record
from repro.measure.device_state import release
from repro.measure.fresh_process import LeftOut
from repro.measure.step_measure import Bench, measure_points, together
from repro.measure.step_metrics import StepResults, metrics_of, series_of, summary, way_of
from repro.models.other_products import missing_library
from repro.reward.grader import GraderPool
from repro.spec.config import RunConfig, digest_of
from repro.spec.resolve import plain_values
from repro.spec.step_scale import StepArm, StepPoint, StepScale, equal_twin, step_arm


def measure_steps(
    run: RunConfig,
    *,
    folder: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
    threads: int,
) -> Measured:
    """Measure every point of the run's scale.

    Raises
    ------
    RuntimeError
        Without a CUDA device, without the library that the arm multiplies by, or when every point
        failed.
    Stopped
        When asked to stop between two steps; nothing is kept.
    FreshProcessNeededError
        When what a point left of the device's memory is not free for the next model.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("step_time measures a GPU; this process has no CUDA device")
    own = run.arm if isinstance(run.arm, StepArm) else step_arm(run.arm)
    lacking = missing_library(own.linears)
    if lacking is not None:
        raise RuntimeError(f"{own.name} {lacking}")
    torch.set_num_threads(threads)
    scale: StepScale = run.scale
    results = StepResults(scale.steps, LeftOut(folder / "checkpoint"))
    ways = ways_of(own, scale)
    recorded = recorded_baseline(run, ways[0], folder) if len(ways) > 1 else None
    if recorded is not None:
        results.take_over(ways[0], scale.points, recorded)
    # Before any point: what it allocates is in no point's peak.
    rate = None if all(point.memory_only for point in scale.points) else matmul_rate()
    release()
    with GraderPool(workers=2) as pool:
        bench = Bench(scale=scale, seed=run.seed, pool=pool, results=results, progress=progress,
                      should_stop=should_stop, product_rate=rate)  # fmt: skip
        for points in together(scale.points):
            for way in ways:
                progress(f"{points[0].model} {way_of(way)}", {})
                if not measure_points(bench, way, points):
                    raise Stopped
    measured = measured_steps(own, ways, scale, results)
    if bench.failures and not measured.metrics:
        raise RuntimeError("; ".join(bench.failures))
    if recorded is not None:
        measured.effects["baseline_record"] = recorded.digest
    measured.effects.update(failed=bench.failures, timed_retries=bench.timed_retries,
                            timed_again=bench.timed_again)  # fmt: skip
    return measured


def recorded_baseline(run: RunConfig, plain: StepArm, folder: Path) -> Record | None:
    """Return the record of a run's baseline that this source has made on this kind of device.

    Parameters
    ----------
    plain
        The baseline's way of training, under any name.
    folder
        Of the run: `<runs>/<tier>/<target>/<arm>/seed-<n>/<digest>`.
    """
    wanted = _described(plain_values(plain), plain_values(run.scale), capture_environment())
    for path in sorted(folder.parents[2].glob(f"*/seed-{run.seed}.json")):
        record = read_record(path)
        config, environment = record.config, record.environment
        # A source that changed while it ran is of no single state.
        whole = record.ok and len(record.sources) == 1
        if whole and _described(config["arm"], config["scale"], environment) == wanted:
            return record
    return None


def _described(
    arm: Mapping[str, Any], scale: Mapping[str, Any], environment: Mapping[str, Any]
) -> tuple[object, ...]:
    """Return what two measurements must share to be the same: all but names and the time."""
    nameless = {key: value for key, value in arm.items() if key not in ("name", "label")}
    return (
        digest_of([nameless, scale]),
        environment.get("source_sha256"),
        environment.get("torch", {}).get("version"),
        device_of(dict(environment)),
    )


def ways_of(own: StepArm, scale: StepScale) -> list[StepArm]:
    """Return what is measured, the baseline first: an arm may be its own."""
    if scale.baseline is None:
        return [own]
    plain = step_arm(own, name="baseline", weight_format=scale.baseline, training="lora",
                     linears="kernels")  # fmt: skip
    return [own] if way_of(plain) == way_of(own) else [plain, own]


def measured_steps(
    own: StepArm, ways: list[StepArm], scale: StepScale, results: StepResults
) -> Measured:
    """Return what the results come to."""
    metrics: dict[str, Estimate] = {}
    series: dict[str, list[float | None]] = {}
    effects: dict[str, Any] = {"points": {}, "out_of_memory": []}
    for point in scale.points:
        entries = {way_of(way): results.entry(way, point) for way in ways}
        _note_memory(effects, point, entries)
        timed_entries = {name: entry for name, entry in entries.items() if entry["repeats"]}
        effects["points"][point.name] = {
            name: entry["facts"] for name, entry in timed_entries.items()
        }
        own_entry = timed_entries.get(way_of(own))
        if own_entry is None:
            continue
        base = timed_entries.get(way_of(ways[0])) if len(ways) > 1 else None
        twin = equal_twin(point, scale.points)
        equal = results.entry(own, twin) if twin else None
        metrics |= metrics_of(point, own_entry, base, equal)
        series |= series_of(point, own_entry, base, equal)
    effects |= summary(effects["points"], results, own, scale)
    slowed = [
        repeat["slowed"]
        for way in ways
        for point in scale.points
        if not point.memory_only
        for repeat in results.entry(way, point)["repeats"]
    ]
    # Where the driver counted around every repeat, its own and the baseline's.
    if slowed and all(slowed):
        effects["timed_slowed"] = {
            name: max(shares[name] for shares in slowed) for name in slowed[0]
        }
    return Measured(metrics=metrics, series=series, effects=effects)


def _note_memory(
    effects: dict[str, Any], point: StepPoint, entries: dict[str, dict[str, Any]]
) -> None:
    for name, entry in entries.items():
        if entry["out_of_memory"]:
            effects["out_of_memory"].append(f"{point.name} {name}: {entry['out_of_memory']}")
