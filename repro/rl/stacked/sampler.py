"""Samples S runs' completions together: what `TorchSampler` draws for each, drawn at once.

Each row draws from its own seed by the same function, so a run's tokens are those that it would
have drawn alone. Weights are copied into the decoder's own buffers by `refresh`, as CUDA graphs
read the buffers that they were captured with; added noise goes into the decoder's gains only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repro.rl.stacked.decoding import (
    Buffers,
    Decoder,
    GraphedSteps,
    make_buffers,
    move_rows,
)
from repro.rl.stacked.forward import ALIGNED, Rotary, aligned
from repro.rl.stacked.stack import Stack, own_weights
from repro.rollout.draw import uniforms
from repro.rollout.sampler import Completion, FinishReason, RolloutBatch, check_request
from repro.spec.config import SamplingConfig

# Captured steps between looks at which rows have ended, as a look waits for the device.
_LOOK_EVERY = 8
# Rows of a run below which a captured step of half of them is no sooner done.
_FEWEST = 8
# Steps that are not captured go on with the rows still going when those are so much of all.
_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One run's request: P prompts of token ids, and P * G seeds, prompt-major, in [0, 2**63)."""

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """Buffers of one size of request, and their steps where they are captured.

    `smaller` are views of the buffers for fewer rows per run, and `steps` are by sampling and rows
    per run; both are there only where steps are captured, with a `pool` of memory for the graphs.
    """

    rows: int
    buffers: Buffers
    smaller: dict[int, Buffers]
    steps: dict[tuple[SamplingConfig, int], GraphedSteps]
    pool: Any

    def fitting(self, most: int, size: int) -> int:
        """Return the rows per run to go on with from `size`, of which at most `most` are going."""
        if self.pool is None:
            return most if most <= _SHARE * size else size
        return min(fits for fits in (self.rows, *self.smaller) if fits >= most)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Drawn:
    """What the rows of a request have drawn, wherever they stand in the buffers by now; (., N)."""

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor

    def take(self, buffers: Buffers, rows: Tensor) -> None:
        """Note what buffers say of the rows (N',) int64 that stand in them."""
        for name in ("tokens", "logprobs"):
            getattr(self, name).index_copy_(1, rows, getattr(buffers, name))
        self.lengths.index_copy_(0, rows, buffers.lengths)


