"""What runs of a tier need of a machine: memory, disk and downloads; no times.

How long a run takes is measured, not declared: `plan` quotes blessed records (`repro.run.plan`).
"""

from __future__ import annotations

from dataclasses import dataclass

from repro.spec.config import TrainScale
from repro.spec.hub import is_hub_name
from repro.spec.shapes import shape_of_checkpoint
from repro.spec.tier import GIB, Download

DATA_DOWNLOADS = {
    "gsm8k": Download(kind="dataset", name="openai/gsm8k", nbytes=5_000_000),
    "bigmath": Download(
        kind="dataset", name="open-r1/Big-Math-RL-Verified-Processed", nbytes=200_000_000
    ),
    "math500": Download(kind="dataset", name="HuggingFaceH4/MATH-500", nbytes=500_000),
    "aime24": Download(kind="dataset", name="HuggingFaceH4/aime_2024", nbytes=100_000),
    "aime25": Download(kind="dataset", name="math-ai/aime25", nbytes=50_000),
    "amc23": Download(kind="dataset", name="math-ai/amc23", nbytes=50_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the runs of a target at a tier need; downloads are fetched from the hub once for all.

    A run has `memory_bytes` at its peak (of device memory where the tier has a device) and leaves
    `disk_bytes`, where these are not counted from shapes (`repro.run.preflight`).
    """

    memory_bytes: int
    disk_bytes: int
    downloads: tuple[Download, ...] = ()


def needs_of_checkpoint(scale: TrainScale) -> Needs:
    """Return what a run on a published checkpoint needs.

    Its memory is that of 16-bit weights and 8 GiB, for where an arm has no memory plan.
    """
    shape = shape_of_checkpoint(scale.checkpoint)
    weights = 0 if shape is None else 2 * shape.parameters()
    sources = dict.fromkeys([scale.data.source, *(item.data.source for item in scale.test_sets)])
    downloads = [DATA_DOWNLOADS[name] for name in sources if name in DATA_DOWNLOADS]
    if is_hub_name(scale.checkpoint):
        # Files of mixed 4 to 8 bits have .36 to .5 of the bytes of 16 bits.
        stored = weights // 2 if scale.checkpoint.endswith(".gguf") else weights
        downloads.insert(0, Download(kind="model", name=scale.checkpoint, nbytes=stored))
    return Needs(memory_bytes=weights + 8 * GIB, disk_bytes=10_000_000, downloads=tuple(downloads))
