"""Samples S runs' completions together: what `TorchSampler` draws for each, drawn at once.

Each row draws from its own seed by the same function, so a run's tokens are those that it would
have drawn alone. Weights are copied into the decoder's own buffers by `refresh`, as CUDA graphs
read the buffers that they were captured with; added noise goes into the decoder's gains only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.rl.stacked.decoding import Buffers, Decoder, GraphedSteps, make_buffers
from repro.rl.stacked.stack import Stack, own_weights
from repro.rl.stacked.stacked_block import ALIGNED, Rotary, aligned
from repro.rollout.draw import uniforms
from repro.rollout.sampler import Completion, FinishReason, RolloutBatch, check_request
from repro.spec.config import SamplingConfig

# Captured steps between looks at which rows have ended, as a look waits for the device.
_LOOK_EVERY = 8
# A watched sampler goes on with the rows that have not ended when those are so much of all.
_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One run's request: P prompts of token ids, and P * G seeds, prompt-major, in [0, 2**63)."""

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Drawn:
    """What the rows of a request have drawn, wherever they stand in the buffers by now; (., N)."""

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor

    def note(self, buffers: Buffers, rows: Tensor) -> None:
        """Copy the results of the rows (N',) int64 that the buffers hold."""
        for name in ("tokens", "logprobs"):
            getattr(self, name).index_copy_(1, rows, getattr(buffers, name))
        self.lengths.index_copy_(0, rows, buffers.lengths)


class StackedSampler:
    """Samples from every policy of a stack.

    Parameters
    ----------
    stack
        Its weights are taken now, and again at each `refresh`.
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
        # By rows per prompt, prompts and new tokens; and their steps, where those are captured.
        self._buffers: dict[tuple[int, int, int], Buffers] = {}
        self._steps: dict[tuple[int, int, int, SamplingConfig], GraphedSteps] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captured else None

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
        P, new = max(len(r.prompts) for r in asking), sampling.max_new_tokens
        steps = None
        if self._captured:
            P, buffers, steps = self._graphed(P, group_size, sampling)
        else:
            buffers = self._made(P * group_size, new, width + new)
        prompt_ids, padding = _padded(requests, P, width)
        self._decoder.prefill(buffers, prompt_ids.to(device), padding.to(device), group_size)
        if self.watched:
            self._require_finite(buffers, prompt_ids[..., -1].flatten().to(device))
        numbers, idle = _numbers(requests, P * group_size, new)
        buffers.uniforms.copy_(numbers)
        buffers.done.copy_(idle)
        drawn = self._decode(buffers, width, sampling, steps)
        return self._batches(requests, drawn, int(buffers.number), P * group_size, group_size)

    def _graphed(
        self, P: int, group_size: int, sampling: SamplingConfig
    ) -> tuple[int, Buffers, GraphedSteps]:
        """Return the smallest buffers that hold P prompts, how many they hold, and their steps."""
        new = sampling.max_new_tokens
        large = [p for g, p, n in self._buffers if (g, n) == (group_size, new) and p >= P]
        P = min(large, default=P)
        key = (group_size, P, new)
        if key not in self._buffers:
            columns = aligned(self.max_positions) + ALIGNED
            self._buffers[key] = self._made(P * group_size, new, columns)
        buffers = self._buffers[key]
        if (*key, sampling) not in self._steps:
            steps = GraphedSteps(self._decoder, buffers, sampling, self._pool)
            self._steps[*key, sampling] = steps
        return P, buffers, self._steps[*key, sampling]

    def _made(self, rows: int, new: int, columns: int) -> Buffers:
        """Return buffers for so many rows per run."""
        stack = self.stack
        return make_buffers(
            stack.shape,
            rows=stack.runs * rows,
            columns=columns,
            new=new,
            dtype=stack.dtype,
            device=stack.device,
        )

    def _decode(
        self, buffers: Buffers, width: int, sampling: SamplingConfig, steps: GraphedSteps | None
    ) -> _Drawn:
        """Draw until every row has ended; alone, in steps of the rows that have not."""
        rows = torch.arange(len(buffers.done), device=buffers.done.device)  # (N,)
        drawn = _Drawn(
            tokens=torch.empty_like(buffers.tokens),
            logprobs=torch.empty_like(buffers.logprobs),
            lengths=torch.empty_like(buffers.lengths),
        )
        for number in range(sampling.max_new_tokens):
            if number % _LOOK_EVERY == 0 or steps is None:
                going = (~buffers.done).nonzero().squeeze(1)  # (N',)
                if not len(going):
                    break
                if self.watched and len(going) <= _SHARE * len(rows):
                    drawn.note(buffers, rows)
                    buffers, rows = buffers.take(going), rows[going]
            if steps is not None:
                steps(width + number + 1)
                continue
            # The last tokens are run forward now, when rows that ended with them have gone.
            if number:
                self._decoder.forward(buffers, buffers.tokens[number - 1], width + number)
                if self.watched:
                    self._require_finite(buffers, buffers.tokens[number - 1])
                if self.on_token is not None:
                    self.on_token(number, len(going))
            self._decoder.draw(buffers, sampling)
        drawn.note(buffers, rows)
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