class StackSampler:
    """Samples from every policy of a stack.

    Parameters
    ----------
    stack
        Its weights are taken now, and again at each `refresh`.
    max_positions
        Longest prompt and completion together.
    watched
        Of a stack of one: whether logits that are not finite end a rollout. That waits for the
        device at each token, so steps are not captured.

    Attributes
    ----------
    rotary
        Tables for that many positions.
    on_token
        Of a watched sampler: called with the tokens drawn so far and the rows that still go on.
    """

    on_token: Callable[[int, int], None] | None = None

    def __init__(self, stack: Stack, max_positions: int, *, watched: bool = False) -> None:
        self.stack, self.watched = stack, watched
        self._captured = stack.device.type == "cuda" and not watched
        self.max_positions = max_positions
        self.rotary = Rotary(stack.rotary, max_positions, stack.device)
        self._decoder = Decoder(
            weights=own_weights(stack),
            shape=stack.shape,
            rotary=self.rotary,
            ends=torch.tensor(sorted(stack.end_token_ids), device=stack.device),
            stream=stack.stream,
            dtype=stack.dtype,
        )
        # By rows per prompt, prompts and new tokens.
        self._places: dict[tuple[int, int, int], _Place] = {}

    @torch.no_grad()
    def refresh(self, noise: Tensor | None = None) -> None:
        """Take up the stack's weights as they are now, with added noise as of `Stack.weights`."""
        fresh = self.stack.weights(noise)
        for own, new in zip(self._decoder.weights.tensors(), fresh.tensors(), strict=True):
            if own.data_ptr() != new.data_ptr():
                own.copy_(new)

    @torch.inference_mode()
    def sample(
        self,
        requests: Sequence[SampleRequest | None],
        sampling: SamplingConfig,
        *,
        group_size: int,
    ) -> list[RolloutBatch | None]:
        """Sample `group_size` completions of each prompt of each run; None for runs that idle.

        Raises
        ------
        ValueError
            As `Sampler.sample`; and when no run asks for anything.
        FloatingPointError
            Of a watched sampler, when logits are not finite, naming the token and the layer.
        """
        shape, device = self.stack.shape, self.stack.device
        for request in requests:
            if request is not None:
                check_request(
                    request.prompts,
                    group_size=group_size,
                    seeds=request.seeds,
                    max_new_tokens=sampling.max_new_tokens,
                    max_positions=self.max_positions,
                    vocab_size=shape.vocabulary,
                )
        asking = [request for request in requests if request is not None]
        if len(requests) != self.stack.runs or not asking:
            raise ValueError(
                f"{len(requests)} requests, {len(asking)} of them not None, for {self.stack.runs} "
                "runs; one each is needed, and one that asks"
            )
        width = max(len(prompt) for r in asking for prompt in r.prompts)
        if device.type == "cuda":
            width = aligned(width)
        P, place = self._place(
            max(len(r.prompts) for r in asking), group_size, sampling.max_new_tokens, width
        )
        self._ready(place, sampling)
        prompt_ids, padding = _padded(requests, P, width)
        buffers = place.buffers
        self._decoder.prefill(buffers, prompt_ids.to(device), padding.to(device), group_size)
        if self.watched:
            self._require_finite(buffers, prompt_ids[..., -1].flatten().to(device))
        numbers, idle = _numbers(requests, P * group_size, sampling.max_new_tokens)
        buffers.uniforms.copy_(numbers)
        buffers.done.copy_(idle)
        drawn = self._decode(place, width, sampling)
        return self._batches(requests, drawn, int(buffers.number), P * group_size, group_size)

    def _place(self, P: int, group_size: int, new: int, width: int) -> tuple[int, _Place]:
        """Return the smallest buffers that hold P prompts, made if there are none, and their P.

        Without graphs, which are captured with their buffers, none are kept: they are made for
        prompts of this width.
        """
        if not self._captured:
            return P, self._made(P * group_size, new, width + new)
        large = [p for g, p, n in self._places if (g, n) == (group_size, new) and p >= P]
        P = min(large, default=P)
        key = (group_size, P, new)
        if key not in self._places:
            columns = aligned(self.max_positions) + ALIGNED
            self._places[key] = self._made(P * group_size, new, columns)
        return P, self._places[key]

    def _made(self, rows: int, new: int, columns: int) -> _Place:
        """Return buffers for so many rows per run, and for fewer."""
        stack = self.stack
        buffers = make_buffers(
            stack.shape,
            rows=stack.runs * rows,
            columns=columns,
            new=new,
            dtype=stack.dtype,
            device=stack.device,
        )
        smaller, fewer = {}, rows
        while self._captured and fewer % 2 == 0 and fewer // 2 >= _FEWEST:
            fewer //= 2
            smaller[fewer] = buffers.first(stack.runs * fewer)
        pool = torch.cuda.graph_pool_handle() if self._captured else None
        return _Place(rows=rows, buffers=buffers, smaller=smaller, steps={}, pool=pool)

    def _ready(self, place: _Place, sampling: SamplingConfig) -> None:
        """Ready the steps of a place before its buffers are filled."""
        if self._captured and (sampling, place.rows) not in place.steps:
            for rows, buffers in {place.rows: place.buffers, **place.smaller}.items():
                steps = GraphedSteps(self._decoder, buffers, sampling, place.pool)
                place.steps[sampling, rows] = steps

    def _decode(self, place: _Place, width: int, sampling: SamplingConfig) -> _Drawn:
        """Draw until every row has ended, in steps of as many rows as still have not."""
        size, buffers = place.rows, place.buffers
        rows = torch.arange(len(buffers.done), device=buffers.done.device)  # (N,)
        drawn = _Drawn(
            tokens=torch.empty_like(buffers.tokens),
            logprobs=torch.empty_like(buffers.logprobs),
            lengths=torch.empty_like(buffers.lengths),
        )
        for number in range(sampling.max_new_tokens):
            if number % _LOOK_EVERY == 0 or not self._captured:
                going = ~buffers.done.view(self.stack.runs, size)  # (S, R)
                most = int(going.sum(1).max())
                if not most:
                    break
                fitting = place.fitting(most, size)
                if fitting < size:
                    drawn.take(buffers, rows)
                    chosen = _going_first(going, fitting)  # (S * R',)
                    move_rows(buffers, chosen, width + number)
                    size, rows = fitting, rows[chosen]
                    buffers = place.buffers.first(self.stack.runs * size)
            if self._captured:
                place.steps[sampling, size](width + number + 1)
                continue
            # The last tokens are run forward now, when rows that ended with them have gone.
            if number:
                self._decoder.forward(buffers, buffers.tokens[number - 1], width + number)
                if self.watched:
                    self._require_finite(buffers, buffers.tokens[number - 1])
                if self.on_token is not None:
                    self.on_token(number, most)
            self._decoder.draw(buffers, sampling)
        drawn.take(buffers, rows)
        return drawn

    def _require_finite(self, buffers: Buffers, tokens: Tensor) -> None:
        """Raise `FloatingPointError` unless logits after the last tokens, (P,) or (N,), are finite.

        (P,) are the prompts'.
        """
        # NaN goes through the maximum, and is not below infinity.
        if bool(buffers.logits.abs().amax() < torch.inf):
            return
        number, group = int(buffers.number), len(buffers.done) // len(tokens)
        row = int((~torch.isfinite(buffers.logits)).any(dim=1).nonzero()[0])
        place = f"new token {number - 1}" if number else f"prompt {row // group}"
        fault = self._decoder.fault(buffers, tokens.repeat_interleave(group))
        raise FloatingPointError(
            f"logits after {place} are not finite; the first such output is {fault}'s"
        )

    def _batches(
        self,
        requests: Sequence[SampleRequest | None],
        drawn: _Drawn,
        steps: int,
        rows: int,
        group_size: int,
    ) -> list[RolloutBatch | None]:
        """Return the draws of so many steps, run by run."""
        columns = torch.arange(steps, device=drawn.lengths.device)  # (steps,)
        counting = columns < drawn.lengths.unsqueeze(1)  # (N, steps)
        # Counting tokens alone, all rows' one after another, and where each row's end
        tokens = drawn.tokens[:steps].t()[counting].tolist()
        logprobs = drawn.logprobs[:steps].t()[counting].tolist()
        stops = drawn.lengths.cumsum(0).tolist()
        ends = self.stack.end_token_ids
        batches: list[RolloutBatch | None] = []
        for s, request in enumerate(requests):
            if request is None:
                batches.append(None)
                continue
            completions = []
            for row in range(s * rows, s * rows + len(request.seeds)):
                here = slice(stops[row - 1] if row else 0, stops[row])
                own = tuple(tokens[here])
                reason: FinishReason = "stop" if own[-1] in ends else "length"
                completions.append(
                    Completion(
                        token_ids=own,
                        sampled_logprobs=tuple(logprobs[here]),
                        finish_reason=reason,
                    )
                )
            prompts = [tuple(prompt) for prompt in request.prompts]
            batches.append(
                RolloutBatch(prompt_ids=prompts, completions=completions, group_size=group_size)
            )
        return batches


