"""Samples S runs' completions together: what `TorchSampler` draws for each, drawn at once.

Each row draws from its own seed by the same function, so a run's tokens are those that it would
have drawn alone. Weights are copied into the decoder's own buffers by `refresh`, as CUDA graphs
read the buffers that they were captured with; added noise goes into the decoder's gains only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.rl.stacked.decoding import Buffers, Decoder, Drawing, GraphedSteps, make_buffers
from repro.rl.stacked.forward import ALIGNED, Rotary, aligned
from repro.rl.stacked.stack import Stack, own_weights
from repro.rollout.draw import uniforms
from repro.rollout.sampler import Completion, FinishReason, RolloutBatch, check_request
from repro.spec.config import Exploration, NoiseSharing, SamplingConfig

# Steps between looks at whether every row has ended.
_LOOK_EVERY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """What one run asks to have sampled.

    Attributes
    ----------
    prompts
        P sequences of token ids.
    seeds
        P * G seeds in [0, 2**63), prompt-major.
    exploration
        Draws this run's tokens at another temperature than the policy's.
    """

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    exploration: Exploration | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """Buffers of one size of request, and on a GPU their steps by how tokens are drawn."""

    buffers: Buffers
    steps: dict[Drawing, GraphedSteps]


class StackSampler:
    """Samples from every policy of a stack.

    Parameters
    ----------
    stack
        Its weights are taken now, and again at each `refresh`.
    max_positions
        Longest prompt and completion together.
    sharing
        Of added noise; see `repro.rl.stacked.noise.sharing_of`. By `projection`, the projections
        behind a norm are multiplied one by one.

    Attributes
    ----------
    rotary
        Tables for that many positions.
    """

    def __init__(self, stack: Stack, max_positions: int, sharing: NoiseSharing = "norm") -> None:
        self.stack, self.sharing = stack, sharing
        self.max_positions = max_positions
        self.rotary = Rotary(stack.rotary, max_positions, stack.device)
        self._decoder = Decoder(
            weights=own_weights(stack, sharing),
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
        fresh = self.stack.weights(noise, self.sharing)
        for own, new in zip(self._decoder.weights.tensors(), fresh.tensors(), strict=True):
            if own.data_ptr() != new.data_ptr():
                own.copy_(new)

    def forget(self, group_size: int | None = None) -> None:
        """Let go of the buffers of requests of one group size, or of all."""
        self._places = {
            key: place
            for key, place in self._places.items()
            if group_size is not None and key[0] != group_size
        }

    @torch.no_grad()
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
        P, place = self._place(
            max(len(r.prompts) for r in asking), group_size, sampling.max_new_tokens
        )
        exploring = any(request.exploration is not None for request in asking)
        drawing = Drawing(sampling=sampling, exploring=exploring)
        self._ready(place, drawing)
        width = aligned(max(len(prompt) for r in asking for prompt in r.prompts))
        prompt_ids, padding = _padded(requests, P, width)
        buffers = place.buffers
        self._decoder.prefill(buffers, prompt_ids.to(device), padding.to(device), group_size)
        numbers, idle = _numbers(requests, P * group_size, sampling.max_new_tokens)
        buffers.uniforms.copy_(numbers)
        buffers.done.copy_(idle)
        if exploring:
            heat, opening = _temperatures(requests, P * group_size, sampling.max_new_tokens)
            buffers.heat.copy_(heat)
            buffers.opening.copy_(opening)
        self._decode(place, width, drawing)
        return self._batches(requests, buffers, P * group_size, group_size)

    def _place(self, P: int, group_size: int, new: int) -> tuple[int, _Place]:
        """Return the smallest buffers that hold P prompts, made if there are none, and their P."""
        large = [p for g, p, n in self._places if (g, n) == (group_size, new) and p >= P]
        P = min(large, default=P)
        key = (group_size, P, new)
        if key not in self._places:
            stack = self.stack
            buffers = make_buffers(
                stack.shape,
                rows=stack.runs * P * group_size,
                columns=aligned(self.max_positions) + ALIGNED,
                new=new,
                dtype=stack.dtype,
                device=stack.device,
            )
            self._places[key] = _Place(buffers=buffers, steps={})
        return P, self._places[key]

    def _ready(self, place: _Place, drawing: Drawing) -> None:
        """Capture the steps of a place and a way of drawing before its buffers are filled."""
        if self.stack.device.type == "cuda" and drawing not in place.steps:
            place.steps[drawing] = GraphedSteps(self._decoder, place.buffers, drawing)

    def _decode(self, place: _Place, width: int, drawing: Drawing) -> None:
        graphed = place.steps.get(drawing)
        for number in range(drawing.sampling.max_new_tokens):
            if number % _LOOK_EVERY == 0 and bool(place.buffers.done.all()):
                return
            if graphed is None:
                self._decoder.step(place.buffers, width + number + 1, drawing)
            else:
                graphed(width + number + 1)

    def _batches(
        self,
        requests: Sequence[SampleRequest | None],
        buffers: Buffers,
        rows: int,
        group_size: int,
    ) -> list[RolloutBatch | None]:
        """Return what was drawn, run by run."""
        drawn = int(buffers.number)
        # A row that never ended has the limit as its length, and was drawn to the limit.
        tokens = buffers.tokens[:drawn].t().cpu().tolist()  # N lists of `drawn` tokens
        logprobs = buffers.logprobs[:drawn].t().cpu().tolist()
        lengths = buffers.lengths.cpu().tolist()
        explored, changed = buffers.explored.cpu().tolist(), buffers.changed.cpu().tolist()
        ends = self.stack.end_token_ids
        batches: list[RolloutBatch | None] = []
        for s, request in enumerate(requests):
            if request is None:
                batches.append(None)
                continue
            completions = []
            for row in range(s * rows, s * rows + len(request.seeds)):
                length = lengths[row]
                own = tuple(tokens[row][:length])
                reason: FinishReason = "stop" if own[-1] in ends else "length"
                completions.append(
                    Completion(
                        token_ids=own,
                        sampled_logprobs=tuple(logprobs[row][:length]),
                        finish_reason=reason,
                        explored=explored[row],
                        changed=changed[row],
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
    return drawn[index.flatten()].t(), idle.flatten()


def _temperatures(
    requests: Sequence[SampleRequest | None], rows: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return what rows' temperatures are multiplied by, (S * rows,) float32, and for how long.

    The second is (S * rows,) int64: of at most `count` tokens the first so many; 0 in rows that do
    not explore.
    """
    heat = torch.ones(len(requests), rows)
    opening = torch.zeros(len(requests), rows, dtype=torch.long)
    for s, request in enumerate(requests):
        if request is not None and request.exploration is not None:
            heat[s] = request.exploration.temperature
            opening[s] = request.exploration.tokens_of(count)
    return heat.flatten(), opening.flatten()
