"""What runs take on several GPUs, before any is rented: `plan --ranks 1,2,4,8`.

Times are quoted from blessed steps of the `scaling` targets, which have rows and lengths of their
own; what they have not measured is not timed. Memory is planned: ranks divide what full training
holds, and each holds the whole of an adapter's run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from repro.evidence.environment import capture_environment, device_of
from repro.evidence.record import Record
from repro.evidence.store import blessed_records
from repro.models.memory_plan import plan_memory, training_memory
from repro.run.preflight import among_unlike_devices, smallest_device
from repro.spec.checks import require
from repro.spec.config import RunConfig
from repro.spec.shapes import shape_named, shape_of_checkpoint
from repro.spec.step_scale import StepPoint
from repro.spec.tier import CudaDevice, Tier

_MEASURED = ("scaling", "scaling_4")
_PHASES = ("step", "rollout", "update")
# Planned for where this machine has no card.
_CARD = CudaDevice(name="a card of 80 GB", capability=(9, 0), memory_bytes=80 * 10**9)
# What full training holds, by parts of the memory plan.
_COLUMNS = {
    "masters": ("adapter",),
    "gradients": ("gradients",),
    "moments": ("optimiser",),
    "16 bits": ("weights", "embeddings"),
    "a pass": ("activations", "logits"),
}


def parse_ranks(text: str) -> list[int]:
    """Return numbers of ranks, as `1,2,4` gives them."""
    parts = [part.strip() for part in text.split(",")]
    require(
        all(part.isdigit() and int(part) > 0 for part in parts),
        f"--ranks {text}: needs numbers such as 1,2,4",
    )
    return sorted({int(part) for part in parts})


def ranks_text(runs: Sequence[RunConfig], counts: Sequence[int], expected: Path) -> str:
    """Return measured steps and planned memory on each number of GPUs; arms alike appear once.

    Steps are of this machine's kind of device where blessed records have it.
    """
    records = [r for name in _MEASURED for r in blessed_records(expected, Tier.SYSTEMS, name)]
    device = device_of(capture_environment())
    records = [r for r in records if device_of(r.environment) == device] or records
    alike: dict[str, list[str]] = {}
    for run in {run.arm.name: run for run in runs if run.procedure == "train"}.values():
        text = "\n".join([*_step_lines(run, counts, records), *_memory_lines(run, counts)])
        alike.setdefault(text, []).append(run.arm.name)
    texts = [f"  {', '.join(names)}:\n{text}" for text, names in alike.items()]
    return "\n".join(texts) or "  nothing here trains"


def _step_lines(run: RunConfig, counts: Sequence[int], records: Sequence[Record]) -> list[str]:
    """Return the steps that were measured of a run's model and format, by number of GPUs."""
    lines = ["    GPUs   rows  lengths      step   rollout    update        GB  measured on"]
    for ranks in counts:
        prompts = run.scale.prompts_per_rollout
        own = [line for record in records for line in _quoted(run, ranks, record)]
        if ranks > prompts:
            own = [f"not possible: a rollout has {prompts} prompts"]
        lines += [f"    {ranks:>4}  {line}" for line in own or ["not timed"]]
    return lines


def _quoted(run: RunConfig, ranks: int, record: Record) -> Iterator[str]:
    """Yield the rows, seconds and bytes of each step in a record that is of a run's kind."""
    measured, shape = record.config["arm"], shape_of_checkpoint(run.scale.checkpoint)
    kind = (run.arm.weight_format, run.arm.training, run.scale.sampler)
    if kind != (measured["weight_format"], measured["training"], "own"):
        return
    for point in map(StepPoint.recorded, record.config["scale"]["points"]):
        if point.ranks == ranks and shape_named(point.model) == shape:
            phases = [record.value(f"{name}_seconds_{point.name}") for name in _PHASES]
            seconds = "".join("        --" if s is None else f"{s:>8.2f} s" for s in phases)
            peak = (record.value(f"peak_bytes_{point.name}") or 0) / 1e9
            device = device_of(record.environment)
            yield f"{point.rows:>5}  {point.lengths:<7}{seconds}{peak:>10.1f}  {device}"


def _memory_lines(run: RunConfig, counts: Sequence[int]) -> list[str]:
    """Return the planned memory of a card, part by part where ranks divide it."""
    card = smallest_device() or _CARD
    memory = training_memory(run.arm, run.scale)
    if memory is None:
        return [f"    memory not planned: no known shape of {run.scale.checkpoint}"]
    peak, of_card = memory.peak(card.memory_bytes), f"{card.name}{among_unlike_devices()}"
    if run.arm.training == "lora":
        fits = _fits(peak, card)
        return [f"    planned, each GPU for all rows: {peak / 1e9:.1f} GB of {of_card}, {fits}"]
    columns = (*_COLUMNS, "rest", "in all")
    lines = [
        f"    planned GB of {of_card}, FSDP2 dividing what is trained:",
        "    GPUs" + "".join(f"{name:>11}" for name in columns),
    ]
    for ranks in counts:
        memory = training_memory(run.arm, run.scale, ranks)
        assert memory is not None
        peak = memory.peak(card.memory_bytes)
        parts = plan_memory(memory.fitting(card.memory_bytes)).update
        own = [sum(parts[name] for name in names) for names in _COLUMNS.values()]
        row = "".join(f"{part / 1e9:11.1f}" for part in (*own, peak - sum(own), peak))
        lines.append(f"    {ranks:>4}{row}  {_fits(peak, card)}")
    return lines


def _fits(peak: int, card: CudaDevice) -> str:
    return "fits" if peak <= card.memory_bytes else "does not fit"
