"""How long a run on a published checkpoint is thought to take, before any is recorded.

The rates are those of `repro.targets.step_costs`; what is added here is how much of it a run does.
A rollout of R rows on S slots lasts as long as its longest rows, so that its decode steps are

    mean completion * R / S                  where rows wait for slots (R well above S)
    twice the mean, about the longest row    where all run at once

and evaluation is rollouts alone. A start of a run reads its weights, builds an engine and captures
its steps; the end takes the digest of the files. Completions' mean length is assumed, and the plan
says so; dynamic sampling is taken to draw every batch twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from repro.spec.arm import Arm
from repro.spec.config import TrainScale
from repro.spec.hub import is_hub_name
from repro.spec.shapes import SHAPES, DecoderShape, shape_of_checkpoint
from repro.spec.step_scale import StepPoint, step_arm
from repro.spec.target import Cost
from repro.spec.tier import GIB, Download
from repro.targets.run_disk import with_disk
from repro.targets.step_costs import H200, Rates, decode_seconds, update_seconds

# Published peaks of a consumer card of 24 GB (1008 GB/s, 165 Tflop/s in bfloat16), the part of them
# that is commonly reached, and launches of its host.
CARD_24GB = Rates(
    name="a consumer card of 24 GB, predicted from its published peaks",
    bytes_per_second=0.8e12,
    flops_per_second=100e12,
    seconds_a_block=60e-6,
)
_SLOTS = 256
# Beside training and asking: imports, an engine and its captures; each byte of the checkpoint read,
# and read again for its digest. Fitted to six runs of three steps on one H100 (docs/paper_tier.md):
# a first run, whose kernels are compiled, takes about 30 s longer, of which half is counted.
_SECONDS_PER_START = 32.0
_BYTES_PER_SECOND_READ = 2e9
# Test problems of sets that are asked whole.
TEST_PROBLEMS = {"gsm8k": 1319, "math500": 500, "aime24": 30, "aime25": 30, "amc23": 40}
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
_PROMPT_TOKENS = 200
_DRAWS = 2


def mean_completion(scale: TrainScale) -> int:
    """Return the assumed mean length of a completion, tokens."""
    likely = 300 if scale.data.source == "gsm8k" else 1500
    return min(likely, scale.rollout.max_new_tokens)


def training_cost(
    arms: Sequence[Arm], scale: TrainScale, before: Cost | None = None, rates: Rates | None = None
) -> Cost:
    """Return what a run of each arm at a scale is thought to need.

    Parameters
    ----------
    before
        A cost whose device rates are kept where `rates` names none.
    """
    rates = rates or (CARD_24GB if before and CARD_24GB.name in before.basis else H200)
    shape = shape_of_checkpoint(scale.checkpoint)
    timed = None if shape is None else SHAPES.get(shape.name)
    seconds = {arm.name: run_seconds(arm, scale, timed, rates) for arm in arms} if timed else {}
    weights = 0 if shape is None else 2 * shape.parameters()
    mean = mean_completion(scale)
    assumed = f"completions of {mean} tokens assumed"
    basis = f"at the rates of {rates.name}; {assumed}" if timed else "the model's size is not known"
    cost = Cost(
        train_seconds=None,
        evaluate_seconds=None,
        memory_bytes=weights + 8 * GIB,
        disk_bytes=10_000_000,
        downloads=_downloads(scale, weights),
        basis=basis,
        seconds_of_arm=seconds,
    )
    return with_disk(cost, arms, scale, shape, mean)


def run_seconds(arm: Arm, scale: TrainScale, shape: DecoderShape, rates: Rates = H200) -> float:
    """Return the seconds of one run: training, and asking before, during and after it."""
    way, mean = step_arm(arm), mean_completion(scale)
    asked = _questions(scale)
    evaluations = scale.evaluation.samples + 1
    stored = _stored_bytes(scale.checkpoint, shape)
    begin = _SECONDS_PER_START + 2 * stored / _BYTES_PER_SECOND_READ
    if arm.training == "none":
        return begin + _rollout(way, shape, asked * evaluations, mean, rates)
    rows = scale.prompts_per_rollout * scale.group_size
    rollouts = math.ceil(scale.steps / scale.updates_per_rollout)
    draws = _DRAWS if arm.loss.dynamic_sampling else 1
    point = _point(shape, rows, mean)
    training = rollouts * (
        draws * _rollout(way, shape, rows, mean, rates) + update_seconds(way, point, rates)
    )
    if scale.updates_per_rollout > 1:
        # Old log-probabilities of the later parts: a forward pass, a third of an update.
        training += rollouts * update_seconds(way, point, rates) / 3
    every = scale.evaluation.every
    held_out = scale.data.development_problems * (scale.steps // every if every else 0)
    asking = _rollout(way, shape, asked * (evaluations + 1) + held_out, mean, rates)
    return begin + training + asking


def _stored_bytes(checkpoint: str, shape: DecoderShape) -> int:
    """Return the bytes of a checkpoint's weights: of the files in a folder, else 16 bits each."""
    files = Path(checkpoint).expanduser().glob("*.safetensors")
    return sum(file.stat().st_size for file in files) or 2 * shape.parameters()


def _questions(scale: TrainScale) -> int:
    """Return the test problems of a scale, each set's own and the split's."""
    sets = [item.data for item in scale.test_sets]
    sets += [scale.data] if scale.accuracy_over == "split" else []
    return sum(data.test_problems or TEST_PROBLEMS.get(data.source, 1000) for data in sets)


def _rollout(way: object, shape: DecoderShape, rows: int, mean: int, rates: Rates) -> float:
    slots = min(rows, _SLOTS)
    steps = max(2 * mean, mean * math.ceil(rows / slots))
    point = dataclasses.replace(_point(shape, slots, mean), completion_tokens=steps)
    return decode_seconds(way, point, rates)  # type: ignore[arg-type]


def _point(shape: DecoderShape, rows: int, mean: int) -> StepPoint:
    return StepPoint(
        name="run",
        model=shape.name,
        prompts=1,
        group=rows,
        prompt_tokens=_PROMPT_TOKENS,
        completion_tokens=mean,
        slots=min(rows, _SLOTS),
    )


def _downloads(scale: TrainScale, weights: int) -> tuple[Download, ...]:
    sources = dict.fromkeys([scale.data.source, *(item.data.source for item in scale.test_sets)])
    data = tuple(DATA_DOWNLOADS[name] for name in sources if name in DATA_DOWNLOADS)
    if not is_hub_name(scale.checkpoint):
        return data
    return (Download(kind="model", name=scale.checkpoint, nbytes=weights), *data)
