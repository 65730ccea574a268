"""The sampler on the policy's own tensors, in plain torch: the one for CPUs and small policies.

It reads the policy that is being trained, adapters merged into dense float32 matrices once per step
(`refresh`), so there is no second copy of a checkpoint to fall out of step.

All rows write the same column of a static cache; a row's position is its column less its padding.
A step draws from the logits at hand, records, and runs the drawn tokens forward to the next logits.

Merging is done in float32 and the trainer computes base and adapter apart, so the two differ by
rounding: about 1e-6 in a log-probability at these sizes. Every record measures it.

Easy mistakes
-------------
* Forgetting `refresh` after an optimiser step: the rollout then lags a step behind, which no shape
  check shows.
* Merging the noise that lies on the norms at that time: added noise comes and goes between two
  refreshes, so it is read at each rollout.
* Query heads that read one key head stand as further rows of one attention call, token by token
  (row t * group + j), so a mask over tokens is repeated in that order.
* A padded query that sees nothing gives NaN, so the diagonal is always visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import dispatch
from repro.models.policy import Policy, end_token_ids
from repro.models.policy_weights import LayerWeights, PolicyWeights, policy_weights
from repro.rollout.draw import draw, uniforms
from repro.rollout.sampler import Completion, check_request
from repro.spec.config import SamplingConfig

# A rollout goes on with the rows that have not ended when those are so much of all.
_SHARE = 0.75
# cuDNN's attention, which torch would take first, makes a plan of 0.1 s for every new length.
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Fused attention on a GPU wants rows of masks at multiples of 16 bytes.
_ALIGNED = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buffers:
    """What a rollout of P prompts with G completions each lives in; N = P * G.

    Attributes
    ----------
    keys, values : Tensor, (L, N, key_heads, columns, head_dim), float32
    hide : Tensor, (N, columns), float32
        Added to the scores: 0 where a column may be seen, -inf on the prompts' padding and where
        nothing was written yet.
    padding : Tensor, (N,), int64
    logits : Tensor, (N, V), float32
    uniforms : Tensor, (T, N), float64
    done : Tensor, (N,), bool
    """

    keys: Tensor
    values: Tensor
    hide: Tensor
    padding: Tensor
    logits: Tensor
    uniforms: Tensor
    done: Tensor

    def take(self, rows: Tensor) -> Buffers:
        """Return copies of rows (N',) int64."""
        every = {each.name: getattr(self, each.name) for each in fields(self)}
        # Where the axis of rows is not the first
        second = ("keys", "values", "uniforms")
        return Buffers(**{n: v.index_select(int(n in second), rows) for n, v in every.items()})


class Decoder:
    """A policy's weights with the noise that its norms carry now, for prompts and their tokens.

    The longest prompt and completion together have `positions`; the tokens `ends` end a completion.
    """

    def __init__(self, weights: PolicyWeights, positions: int, ends: frozenset[int]) -> None:
        self.weights = weights
        device = weights.embedding.device
        self._gains = [(one.input_norm.gain(), one.post_norm.gain()) for one in weights.layers]
        self._final_gain = weights.final_norm.gain()
        self._ends = torch.tensor(sorted(ends), device=device)
        places = torch.arange(positions, device=device).unsqueeze(0)  # (1, positions)
        # (1, positions, D) each
        cos, sin = weights.rotary(torch.zeros(1, 1, 1, device=device), places)
        half = cos.shape[-1] // 2
        # The rotation's minus sign is that of the sine's first half.
        self._cos = cos[0].float()
        self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1).float()

    def begin(self, prompt_ids: Tensor, padding: Tensor, uniforms: Tensor, group: int) -> Buffers:
        """Return buffers with prompts run forward into the cache and the first logits.

        Parameters
        ----------
        prompt_ids : Tensor, (P, Tp), int64
            Padded on the left.
        padding : Tensor, (P,), int64
        uniforms : Tensor, (T, N), float64
        group
            G: the rows of a prompt, which share what was computed.
        """
        w, device = self.weights, prompt_ids.device
        (P, Tp), (new, N) = prompt_ids.shape, uniforms.shape
        cache = (len(w.layers), N, w.key_heads, Tp + new, w.head_dim)
        rows = padding.repeat_interleave(group)  # (N,)
        columns = torch.arange(Tp + new, device=device)
        prompt = (columns >= rows.unsqueeze(1)) & (columns < Tp)  # (N, columns)
        buffers = Buffers(
            keys=torch.empty(cache, device=device),
            values=torch.empty(cache, device=device),
            hide=torch.full(prompt.shape, -torch.inf, device=device).masked_fill_(prompt, 0.0),
            padding=rows,
            logits=torch.empty(N, len(w.lm_head), device=device),
            uniforms=uniforms,
            done=torch.zeros(N, dtype=torch.bool, device=device),
        )
        places, mask = _prompt_masks(padding, Tp, w.group)
        turns = self._turns(places.flatten())
        hidden = functional.embedding(prompt_ids.flatten(), w.embedding)  # (P Tp, H)
        for number, layer in enumerate(w.layers):
            parts = self._project(number, layer, hidden, turns)
            queries, keys, values = (x.view(P, Tp, *x.shape[1:]) for x in parts)
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # (P, key heads, Tp, D)
            for whole, computed in ((buffers.keys, keys), (buffers.values, values)):
                # (P, G, key heads, columns, D): a prompt's rows lie one after another
                room = whole[number].view(P, group, *whole.shape[2:])
                room[..., :Tp, :] = computed.unsqueeze(1)
            attended = self._attend(queries, keys, values, mask)  # (P, Tp, queries)
            hidden = self._finish(number, layer, hidden, attended.flatten(0, 1))
        logits = self._logits(hidden.view(P, Tp, -1)[:, -1])  # (P, V)
        buffers.logits.view(P, group, -1).copy_(logits.unsqueeze(1).expand(-1, group, -1))
        return buffers

    def draw(
        self, buffers: Buffers, number: int, sampling: SamplingConfig
    ) -> tuple[Tensor, Tensor]:
        """Return the token of this number in every row and its logprob; note which rows end."""
        tokens, logprobs = draw(buffers.logits, buffers.uniforms[number], sampling)
        buffers.done.logical_or_((tokens.unsqueeze(1) == self._ends).any(1))  # (N, e) -> (N,)
        return tokens, logprobs

    def forward(self, buffers: Buffers, tokens: Tensor, column: int) -> None:
        """Run one token per row, (N,) int64, forward to the next logits, in a column."""
        for _, hidden in self._passing(buffers, tokens, column):
            last = hidden
        buffers.logits.copy_(self._logits(last))

    def fault(self, buffers: Buffers, tokens: Tensor, column: int) -> str:
        """Run tokens (N,) int64 again; name the first output that is not finite."""
        for name, hidden in self._passing(buffers, tokens, column):
            if not bool(torch.isfinite(hidden).all()):
                return name
        return "the final norm or lm_head"

    def _passing(self, b: Buffers, tokens: Tensor, column: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the residual stream (N, H) after each part, by the part's name."""
        w, seen = self.weights, column + 1
        turns = self._turns(column - b.padding)
        b.hide[:, column] = 0.0  # from now on the column of these tokens is seen
        mask = b.hide[:, None, None, :seen]  # (N, 1, 1, seen)
        if mask.is_cuda:
            mask = mask.expand(-1, -1, w.group, -1)
        hidden = functional.embedding(tokens, w.embedding)  # (N, H)
        yield "the embedding", hidden
        for number, layer in enumerate(w.layers):
            # One token per row: (N, heads, D)
            queries, keys, values = self._project(number, layer, hidden, turns)
            b.keys[number, :, :, column], b.values[number, :, :, column] = keys, values
            own = b.keys[number, :, :, :seen], b.values[number, :, :, :seen]
            attended = self._attend(queries.unsqueeze(1), *own, mask)  # (N, 1, queries)
            hidden = self._finish(number, layer, hidden, attended.flatten(1))
            yield f"model.layers.{number}", hidden

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (M, 1, head_dim), of positions (M,)."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """Return RMSNorm of x (..., H) with a gain."""
        return functional.rms_norm(x, (x.shape[-1],), eps=self.weights.epsilon) * gain

    def _project(
        self, number: int, layer: LayerWeights, hidden: Tensor, turns: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values, (M, heads, head_dim)."""
        w, (cos, sin) = self.weights, turns
        qkv = layer.qkv(self._norm(hidden, self._gains[number][0]))
        qkv = qkv.view(len(hidden), -1, w.head_dim)  # (M, query + 2 key heads, D)
        turning, values = qkv.split([w.query_heads + w.key_heads, w.key_heads], dim=1)
        if layer.head_gain is not None:
            turning = self._norm(turning, layer.head_gain)
        first, second = turning.chunk(2, dim=-1)
        turned = torch.addcmul(turning * cos, torch.cat([second, first], dim=-1), sin)
        queries, keys = turned.split([w.query_heads, w.key_heads], dim=1)
        return queries, keys, values

    def _finish(self, number: int, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after a block, given attention's output (M, queries)."""
        hidden = hidden + layer.o(attended)
        both = layer.gate_up(self._norm(hidden, self._gains[number][1]))
        return hidden + layer.down(dispatch.swiglu(both))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return attention's output, (N, T, queries), of N sequences.

        Queries are (N, T, query_heads, head_dim), keys and values (N, key_heads, C, head_dim). The
        mask, (N, 1, T * group, C), is added to scores; T * group may be 1, for all.
        """
        w, (N, T) = self.weights, queries.shape[:2]
        # (N, T, key heads, group, D) -> (N, key heads, T * group, D), token by token
        rows = queries.reshape(N, T, w.key_heads, w.group, w.head_dim).transpose(1, 2).flatten(2, 3)
        out = functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, scale=w.scaling
        )
        return out.unflatten(2, (T, w.group)).transpose(1, 2).flatten(2)  # (N, T, queries)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return (M, V) of the residual stream (M, H)."""
        return self._norm(hidden, self._final_gain) @ self.weights.lm_head.t()


class TorchSampler:
    """Samples from a policy on the policy's device.

    The weights of `policy` are taken at the first rollout, and again after each `refresh`. Noise on
    its norms is honoured as it stands at each rollout. `on_token` is called with the tokens drawn
    so far and the rows that still go on.
    """

    on_token: Callable[[int, int], None] | None = None

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.end_token_ids = end_token_ids(policy)
        self._weights: PolicyWeights | None = None

    def refresh(self) -> None:
        """Take up the policy's weights as they are now, at the next rollout."""
        self._weights = None

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        group_size: int,
        seeds: Sequence[int],
    ) -> list[Completion]:
        """See `Sampler.sample`; `FloatingPointError` names the token and the layer."""
        config: Any = self.policy.decoder.config
        most = config.max_position_embeddings
        check_request(self.policy, prompts, sampling, group_size, seeds, most)
        if self._weights is None:
            self._weights = policy_weights(self.policy)
        positions = max(map(len, prompts)) + sampling.max_new_tokens
        decoder = Decoder(self._weights, positions, self.end_token_ids)
        with torch.inference_mode(), sdpa_kernel(_WITHOUT_PLANS):
            tokens, logprobs, lengths = self._decode(decoder, prompts, seeds, sampling, group_size)
        every = zip(tokens.t().tolist(), logprobs.t().tolist(), lengths.tolist(), strict=True)
        return [
            Completion(
                token_ids=tuple(ids[:length]),
                sampled_logprobs=tuple(values[:length]),
                finish_reason="stop" if ids[length - 1] in self.end_token_ids else "length",
            )
            for ids, values, length in every
        ]

    def _decode(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingConfig,
        group_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw until every row has ended, in steps of the rows that have not.

        Returns tokens and log-probabilities, (steps, N), and how many of each row count, (N,).
        """
        device = self.policy.device
        prompt_ids, padding = _padded(prompts, _ALIGNED if device.type == "cuda" else 1)
        width = prompt_ids.shape[1]
        numbers = uniforms(seeds, sampling.max_new_tokens).t()  # (T, N)
        buffers = decoder.begin(
            prompt_ids.to(device), padding.to(device), numbers.to(device), group_size
        )
        _require_finite(decoder, buffers, prompt_ids[:, -1].to(device), 0, width - 1)
        rows = torch.arange(len(seeds), device=device)  # (N,) those that the buffers hold
        tokens = torch.zeros(numbers.shape, dtype=torch.long, device=device)
        logprobs = torch.zeros(numbers.shape, device=device)
        lengths = torch.zeros_like(rows)
        number = 0
        while number < sampling.max_new_tokens:
            going = (~buffers.done).nonzero().squeeze(1)  # (N',)
            if not len(going):
                break
            lengths[rows[going]] = number + 1
            if len(going) <= _SHARE * len(rows):
                buffers, rows = buffers.take(going), rows[going]
            # The last tokens are run forward now, when rows that ended with them have gone.
            if number:
                last, column = tokens[number - 1, rows], width + number - 1
                decoder.forward(buffers, last, column)
                _require_finite(decoder, buffers, last, number, column)
                if self.on_token is not None:
                    self.on_token(number, len(going))
            drawn = decoder.draw(buffers, number, sampling)
            tokens[number, rows], logprobs[number, rows] = drawn
            number += 1
        return tokens[:number], logprobs[:number], lengths


def _require_finite(
    decoder: Decoder, buffers: Buffers, tokens: Tensor, number: int, column: int
) -> None:
    """Raise `FloatingPointError` unless logits after the last tokens, (P,) or (N,), are finite.

    (P,) are the prompts'; `number` tokens were drawn, and the last stand in `column`.
    """
    # NaN goes through the maximum, and is not below infinity.
    if bool(buffers.logits.abs().amax() < torch.inf):
        return
    group = len(buffers.done) // len(tokens)
    row = int((~torch.isfinite(buffers.logits)).any(dim=1).nonzero()[0])
    place = f"new token {number - 1}" if number else f"prompt {row // group}"
    fault = decoder.fault(buffers, tokens.repeat_interleave(group), column)
    raise FloatingPointError(
        f"logits after {place} are not finite; the first such output is {fault}'s"
    )


def _padded(prompts: Sequence[Sequence[int]], multiple: int) -> tuple[Tensor, Tensor]:
    """Return prompts (P, width) padded on the left to a multiple, and the padding (P,), int64."""
    width = -(-max(map(len, prompts)) // multiple) * multiple
    prompt_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    for place, prompt in enumerate(prompts):
        prompt_ids[place, width - len(prompt) :] = torch.tensor(prompt)
    return prompt_ids, torch.tensor([width - len(prompt) for prompt in prompts])


def _prompt_masks(padding: Tensor, width: int, group: int) -> tuple[Tensor, Tensor]:
    """Return positions, (P, width), and the mask, (P, 1, width * group, width), of prompts.

    `padding`, (P,), says how many columns on the left hold nothing.
    """
    columns = torch.arange(width, device=padding.device)
    filled = columns >= padding.unsqueeze(1)  # (P, width)
    causal = columns <= columns.unsqueeze(1)  # (width, width)
    visible = causal & filled.unsqueeze(1)  # (P, width, width)
    visible |= torch.eye(width, dtype=torch.bool, device=padding.device)
    mask = torch.zeros(visible.shape, device=padding.device).masked_fill_(~visible, -torch.inf)
    positions = (columns - padding.unsqueeze(1)).clamp_(min=0)  # (P, width)
    return positions, mask.repeat_interleave(group, dim=1).unsqueeze(1)
