"""The rollout engine: samples with the tensors that are being trained.

    engine = Engine(policy, EngineConfig(slots=256, max_positions=4096))
    completions = engine.sample(prompts, sampling, group_size=8, seeds=seeds)

There is one set of weights: the packed base, the adapter and the norm gains belong to the policy.
Call `refresh` after an optimiser step to read the updated adapter in place; noise on the norms is
read at each rollout. No second model has to be synchronised or moved out of memory.

The loop, one *round* at a time:

    admit waiting rows           prefill their sequences in chunks
    reserve cache blocks         or preempt the row that was admitted last
    launch some decode steps     from captured graphs on a GPU: the host does nothing in between
    read the previous round      remove rows that have ended, and copy their outputs

The host works one round behind the device, so neither waits for the other. A row may continue for
up to two rounds after its end; the extra tokens are ignored.

Easy to get wrong: all work on the device goes through one stream in this order. This is why a slot
or a block can be reused as soon as the host knows that it is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.reference_step import FAULTY, RUNNING
from kernels.segments import sent
from repro.models.policy import Policy, end_token_ids
from repro.rollout.backend import Backend
from repro.rollout.blocks import BlockPool
from repro.rollout.engine_config import EngineConfig, cache_blocks, width_for
from repro.rollout.forward import Forward
from repro.rollout.prefill import chunks_of, new_tokens
from repro.rollout.results import Results, to_host
from repro.rollout.sampler import Completion, check_request
from repro.rollout.scheduler import Admission, Group, Row, Scheduler
from repro.rollout.state import RowState, Statistics
from repro.spec.checks import require
from repro.spec.config import SamplingConfig

# Share of the slots that must be free before a prefill may delay running rows.
_ENTERING_SHARE = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Readback:
    """What the host reads of a round: status and counts of all slots, and the rows in them."""

    values: Tensor
    ready: Any
    rows: list[tuple[Row, int]]


class Engine:
    """Samples from a policy with continuous batching over a paged cache.

    Parameters
    ----------
    policy
        Weights of any format, with or without an adapter. Full training is refused: its master
        weights are float32, and the engine would use them without the trainer's autocast.
    config
        Sizes and options.

    Attributes
    ----------
    statistics
        Of the last rollout.
    end_token_ids
        Tokens that end a completion.
    """

    def __init__(self, policy: Policy, config: EngineConfig) -> None:
        require(policy.training != "full", "the engine serves LoRA and frozen policies, not full")
        self.policy = policy
        self.config = config
        self.end_token_ids = end_token_ids(policy)
        self.statistics = Statistics()
        self.device = policy.device
        decoder: Any = policy.decoder
        require(
            config.max_positions <= decoder.config.max_position_embeddings,
            f"max_positions is {config.max_positions}; the policy has "
            f"{decoder.config.max_position_embeddings}",
        )
        self._backend = backend_for(policy, config)
        blocks = cache_blocks(policy, config)
        layer = decoder.model.layers[0].self_attn
        shape = (
            len(decoder.model.layers),
            blocks,
            config.block_size,
            decoder.config.num_key_value_heads,
            layer.head_dim,
        )
        self._keys = torch.zeros(shape, dtype=policy.compute_dtype, device=self.device)
        self._values = torch.zeros_like(self._keys)
        cache = self._keys, self._values
        self.forward = Forward(policy, *cache, self._backend, max_positions=config.max_positions)
        self.pool = BlockPool(blocks, config.block_size)
        self.state = RowState(
            config.slots,
            max_new_tokens=config.max_new_tokens,
            max_blocks=self.pool.blocks_for(config.max_positions),
            device=self.device,
        )
        self._scheduler = Scheduler(self.pool, config.slots)
        self._readbacks: deque[_Readback] = deque()
        self._results = Results(self.state)

    @property
    def road(self) -> str:
        """Which way the products of the projections go, as records name it."""
        return ", ".join(sorted({group.road for group in self.forward.groups()}))

    def refresh(self) -> None:
        """Read the current adapter, in place, so that captured steps use it."""
        for group in self.forward.groups():
            group.refresh()

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        group_size: int,
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
    ) -> list[Completion]:
        """See `Sampler.sample`.

        `limits` has that of each of the P * G rows; None takes `sampling.max_new_tokens` for all.

        Raises `ValueError` also if a row of full length does not fit into the cache;
        `FloatingPointError` names row, token and layer, and nothing is drawn from such logits.
        """
        rows = self._rows(prompts, sampling, group_size, seeds, limits)
        self.statistics = Statistics()
        ends = [] if self.config.ignore_end else sorted(self.end_token_ids)
        self._take_cache()
        self.state.begin(ends, sampling.temperature)
        self.forward.read_noise()
        try:
            self._scheduler.add(rows)
            while self._scheduler.unfinished:
                self._round(sampling)
            self._synchronize()
            completions = self._results.completions()
        except BaseException:
            self.abandon()
            raise
        finally:
            self._results = Results(self.state)
            if not self.config.keeps_cache:
                self._give_back_cache()
        self.statistics.generated_tokens = sum(len(c.token_ids) for c in completions)
        return completions

    def steps(self, width: int, sampling: SamplingConfig) -> None:
        """Run a decode step over slots 0 to width - 1, the draw included, and nothing around it.

        Captured ones are replayed, one per width and way of drawing.
        """
        step, captures = partial(self._step, width, sampling), self._backend.captures
        if captures is None:
            step()
            return
        greedy = sampling.temperature == 0
        captures.run((width, greedy, 1.0 if greedy else sampling.top_p), step)

    def _step(self, width: int, sampling: SamplingConfig) -> None:
        state = self.state
        logits = self.forward.decode(
            state.tokens[:width], state.positions[:width], state.table[:width]
        )
        self._backend.choose(logits, state, sampling)

    def _drop_captures(self) -> None:
        if self._backend.captures is not None:
            self._backend.captures.clear()

    def abandon(self) -> None:
        """Free all slots and blocks, also after an error."""
        self._synchronize()
        self._readbacks.clear()
        self._scheduler.clear()
        self.state.positions.fill_(-1)
        for slot in range(self.config.slots):
            self.state.set_blocks(slot, [])
        self.state.send_table()

    def _give_back_cache(self) -> None:
        """Free the cache's memory and the captured steps, which contain its address."""
        for cache in (self._keys, self._values):
            cache.untyped_storage().resize_(0)
        self._drop_captures()

    def _take_cache(self) -> None:
        """Allocate the cache's memory again if it was freed; the layers' views use it."""
        for cache in (self._keys, self._values):
            if cache.untyped_storage().nbytes() < cache.nbytes:
                cache.untyped_storage().resize_(cache.nbytes)
                # Masked positions are multiplied by zero, so they must not hold NaN.
                cache.zero_()

    def close(self) -> None:
        """Free the cache and the captured steps; the policy is unchanged."""
        self._drop_captures()
        self._keys = self._values = torch.empty(0, device=self.device)
        del self.forward, self.state, self._results

    def _rows(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        group_size: int,
        seeds: Sequence[int],
        limits: Sequence[int] | None,
    ) -> list[Row]:
        check_request(self.policy, prompts, sampling, group_size, seeds, self.config.max_positions)
        require(
            sampling.max_new_tokens <= self.config.max_new_tokens,
            f"max_new_tokens is {sampling.max_new_tokens}; the engine was built for "
            f"{self.config.max_new_tokens}",
        )
        if limits is None:
            limits = [sampling.max_new_tokens] * len(seeds)
        require(len(limits) == len(seeds), f"{len(limits)} limits for {len(seeds)} rows")
        require(
            all(1 <= limit <= sampling.max_new_tokens for limit in limits),
            f"limits lie in {min(limits)} to {max(limits)}; they must lie in 1 to "
            f"{sampling.max_new_tokens}",
        )
        groups = [Group(prompt=tuple(prompt), waiting=group_size) for prompt in prompts]
        return [
            Row(index=i, group=groups[i // group_size], seed=seeds[i], limit=limits[i])
            for i in range(len(seeds))
        ]

    def _round(self, sampling: SamplingConfig) -> None:
        """Admit rows, launch some steps, and read the previous round."""
        scheduler, config = self._scheduler, self.config
        if self._may_enter():
            watermark = len(scheduler.running) * self.pool.blocks_for(config.round_steps)
            admission = scheduler.admit(config.round_steps, watermark)
            self._enter(admission)
        left = [row.limit - row.launched for row in scheduler.running]
        steps = min(config.round_steps, max(left, default=0))
        if steps:
            self._reserve(steps)
            self._launch(steps, sampling)
        while len(self._readbacks) > (1 if steps else 0):
            self._read(self._readbacks.popleft())
        self._compact()

    def _may_enter(self) -> bool:
        scheduler, config = self._scheduler, self.config
        if not scheduler.waiting or not scheduler.running:
            return bool(scheduler.waiting)
        enough = max(1, int(config.slots * _ENTERING_SHARE))
        return scheduler.free_slots >= min(enough, len(scheduler.waiting))

    def _enter(self, admission: Admission) -> None:
        """Prefill the admitted rows and put them into their slots."""
        if not admission.rows:
            return
        for chunk in chunks_of(admission.segments, self.config.prefill_tokens):
            tokens, new = new_tokens(
                chunk, self.pool.block_size, self.state.table.shape[1], self.device
            )
            self.forward.prefill(tokens, new)
            self.statistics.prefill_tokens += len(tokens)
        if admission.copies:
            pairs = sent(torch.tensor(admission.copies, dtype=torch.int64), self.device)
            for cache in (self._keys, self._values):
                cache[:, pairs[:, 1]] = cache[:, pairs[:, 0]]
        for row in admission.rows:
            assert row.slot is not None
            self.state.set_blocks(row.slot, row.blocks)
        self.state.enter(admission.rows)
        self._scheduler.entered()

    def _reserve(self, steps: int) -> None:
        """Reserve blocks for the next steps, preempting rows if necessary."""
        scheduler = self._scheduler
        while leaving := scheduler.reserve(steps):
            self._drain()
            for row in leaving:
                if row.slot is None:
                    continue  # it had ended, and its blocks are free
                count = int(self.state.counts[row.slot])
                known = len(row.tokens)
                tokens = self.state.out_tokens[row.slot, known:count].tolist()
                logprobs = self.state.out_logprobs[row.slot, known:count].tolist()
                self.state.leave([row.slot])
                scheduler.preempt(row, [*row.tokens, *tokens], [*row.logprobs, *logprobs])
                self.statistics.preemptions += 1
        for row in scheduler.running:
            assert row.slot is not None
            self.state.set_blocks(row.slot, row.blocks)
        self.state.send_table()

    def _launch(self, steps: int, sampling: SamplingConfig) -> None:
        running = self._scheduler.running
        if not running:
            return
        used = 1 + max(row.slot for row in running if row.slot is not None)
        width = width_for(used, self.config.slots)
        for _ in range(steps):
            self.steps(width, sampling)
        self.statistics.decode_steps += steps
        for row in running:
            row.launched = min(row.limit, row.launched + steps)
        self._readbacks.append(self._readback())

    def _readback(self) -> _Readback:
        values = to_host(torch.stack((self.state.status, self.state.counts)))
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        rows = [(row, row.slot) for row in self._scheduler.running if row.slot is not None]
        return _Readback(values=values, ready=ready, rows=rows)

    def _read(self, readback: _Readback) -> None:
        """Remove the rows that had ended when `readback` was taken."""
        if readback.ready is not None:
            readback.ready.synchronize()
        status, counts = readback.values.tolist()
        ended = [(r, s) for r, s in readback.rows if status[s] != RUNNING and r.slot is not None]
        if not ended:
            return
        for row, slot in ended:
            if status[slot] == FAULTY:
                self._name_fault(row, counts[slot])
        self._results.take([(row, counts[slot], status[slot]) for row, slot in ended])
        slots = [row.slot for row, _ in ended if row.slot is not None]
        for row, _ in ended:
            self._scheduler.leave(row)
        self.state.leave(slots)

    def _name_fault(self, row: Row, count: int) -> None:
        slot = row.slot
        assert slot is not None
        self.state.positions[slot] = len(row.group.prompt) - 1 + count
        width = slot + 1
        state = self.state
        fault = self.forward.name_fault(
            state.tokens[:width], state.positions[:width], state.table[:width], slot
        )
        raise FloatingPointError(
            f"logits of row {row.index} at new token {count} are not finite; the first such output "
            f"is {fault}'s; nothing was drawn from them"
        )

    def _compact(self) -> None:
        """Move rows to lower slots if that allows a narrower step."""
        running, slots = self._scheduler.running, self.config.slots
        if not running or self._scheduler.waiting:
            return
        width = width_for(len(running), slots)
        used = 1 + max(row.slot for row in running if row.slot is not None)
        if width_for(used, slots) == width:
            return
        taken = {row.slot for row in running}
        free = iter([slot for slot in range(width) if slot not in taken])
        moves = []
        for row in running:
            if row.slot is not None and row.slot >= width:
                target = next(free)
                moves.append((row.slot, target))
                self.state.set_blocks(row.slot, [])
                self.state.set_blocks(target, row.blocks)
                self._scheduler.move(row, target)
        self.state.move(moves)
        self.state.send_table()

    def _drain(self) -> None:
        while self._readbacks:
            self._read(self._readbacks.popleft())

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def backend_for(policy: Policy, config: EngineConfig) -> Backend:
    """Return the backend for the policy's device."""
    if policy.device.type == "cuda":
        from repro.rollout.gpu.cuda_backend import GpuBackend

        return GpuBackend(policy, config)
    return Backend()
