"""Which planned runs become one batched model, and how many at once.

Runs can go together when their scales are the same but for learning rates and seeds, and they train
the same kind of thing. What may differ inside an ensemble: format, seed, noise, loss, reward, rank
(padded to the largest), learning rate. Runs that draw again (dynamic sampling) go with their like:
the others would idle in every further round.

How many go together is decided by memory, from the shape in the checkpoint's `config.json`; the
estimate errs on the side of fewer. Groups of one kind are of equal size, give or take one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.spec.config import RunConfig, TrainScale, digest_of
from repro.spec.shapes import shape_of_config

# Bytes a trained number takes: float32 master, gradient and two moments, and copies in the compute
# dtype for the sampler and for one pass.
_TRAINED_BYTES = 4 + 4 + 8 + 2 + 2
# Where a loss has a KL to the start: the start, and the trained values while it stands in.
_START_BYTES = 4 + 4
_FROZEN_BYTES = 2
# Rows that an evaluation samples at once, and prompts' tokens that it reads at once, over all runs,
# from that much memory on; of less there are fewer in proportion.
EVALUATION_ROWS = 8192
EVALUATION_TOKENS = 2**20
WHOLE_EVALUATION_BYTES = 74 * 2**30
# Of a card's memory: what the estimate may fill; the rest is for fragments, graphs and libraries.
_USED_SHARE = 0.8
_FIXED_BYTES = 3 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Estimated bytes of device memory of an ensemble.

    Attributes
    ----------
    run
        Of each run: weights, what training keeps, the cache of its rollout.
    token
        Of each run and padded token in one backward pass.
    longest
        Tokens of a group whose prompt and completions are as long as they may be.
    reading
        Of an evaluation's prompts while they are read; no backward pass is under way then.
    fixed
        Of the whole: an evaluation's cache, libraries.
    """

    run: int
    token: int
    longest: int
    reading: int
    fixed: int

    def runs_in(self, memory_bytes: int) -> int:
        """Return the number of runs that fit, one group of each at a time."""
        room = int(memory_bytes * _USED_SHARE) - self.fixed
        beside_reading = (room - self.reading) // self.run
        return max(1, min(room // (self.run + self.longest * self.token), beside_reading))

    def tokens_at_once(self, runs: int, memory_bytes: int) -> int:
        """Return the tokens of each run that a backward pass can take, a whole group at least."""
        room = int(memory_bytes * _USED_SHARE) - self.fixed - runs * self.run
        return max(self.longest, room // (runs * max(1, self.token)))


def evaluation_share(memory_bytes: int) -> float:
    """Return the part of an evaluation's rows and tokens that there is memory for at once."""
    return min(1.0, memory_bytes / WHOLE_EVALUATION_BYTES)


def prompts_at_once(runs: int, samples: int, longest: int, share: float = 1.0) -> int:
    """Return the prompts of `longest` tokens that each run gets at once by its `share`."""
    by_rows = share * EVALUATION_ROWS // (samples * runs)
    return int(max(1, min(by_rows, share * EVALUATION_TOKENS // (longest * runs))))


def group_runs(
    runs: Sequence[RunConfig], memory_bytes: int, *, devices: int = 1
) -> list[tuple[RunConfig, ...]]:
    """Return the ensembles in which runs are trained, kinds in the order of their first run.

    `memory_bytes` are of one device; of each kind that has as many runs, at least `devices` groups
    are made.
    """
    kinds: dict[str, list[RunConfig]] = {}
    for run in runs:
        kinds.setdefault(kind_of(run), []).append(run)
    groups: list[tuple[RunConfig, ...]] = []
    for members in kinds.values():
        fitting = footprint(members, share=evaluation_share(memory_bytes)).runs_in(memory_bytes)
        parts = max(-(-len(members) // fitting), min(devices, len(members)))
        # By seed, so that the arms of a seed stay together, which is what is compared: an ensemble
        # that ends leaves whole seeds, but for one at each of its ends.
        members.sort(key=lambda run: run.seed)
        edges = [len(members) * part // parts for part in range(parts + 1)]
        groups += [tuple(members[a:b]) for a, b in itertools.pairwise(edges)]
    return groups


def kind_of(run: RunConfig) -> str:
    """Return a digest that runs of one ensemble have in common.

    Raises `TypeError` when the run has no `TrainScale`.
    """
    scale, arm = run.scale, run.arm
    if not isinstance(scale, TrainScale):
        raise TypeError(f"{run.target}: an ensemble needs a TrainScale, not a {type(scale)}")
    plain = dataclasses.asdict(scale)
    plain["rollout"] = dataclasses.asdict(run.rollout)
    plain["optimizer"].pop("learning_rates")
    plain.pop("seeds")
    draws_again = arm.loss.dynamic_sampling if run.procedure == "train" else 0
    alike = [run.procedure, plain, arm.training, arm.norms_trained, draws_again, run.tier]
    return digest_of(alike)


def footprint(
    runs: Sequence[RunConfig], longest_prompt: int | None = None, share: float = 1.0
) -> Footprint:
    """Return the estimate for runs of one kind, of the largest rank among them.

    Parameters
    ----------
    longest_prompt
        Tokens of the longest prompt, where it is known; None takes the scale's limit.
    share
        Of a whole evaluation, that is made at once; see `evaluation_share`.
    """
    scale: TrainScale = runs[0].scale
    shape = shape_of_config(_config(scale.checkpoint), scale.checkpoint)
    arm = max((run.arm for run in runs), key=lambda arm: arm.lora_rank)
    hidden, inner, layers = shape.hidden, shape.intermediate, shape.layers
    keys, queries, vocabulary = shape.key_size, shape.query_size, shape.vocabulary
    block = hidden * (2 * queries + 2 * keys) + 3 * hidden * inner
    inputs_and_outputs = 6 * hidden + 2 * (queries + keys) + 3 * inner + queries
    width = 4 if scale.compute_dtype == "float32" else 2
    keeps_start = any(run.arm.loss.beta > 0 for run in runs)
    per_trained = _TRAINED_BYTES + (_START_BYTES if keeps_start else 0)
    if arm.training == "full":
        weights = (layers * block + vocabulary * hidden) * per_trained
    else:
        weights = layers * block * _FROZEN_BYTES * width // 2
    if arm.training == "lora":
        weights += layers * arm.lora_rank * inputs_and_outputs * per_trained
    prompt = scale.max_prompt_tokens if longest_prompt is None else longest_prompt
    columns = prompt + scale.rollout.max_new_tokens
    cache = layers * 2 * keys * columns * width
    # Logits in float32 and, while a token is drawn, three times in float64.
    row = cache + vocabulary * (4 + 3 * 8)
    trained = arm.training != "none"
    rollout = scale.prompts_per_rollout * scale.group_size * row if trained else 0
    tokens = scale.group_size * scale.rollout.max_new_tokens + prompt
    # What a block keeps for backward a token: norms' and products' inputs, queries, keys and values
    # behind the prompt's, gate and up; measured to lie within this.
    for_backward = 8 * hidden + 4 * queries + 8 * keys + 4 * inner
    # Without gradient a token holds the residual stream, twice and normed, in float32; attention's
    # output; gate and up, and their product. A mask over a prompt holds, for each of its tokens and
    # columns, a number per query head of a group, another before it is repeated, and two booleans.
    read = 4 * 3 * hidden + width * (hidden + queries + 3 * inner)
    mask = prompt * (width * (queries // keys + 1) + 2)
    return Footprint(
        reading=int(share * EVALUATION_TOKENS) * (read + mask),
        run=weights + rollout,
        token=layers * for_backward * width if trained else 0,
        longest=tokens,
        fixed=_FIXED_BYTES + int(share * EVALUATION_ROWS) * row,
    )


def _config(checkpoint: str) -> Mapping[str, Any]:
    from repro.models.checkpoint import resolve

    path = Path(resolve(checkpoint)) / "config.json"
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config