def _going_first(going: Tensor, size: int) -> Tensor:
    """Return `size` rows per run, those still going among them, (S * size,) int64.

    Of the first `size` places of a run, those whose row still goes keep it; of the others, the
    first ones take the rows still going behind.

    `going` is (S, R) bool, True at most `size` times per run.
    """
    runs, rows = going.shape
    front, behind = going[:, :size], going[:, size:]  # (S, size), (S, R - size)
    late = size + behind.int().argsort(dim=1, descending=True, stable=True)  # (S, R - size)
    rank = (~front).cumsum(1) - 1  # (S, size): a free place's number among the free
    taken = ~front & (rank < behind.sum(1, keepdim=True))
    moved = late.gather(1, rank.clamp(0, rows - size - 1))  # (S, size)
    places = torch.arange(rows, device=going.device)
    order = torch.where(taken, moved, places[:size])  # (S, size)
    first = torch.arange(runs, device=going.device).unsqueeze(1) * rows  # (S, 1)
    return (first + order).flatten()  # (S * size,)


def _padded(requests: Sequence[SampleRequest | None], P: int, width: int) -> tuple[Tensor, Tensor]:
    """Return prompts (S, P, width) padded on the left, and the padding (S, P), int64."""
    prompt_ids = torch.zeros(len(requests), P, width, dtype=torch.long)
    padding = torch.full((len(requests), P), width, dtype=torch.long)
    for s, request in enumerate(requests):
        for p, prompt in enumerate(request.prompts if request is not None else ()):
            prompt_ids[s, p, width - len(prompt) :] = torch.tensor(prompt)
            padding[s, p] = width - len(prompt)
    return prompt_ids, padding


def _numbers(
    requests: Sequence[SampleRequest | None], rows: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return uniform numbers (count, S * rows), float64, and which rows idle, (S * rows,) bool.

    Runs that share a seed share its numbers, which are then drawn once.
    """
    asked = [list(request.seeds) if request is not None else [] for request in requests]
    different = list(dict.fromkeys(seed for seeds in asked for seed in seeds))
    drawn = uniforms(different, count)  # (different, count)
    place = {seed: index for index, seed in enumerate(different)}
    index = torch.zeros(len(requests), rows, dtype=torch.long)
    idle = torch.ones(len(requests), rows, dtype=torch.bool)
    for s, seeds in enumerate(asked):
        index[s, : len(seeds)] = torch.tensor([place[seed] for seed in seeds], dtype=torch.long)
        idle[s, : len(seeds)] = False
    return drawn[index.flatten()].t(), idle.flatten()  # (count, S * rows), (S * rows,)
