"""Device memory of one RL step, by part, before anything runs. Needs no torch.

A step samples completions with an engine whose cache stays where it is, then updates the adapter
over micro-batches of packed tokens. The last blocks' activations are kept as far as there is room;
the others keep their input and are computed again in backward:

    rollout = weights + embeddings + adapter + optimiser + cache + graphs + prefill or logits
    update  = the same up to cache and graphs + gradients + activations + logits + scratch
    peak    = max(rollout, update) + workspace + context

With M tokens in a micro-batch, L blocks and 2 bytes per activation:

    inputs        L M H 2                              of every block
    kept          M 2 (H + 2 Q + 2 Kv + 2 I + 7 R)     beyond its input, a block that is kept
    one block     M 2 (4 H + 6 Q + 5 Kv + 6 I)         what backward of a block holds at its worst
    logits        1.5 * min(M, chunk) V 4              float32 logits, and their 16-bit gradient
    scratch       2 max(N K)                           one layer's weight, dense, 4-bit bases only

(Q and Kv: channels of all query and of all key heads.) Norms' and SwiGLU's outputs are never kept:
backward makes them again in one pass over memory (`kernels.triton.projections`).

A published model's run has micro-batches of as many tokens as its device has room for
(`TrainingMemory`); a policy whose shape is not known by its checkpoint keeps the scale's rows.

Easy mistakes
-------------
* Hopper's packed weights take 4.5 bits in every 4-bit format (2304 bytes for 16 x 256 weights,
  both padded); what a checkpoint stores is another number: 4.5, 4.25, and NF4's float32 scales of
  64 weights 4.5. The paper's sizes are the checkpoint's, with a tied `lm_head` counted twice.
* Members of a group share their prompt's blocks of the cache: its size follows the prompts, not
  the rows.
* Rows that find no room wait; more rows than fit cost time, not memory. What must fit is one.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

from repro.models.decoder import LINEARS
from repro.spec.arm import Arm, OptimizerName, RolloutAdapter, WeightFormat
from repro.spec.checks import Bound, Count, check_fields, require
from repro.spec.config import OPENING_TOKENS, TrainScale
from repro.spec.shapes import DecoderShape, shape_of_checkpoint

# Bits per weight in a checkpoint, scales included: those of `kernels.formats`, without torch.
_BITS = {"bf16": 16.0, "nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5}
_PACK_ROWS, _PACK_COLUMNS, _PACK_BYTES = 16, 256, 2304
# Bytes of AdamW's two moments per parameter; 8 bits with a float32 scale per 256.
MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 + 2 * 4 / 256}
# A training run's cache takes at most this share of the memory that is free when it begins; the
# update's activations need the rest (`repro.rollout.for_policy`).
CACHE_SHARE = 0.4
# Of a budget, what micro-batches and kept blocks are fitted into: the plan is good to a twentieth,
# and rows of other lengths in every pass leave gaps in the allocator's memory.
FILLED_SHARE = 0.92
# The same for rows sampled at once, with the least of an update beside them: where 16-bit weights
# leave little, each row counts, and a step that runs out of memory is begun again with fewer.
SLOTS_SHARE = 0.98
# Positions per block of the cache, and tokens of one chunk of a prefill: the engine's defaults.
BLOCK_POSITIONS = 32
PREFILL_TOKENS = 16384
# Float32 logits held at once (kernels/triton/logprobs.py); backward holds half as much again.
_LOGIT_BYTES = 640 << 20
# More tokens in a micro-batch gain nothing, however small the model.
MOST_MICRO_TOKENS = 131072
# More tokens of full fine-tuning, of whose pass the plan knows too little to fill a card with it.
MOST_FULL_TOKENS = 16384
_FINEST_PADDING = 64
# What a pass costs beyond its tokens, in tokens: 4-bit weights are rebuilt, long products faster.
_PASS_TOKENS = 300
# Driver, libraries' own memory and loaded kernels, as the driver reports it (one NVIDIA H200).
CONTEXT_BYTES = 854 << 20
# Workspaces of cuBLAS and of this project's kernels.
_WORKSPACE_BYTES = 64 << 20
# A captured step: nodes and their arguments, by block and width; and its share of activations.
_GRAPH_BYTES_PER_BLOCK = 160 << 10
# Rows that a training run's engine samples at once.
MOST_SLOTS = 256
# What vLLM is given beside weights and cache: activations, captured graphs, draws. An estimate.
_SERVING_BYTES = 4 << 30
# Rows at which the engine captures a step.
GRAPH_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_Factor = Annotated[int, Bound(least=1, most=1e9)]  # the product of two has 63 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step is, as far as memory goes.

    Attributes
    ----------
    prompts, group
        P prompts with G completions each.
    prompt_tokens, completion_tokens
        Longest of each.
    slots
        Rows sampled at once.
    micro_tokens
        Tokens of a micro-batch, prompts included; one row at least.
    optimizer
        `adamw` or `adamw_8bit`.
    kept_blocks
        The last blocks, so many, whose activations are kept for backward; 0 to all.
    keep_cache
        Whether cache and graphs stay during the update.
    shares_prompts
        Whether the cache is sized for groups that share their prompt's blocks; else each slot has
        room for a prompt of its own, as where single questions are asked, too.
    full_over
        Of full training, the ranks that divide what is trained; 0 where an adapter is trained.
    rollout_adapter
        `folded` keeps a second copy of the base's projections, and no 16-bit one of the adapter.
    """

    shape: DecoderShape
    weight_format: WeightFormat = "nvfp4"
    rank: _Factor = 32
    prompts: _Factor = 1
    group: _Factor = 8
    prompt_tokens: _Factor = 256
    completion_tokens: _Factor = 2048
    slots: Count = 8
    micro_tokens: int = 2304
    optimizer: OptimizerName = "adamw"
    kept_blocks: int = 0
    keep_cache: bool = True
    shares_prompts: bool = True
    full_over: int = 0
    rollout_adapter: RolloutAdapter = "apart"

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.rollout_adapter == "apart" or self.weight_format == "bf16",
            f"the weight format is {self.weight_format}; a folded adapter needs bf16",
        )
        require(
            self.micro_tokens >= self.row_tokens,
            f"micro_tokens is {self.micro_tokens}; one row has {self.row_tokens}",
        )
        require(
            0 <= self.kept_blocks <= self.shape.layers,
            f"kept_blocks is {self.kept_blocks}; the model has {self.shape.layers}",
        )

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.prompt_tokens + self.completion_tokens

    def packed(self, rows: int) -> int:
        """Return the packed tokens of so many rows in their order, a shared prompt once."""
        if not self.shares_prompts:
            return rows * self.row_tokens
        prompts = -(-rows // self.group)
        if 1 < rows < self.rows and rows % self.group:
            prompts += 1  # of most cuts that do not end with a group
        return rows * self.completion_tokens + prompts * self.prompt_tokens

    @property
    def cache_blocks(self) -> int:
        """Blocks of 32 positions for `slots` rows, the scrap block included."""
        if not self.shares_prompts:
            return self.slots * -(-self.row_tokens // BLOCK_POSITIONS) + 1
        prompt = -(-self.prompt_tokens // BLOCK_POSITIONS)
        # Each row feeds the last prompt token again, so only the blocks before it are shared.
        own = -(-self.row_tokens // BLOCK_POSITIONS) - (self.prompt_tokens - 1) // BLOCK_POSITIONS
        return self.prompts_at_once * prompt + self.slots * own + 1

    @property
    def prompts_at_once(self) -> int:
        """Prompts behind `slots` rows."""
        return -(-self.slots // self.group) if self.shares_prompts else self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of a step by part, `{part: bytes}`; both phases have the same parts in order."""

    step: StepShape
    rollout: dict[str, int]
    update: dict[str, int]

    @property
    def peak(self) -> int:
        """The larger phase's total."""
        return max(sum(self.rollout.values()), sum(self.update.values()))


def weight_bytes(step: StepShape) -> int:
    """Return the bytes of all base weights, those of 4 bits as Hopper's kernels read them."""
    shape = step.shape
    if step.weight_format == "bf16":
        return 2 * shape.projection_parameters()
    packs = sum(
        -(-N // _PACK_ROWS) * -(-K // _PACK_COLUMNS) for N, K in shape.projections().values()
    )
    return shape.layers * packs * _PACK_BYTES


def checkpoint_bytes(shape: DecoderShape, weight_format: WeightFormat) -> int:
    """Return a checkpoint's bytes as the paper counts them: a tied `lm_head` twice."""
    other = shape.embedding_parameters(count_tied_twice=True) + shape.small_parameters()
    return int(shape.projection_parameters() * _BITS[weight_format] / 8) + 2 * other


def padded(tokens: int) -> int:
    """Return a packed pass's tokens with padding: at most a thirty-second more, or 64.

    Every new number makes libraries choose their products anew and the allocator find new blocks,
    which takes a small model longer than its arithmetic.
    """
    multiple = max(_FINEST_PADDING, 2 ** (tokens // 64).bit_length())
    return -(-tokens // multiple) * multiple


def plan_memory(step: StepShape) -> MemoryPlan:
    """Return the bytes of a step by part."""
    shape = step.shape
    trained: float = shape.adapter_parameters(step.rank)
    if step.full_over:
        trained = shape.parameters() / step.full_over
    cache = 2 * shape.layers * shape.key_size * BLOCK_POSITIONS * step.cache_blocks * 2
    graphs, folded = _graph_bytes(step), step.rollout_adapter == "folded"
    largest = max(N * K for N, K in shape.projections().values())
    resident = {
        "weights": weight_bytes(step) * (1 + folded),
        "embeddings": 2 * (shape.embedding_parameters() + shape.small_parameters()),
        # Masters, and the 16-bit copies of an adapter; of full training the copy is the weights.
        "adapter": int((4 if step.full_over or folded else 4 + 2) * trained),
        "optimiser": int(trained * MOMENT_BYTES[step.optimizer]),
    }
    during_update = 1 if step.keep_cache else 0
    rest = {"workspace": _WORKSPACE_BYTES, "context": CONTEXT_BYTES}
    rollout = {
        **resident,
        "gradients": 0,
        "cache": cache,
        "graphs": graphs,
        # Or what folding the largest projection holds: base and sum in float32, and rounded.
        "activations": max(_prefill_bytes(step), folded * (4 + 4 + 2) * largest),
        "logits": 2 * step.slots * shape.vocabulary * 4,
        **rest,
    }
    activations, logits = _update_bytes(step)
    update = {
        **resident,
        "gradients": int(4 * trained),
        "cache": during_update * cache,
        "graphs": during_update * graphs,
        "activations": activations,
        "logits": logits,
        **rest,
    }
    return MemoryPlan(step=step, rollout=rollout, update=update)


def _beyond_cap(step: StepShape, device_bytes: int) -> int:
    """Return the bytes of a full cache that a training run's sampler does not take."""
    plan = plan_memory(step)
    resident = ("weights", "embeddings", "adapter", "context")
    free = device_bytes - sum(plan.rollout[part] for part in resident)
    if step.full_over:
        free -= plan.update["gradients"] + plan.rollout["optimiser"]
        free -= sum(_passing_bytes(step)[:2])
    return max(0, plan.rollout["cache"] - max(0, int(free * CACHE_SHARE)))


def gathered_bytes(table: int, block: int, ranks: int) -> tuple[int, int, int]:
    """Return bytes of weights and gradients that a pass of full training holds for a while.

    The head has `table` elements, a block's projections have `block`. The first are buffers of
    gathers, held all the time. Then come those at the head (float32) and in a block (16 bits): its
    weights and gradient, whole in float32 to be added up over ranks, and a rank's part of the sum.
    Alone there are only gradients, before they are added.
    """
    if ranks == 1:
        return 0, 8 * table, 4 * block
    part = 4 / ranks
    return 4 * table + 2 * block, int((12 + part) * table), int((8 + part) * block)


def _passing_bytes(step: StepShape) -> tuple[int, int, int]:
    shape = step.shape
    block = shape.projection_parameters() // shape.layers
    return gathered_bytes(shape.vocabulary * shape.hidden, block, step.full_over)


def _diagonal_image_bytes(step: StepShape) -> int:
    """Return the 16-bit copies of the factors where B of a group is one block-diagonal matrix."""
    shape, rank = step.shape, step.rank
    sizes = shape.projections()
    total = 0
    for group in LINEARS.values():
        members = len(group)
        rows = sum(sizes[name][0] for name in group)
        total += members * rank * (sizes[group[0]][1] + rows)
    return 2 * shape.layers * total


def _graph_bytes(step: StepShape) -> int:
    """Return the bytes of captures: their nodes, and the activations of the widest one."""
    shape = step.shape
    widths = sum(width <= max(step.slots, 1) for width in GRAPH_WIDTHS)
    a_row = 2 * (4 * shape.hidden + shape.query_size + 2 * shape.key_size + 3 * shape.intermediate)
    tables = step.slots * step.completion_tokens * (8 + 4 + 4)  # numbers, tokens, logprobs
    return widths * shape.layers * _GRAPH_BYTES_PER_BLOCK + step.slots * a_row + tables


def _prefill_bytes(step: StepShape) -> int:
    """Return the activations of the largest chunk of prompts that goes forward at once."""
    shape = step.shape
    tokens = min(PREFILL_TOKENS, step.prompts_at_once * step.prompt_tokens)
    a_token = 2 * (4 * shape.hidden + 2 * shape.query_size + 4 * shape.key_size)
    return tokens * (a_token + 2 * 3 * shape.intermediate)


def _update_bytes(step: StepShape) -> tuple[int, int]:
    """Return the activations and logits that a micro-batch holds at its worst moment.

    Backward starts at the logits, when only checkpoints are held beside them, and then goes from
    block to block: the larger of the two is the peak, and its part is what is returned.
    """
    shape, M = step.shape, padded(step.micro_tokens)
    H, Q, Kv, middle = shape.hidden, shape.query_size, shape.key_size, shape.intermediate
    # The stream is float32 where float32 masters multiply by autocast.
    hidden = (4 if step.full_over else 2) * M * H
    # Of each kept block, besides its input.
    kept = 2 * M * (H + 2 * Q + 2 * Kv + 2 * middle + 7 * step.rank)
    saved = shape.layers * hidden + step.kept_blocks * kept
    worst_block = 2 * M * (4 * H + 6 * Q + 5 * Kv + 6 * middle)
    if step.full_over:
        # By the policy's own modules: inputs of products twice, in float32 and 16 bits.
        buffers, at_head, in_block = _passing_bytes(step)
        saved += buffers
        worst_block = M * (30 * H + 8 * Q + 12 * Kv + 18 * middle) + in_block
    elif step.kept_blocks:
        worst_block -= kept
    if step.weight_format != "bf16":
        worst_block += 2 * max(N * K for N, K in shape.projections().values())
    # The adapters' images of a pass; their gradients are those of one block at a time.
    saved += 0 if step.full_over else _diagonal_image_bytes(step)
    logits = min(M * shape.vocabulary * 4, _LOGIT_BYTES) * 3 // 2
    if step.full_over:
        logits = logits * 4 // 3 + at_head  # the logits' gradient is float32, too
    if 4 * hidden + logits > worst_block:
        return saved + 4 * hidden, logits
    return saved + worst_block, 0


def fit_update(
    step: StepShape, room: int, *, kept: int | None = None, most: int = MOST_MICRO_TOKENS
) -> StepShape:
    """Return the step with the micro-batches and kept blocks that take the least time in `room`.

    Micro-batches are of equal numbers of rows; one row each where even that is too much: the plan's
    peak then says so. Computing all blocks again takes a third of an update's products.

    Parameters
    ----------
    step
        With micro-batches of the longest row that is expected.
    room
        Bytes for all that the update holds.
    kept
        Blocks to keep; None chooses. A pass through a policy's own modules keeps more of a block
        than is planned here, so it should keep none.
    """
    least = math.inf
    best = dataclasses.replace(step, kept_blocks=kept or 0)
    rows = max(1, min(step.rows, most // step.row_tokens))
    while rows >= 1:
        batches = -(-step.rows // rows)
        rows = -(-step.rows // batches)
        tokens = max(step.packed(rows), step.micro_tokens)
        fitting = dataclasses.replace(best, micro_tokens=tokens, kept_blocks=kept or 0)
        fits = sum(plan_memory(fitting).update.values()) <= room
        if fits and kept is None:
            fitting = _with_most_kept(fitting, room)
        # An update's time over that of one long pass that keeps all blocks.
        recomputed = 1 - fitting.kept_blocks / step.shape.layers
        cost = (1 + recomputed / 2) * (1 + _PASS_TOKENS / fitting.micro_tokens)
        if fits and cost < least:
            best, least = fitting, cost
        rows -= 1
    return best


def _with_most_kept(step: StepShape, room: int) -> StepShape:
    """Return a step that fits with as many blocks kept as fit."""

    def needed(kept: int) -> int:
        return sum(plan_memory(dataclasses.replace(step, kept_blocks=kept)).update.values())

    most = bisect.bisect(range(1, step.shape.layers + 1), room, key=needed)
    return dataclasses.replace(step, kept_blocks=most)


def fit_slots(step: StepShape, budget: int) -> StepShape:
    """Return the step with the most rows at once that the budget holds; 1 where none fits."""

    def needed(slots: int) -> int:
        return plan_memory(dataclasses.replace(step, slots=slots)).peak

    most = bisect.bisect(range(1, step.rows + 1), int(budget * SLOTS_SHARE), key=needed)
    chosen = dataclasses.replace(step, slots=max(1, most))
    return fit_update(chosen, int(budget * FILLED_SHARE), kept=step.kept_blocks or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """What a run of an arm at a scale takes of a device; its step has micro-batches of one row.

    `in_vllm` tells whether vLLM samples. `sharing` is how many ranks share a CPU's RAM, where only
    `least` is planned; it is 0 on GPUs.
    """

    step: StepShape
    in_vllm: bool = False
    sharing: int = 0

    @property
    def served(self) -> int:
        """Bytes of vLLM beside the run, its copy of the base among them, without its cache."""
        if not self.in_vllm:
            return 0
        plan = plan_memory(self.step).rollout
        return plan["weights"] + plan["embeddings"] + _SERVING_BYTES

    @property
    def least(self) -> int:
        """Bytes with one row at once, in the rollout and in the update; on a CPU all is float32."""
        plan = plan_memory(dataclasses.replace(self.step, slots=1))
        stored = plan.update["embeddings"]
        stored += plan.update["weights"] * (self.step.weight_format == "bf16")
        widened = -stored if self.step.full_over else stored  # of full training masters are all
        if self.sharing:
            return (plan.peak + self.served + widened) * self.sharing
        return plan.peak + self.served

    def fitting(self, device_bytes: int) -> StepShape:
        """Return the step with micro-batches and kept blocks for a device of so many bytes."""
        left, full = device_bytes - self.served, self.step.full_over > 0
        room = int(left * FILLED_SHARE) + _beyond_cap(self.step, left)
        most = MOST_FULL_TOKENS if full else MOST_MICRO_TOKENS
        return fit_update(self.step, room, kept=0 if full else None, most=most)

    def served_share(self, device_bytes: int) -> float:
        """Return the part of a device that vLLM takes: what is served, and the cache.

        The cache has room for all slots, or takes what the device has for it.
        """
        beyond = _beyond_cap(self.step, device_bytes - self.served)
        return (self.served + plan_memory(self.step).rollout["cache"] - beyond) / device_bytes

    def peak(self, device_bytes: int | None) -> int:
        """Return the planned peak; without a device, of all rows at once."""
        if device_bytes is None:
            rows = max(1, min(self.step.rows, MOST_FULL_TOKENS // self.step.row_tokens))
            whole = dataclasses.replace(self.step, micro_tokens=rows * self.step.row_tokens)
            return plan_memory(whole).peak + self.served
        step = self.fitting(device_bytes)
        beyond = _beyond_cap(step, device_bytes - self.served)
        return plan_memory(step).peak - beyond + self.served


def training_memory(
    arm: Arm, scale: TrainScale, ranks: int = 1, *, on_cpu: bool = False
) -> TrainingMemory | None:
    """Return what each GPU of a run's ranks holds, or a CPU's RAM; None where no shape is known."""
    shape = shape_of_checkpoint(scale.checkpoint)
    if shape is None:
        return None
    prompt = scale.longest_prompt + OPENING_TOKENS
    rows = scale.prompts_per_rollout * scale.group_size
    step = StepShape(
        shape=shape,
        weight_format=arm.weight_format,
        rank=arm.lora_rank if arm.training == "lora" else 1,
        prompts=scale.prompts_per_rollout,
        group=scale.group_size,
        prompt_tokens=prompt,
        completion_tokens=scale.longest_completion,
        slots=min(rows, MOST_SLOTS),
        micro_tokens=prompt + scale.longest_completion,
        optimizer=scale.optimizer.name,
        shares_prompts=False,
        full_over=ranks if arm.training == "full" else 0,
        rollout_adapter=arm.rollout_adapter,
    )
    in_vllm, sharing = scale.sampler == "vllm", ranks if on_cpu else 0
    return TrainingMemory(step=step, in_vllm=in_vllm, sharing=sharing)
