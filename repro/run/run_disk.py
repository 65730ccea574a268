"""The disk of runs, counted from shapes: what they leave, and what they take meanwhile.

With P parameters trained and 2 moments of each, a checkpoint holds

    4 P bytes of masters + 8 P of moments (about 2 P where the optimiser keeps them in 8 bits)

and the last two are kept (`repro.rl.snapshots`) until the run has its record. The third last is
removed only when the newest is whole, so three lie side by side for a moment. What stays is the
adapter in float32, or after full training a 16-bit checkpoint with its tokenizer, and a line of
numbers per step, in `metrics.jsonl` and in the record.

Completions (`--completions`) are not counted: their length is not known beforehand.

Easy to get wrong: counting two checkpoints; forgetting that full training leaves a whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from repro.spec.arm import Arm
from repro.spec.config import RunConfig, TrainScale
from repro.spec.needs import Needs
from repro.spec.shapes import DecoderShape, shape_by_name, shape_of_checkpoint

# Of one AdamW moment per parameter: float32, or a code of 8 bits with its share of a block's scale
# (one float32 per 256).
_MOMENT_BYTES = {"adamw": 4.0, "adamw_8bit": 1.0 + 4 / 256}
_CHECKPOINTS = 3
# Measured at the smoke tier: a line of metrics.jsonl has 1010 bytes, a step in the record's series
# 700; a record without series and what else a run writes have about 40 kB.
_STEP_BYTES = 1750
_RECORD_BYTES = 40_000
# Qwen2.5's tokenizer.json, vocab.json and merges.txt: 11.5 MB for 151,936 rows.
_TOKENIZER_BYTES_PER_ROW = 75


def disk_bytes(runs: Iterable[RunConfig], needs: Needs, workers: int) -> int:
    """Return the disk that runs of one target and tier need, `workers` of them at a time.

    Runs whose shape is not known leave what `needs` says.
    """
    left, working = 0, []
    for run in runs:
        shape = _shape_of(run)
        if shape is None:
            left += needs.disk_bytes
        else:
            left += left_bytes(run.arm, run.scale, shape)
            working.append(working_bytes(run.arm, run.scale, shape))
    return left + sum(sorted(working, reverse=True)[:workers])


def _shape_of(run: RunConfig) -> DecoderShape | None:
    if not isinstance(run.scale, TrainScale):
        return None
    return shape_of_checkpoint(run.scale.checkpoint) or shape_by_name(run.scale.checkpoint)


def trained_parameters(arm: Arm, shape: DecoderShape) -> int:
    """Return how many parameters an arm trains."""
    if arm.training == "none":
        return 0
    if arm.training == "full":
        return shape.parameters()
    norms = 2 * shape.layers * shape.hidden if arm.norms_trained else 0
    return shape.adapter_parameters(arm.lora_rank) + norms


def working_bytes(arm: Arm, scale: TrainScale, shape: DecoderShape) -> int:
    """Return the bytes that a run takes while it is under way, beside what it leaves."""
    each = 4 + 2 * _MOMENT_BYTES[scale.optimizer.name]
    return _CHECKPOINTS * math.ceil(each * trained_parameters(arm, shape))


def left_bytes(arm: Arm, scale: TrainScale, shape: DecoderShape) -> int:
    """Return the bytes that a finished run leaves, completions aside."""
    if arm.training == "none":
        return _RECORD_BYTES
    numbers = _RECORD_BYTES + _STEP_BYTES * scale.steps
    if arm.training == "full":
        return numbers + 2 * shape.parameters() + _TOKENIZER_BYTES_PER_ROW * shape.vocabulary
    return numbers + 4 * trained_parameters(arm, shape)
