"""Time and memory of whole GRPO steps on real shapes: the rows of Table 3 and the memory claims.

A run goes through its points model by model. Each model is built once with the baseline's format
and once with the arm's; every point gets an engine on those same weights and an optimiser, warms
up, and is timed as often as the scale says. Only a finished run is kept, as a record; one that was
stopped is measured again from its beginning. The metrics: `repro.measure.step_metrics`.

A point that does not fit has no metrics; `facts["out_of_memory"]` says so. One that fails in
another way costs its own metrics alone: `facts["failed"]` says how, and the log has a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.timing import matmul_rate
from repro.distributed import Ranks
from repro.evidence.procedure import Measured, RunContext
from repro.evidence.record import Estimate
from repro.measure.device_state import release
from repro.measure.step_measure import Bench, measure_points, together
from repro.measure.step_metrics import Results, metrics_of, series_of, summary, way_of
from repro.spec.config import RunConfig
from repro.spec.facts import Facts
from repro.spec.step_scale import StepArm, StepPoint, StepScale, alone_twin, equal_twin, step_arm


def measure_steps(run: RunConfig, context: RunContext) -> Measured:
    """Measure every point of the run's scale on a CUDA device; raise if every one failed."""
    own = run.arm if isinstance(run.arm, StepArm) else step_arm(run.arm)
    torch.set_num_threads(context.threads)
    scale: StepScale = run.scale
    ranks = Ranks.joined()
    if ranks.world < scale.ranks:
        raise RuntimeError(f"{run.target} takes {scale.ranks} ranks; this process is {ranks.world}")
    ways = ways_of(own, scale)
    # Before any point: what it allocates is in no point's peak.
    rate = None if all(point.memory_only for point in scale.points) else matmul_rate()
    release()
    bench = Bench(
        scale=scale,
        seed=run.seed,
        progress=context.progress,
        product_rate=rate,
        should_stop=lambda: ranks.any(context.should_stop()),
        ranks=ranks,
    )
    for points in together(scale.points):
        for way in ways:
            context.progress(f"{points[0].model} {way_of(way)}", {})
            measure_points(bench, way, points)
    measured = measured_steps(own, ways, scale.points, bench.results)
    if bench.failures and not measured.metrics:
        raise RuntimeError("; ".join(bench.failures))
    measured.facts.update(failed=bench.failures, timed_retries=dict(bench.timed_retries))
    if ranks.world > 1:
        measured.facts["ranks"] = ranks.world
    return measured


def ways_of(own: StepArm, scale: StepScale) -> list[StepArm]:
    """Return what is measured, the baseline first: an arm may be its own."""
    if scale.baseline is None:
        return [own]
    plain = step_arm(
        own,
        name="baseline",
        weight_format=scale.baseline,
        training="lora",
        linears="kernels",
        rollout_adapter="apart",
    )
    return [own] if way_of(plain) == way_of(own) else [plain, own]


def measured_steps(
    own: StepArm, ways: Sequence[StepArm], points: Sequence[StepPoint], results: Results
) -> Measured:
    """Return what the results come to."""
    metrics: dict[str, Estimate] = {}
    series: dict[str, list[float | None]] = {}
    facts = Facts(points={}, out_of_memory=[])
    names = [way_of(way) for way in ways]
    slowed = []
    for point in points:
        entries = {name: results[point.name, name] for name in names}
        facts["out_of_memory"] += [
            f"{point.name} {name}: {entry.out_of_memory}"
            for name, entry in entries.items()
            if entry.out_of_memory
        ]
        timed = {name: entry for name, entry in entries.items() if entry.repeats}
        facts["points"][point.name] = {name: entry.facts for name, entry in timed.items()}
        if not point.memory_only:
            slowed += [repeat["slowed"] for entry in timed.values() for repeat in entry.repeats]
        entry = timed.get(way_of(own))
        if entry is None:
            continue
        base = timed.get(names[0]) if len(ways) > 1 else None
        twin = equal_twin(point, points)
        equal = results[twin.name, way_of(own)] if twin else None
        one = alone_twin(point, points)
        alone = results[one.name, way_of(own)] if one else None
        timed_series = series_of(point, entry, base, equal)
        metrics |= metrics_of(point, entry, timed_series, alone)
        series |= timed_series
    facts |= summary(own, points, results)
    # Where the driver counted around every repeat, its own and the baseline's.
    if slowed and all(slowed):
        facts["timed_slowed"] = {name: max(shares[name] for shares in slowed) for name in slowed[0]}
    return Measured(metrics=metrics, series=series, facts=facts)
