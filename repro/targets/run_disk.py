"""The disk of a training run, counted from shapes: what it leaves, and what it takes meanwhile.

With P parameters trained and 2 moments of each, a checkpoint holds

    4 P bytes of masters + 8 P of moments (about 2 P where the optimiser keeps them in 8 bits)

and the last two are kept (`repro.rl.snapshots`) until the run has its record. The third last is
removed only when the newest is whole, so three lie side by side for a moment. What stays is the
adapter in float32, or after full training a 16-bit checkpoint with its tokenizer, and a line of
numbers per step, in `metrics.jsonl` and in the record.

Easy to get wrong: counting two checkpoints; forgetting that full training leaves a whole model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from repro.spec.arm import Arm
from repro.spec.config import TrainScale
from repro.spec.shapes import DecoderShape
from repro.spec.target import Cost

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
# Of completions as Parquet: numbers and shared names of a row, text after zstd (about 4 characters
# per token, halved), and the footer of a file with the schema.
_ROW_BYTES, _TOKEN_BYTES, _FILE_BYTES = 30, 2, 5000


def trained_parameters(arm: Arm, shape: DecoderShape) -> int:
    """Return how many parameters an arm trains."""
    if arm.training == "none":
        return 0
    if arm.training == "full":
        return shape.parameters()
    norms = 2 * shape.layers * shape.hidden if arm.norms_trained else 0
    return shape.adapter_parameters(arm.lora_rank) + norms


def checkpoint_bytes(arm: Arm, scale: TrainScale, shape: DecoderShape) -> int:
    """Return the bytes of one checkpoint of a run."""
    each = 4 + 2 * _MOMENT_BYTES[scale.optimizer.name]
    return math.ceil(each * trained_parameters(arm, shape))


def working_bytes(arm: Arm, scale: TrainScale, shape: DecoderShape) -> int:
    """Return the bytes that a run takes while it is under way, beside what it leaves."""
    return _CHECKPOINTS * checkpoint_bytes(arm, scale, shape)


def left_bytes(arm: Arm, scale: TrainScale, shape: DecoderShape) -> int:
    """Return the bytes that a finished run leaves, completions aside."""
    if arm.training == "none":
        return _RECORD_BYTES
    numbers = _RECORD_BYTES + _STEP_BYTES * scale.steps
    if arm.training == "full":
        return numbers + 2 * shape.parameters() + _TOKENIZER_BYTES_PER_ROW * shape.vocabulary
    return numbers + 4 * trained_parameters(arm, shape)


def with_disk(
    cost: Cost,
    arms: Sequence[Arm],
    scale: TrainScale,
    shape: DecoderShape | None,
    mean_tokens: int,
) -> Cost:
    """Return a cost with the disk of each arm's runs.

    Parameters
    ----------
    shape
        None where it is not known: then with that of completions alone.
    mean_tokens
        Of a completion.
    """
    left, working = {}, {}
    if shape is not None:
        left = {arm.name: left_bytes(arm, scale, shape) for arm in arms}
        working = {arm.name: working_bytes(arm, scale, shape) for arm in arms}
    completions = {arm.name: completions_bytes(arm, scale, mean_tokens) for arm in arms}
    return dataclasses.replace(
        cost, left_of_arm=left, working_of_arm=working, completions_of_arm=completions
    )


def completions_bytes(arm: Arm, scale: TrainScale, mean_tokens: int) -> int:
    """Return the bytes of a run's completions as Parquet, `--completions`.

    Parameters
    ----------
    mean_tokens
        Of a completion.
    """
    if arm.training == "none":
        return 0
    rows = scale.prompts_per_rollout * scale.group_size
    rollouts = math.ceil(scale.steps / scale.updates_per_rollout)
    return rollouts * (_FILE_BYTES + rows * (_ROW_BYTES + _TOKEN_BYTES * mean_tokens))
