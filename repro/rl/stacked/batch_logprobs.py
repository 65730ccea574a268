r"""Log-probabilities and entropies of S runs' completions, with gradient.

Each prompt goes forward once and its completions attend to its keys and values, gradients
included. All tokens of a run, of prompts and completions, lie on one axis through norms and
products; attention takes the two parts apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dispatch
from repro.rl.stacked.batch import Batch
from repro.rl.stacked.shape import Shape
from repro.rl.stacked.stack import Layer, Weights
from repro.rl.stacked.stacked_block import (
    Rotary,
    additive,
    attend,
    embed,
    finish,
    norm,
    project,
    prompt_masks,
)


def batch_logprobs(
    weights: Weights,
    shape: Shape,
    batch: Batch,
    rotary: Rotary,
    temperature: float,
    *,
    stream: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies, (n,) float32, in the order of `batch.targets`.

    The weights are of S runs, added noise included, and the batch is on their device; `stream` and
    `dtype` are those of the residual stream and of products.
    """
    hidden = _hidden(weights, shape, batch, rotary, stream=stream, dtype=dtype)
    chosen = hidden.flatten(0, 1).index_select(0, batch.select)  # (n, H)
    head = weights.head
    if head.shape[0] == 1:
        return dispatch.token_logprobs(chosen, head[0], batch.targets, temperature)
    pairs = [
        dispatch.token_logprobs(part, head[s], ids, temperature)
        for s, (part, ids) in enumerate(
            zip(chosen.split(batch.counts), batch.targets.split(batch.counts), strict=True)
        )
        if len(ids)
    ]
    logprobs, entropies = zip(*pairs, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _hidden(
    weights: Weights,
    shape: Shape,
    batch: Batch,
    rotary: Rotary,
    *,
    stream: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """Return the states that predict each completion's tokens, (S, U * G * (1 + Tc), H), normed."""
    S, U, G, Tc = batch.token_ids.shape
    Tp = batch.prompt_ids.shape[2]
    padding = batch.padding.flatten()  # (S U,)
    positions, prompt_mask = prompt_masks(padding, Tp, shape.group, dtype)
    own = (Tp - padding).unsqueeze(1) + torch.arange(Tc, device=padding.device)  # (S U, Tc)
    own = own.unsqueeze(1).expand(-1, G, -1)  # (S U, G, Tc)
    # A run's tokens on one axis, M = U Tp + U G Tc: its prompts, then its completions.
    places = torch.cat([positions.view(S, U * Tp), own.reshape(S, U * G * Tc)], dim=1)  # (S, M)
    cos, sin = rotary.at(places)  # (S, M, 1, D)
    ids = torch.cat([batch.prompt_ids.view(S, -1), batch.token_ids.view(S, -1)], dim=1)  # (S, M)
    hidden = embed(weights, ids, stream)  # (S, M, H)
    masks = prompt_mask, _completion_mask(padding, Tp, G, Tc, shape.group, dtype)
    for layer in weights.layers:
        hidden = _block(layer, hidden, cos, sin, masks, (S, U, G, Tp, Tc), shape)
    # What predicts each completion's first token, (S, U, G, 1, H), and its others
    last = hidden[:, : U * Tp].view(S, U, 1, Tp, -1)[:, :, :, -1:].expand(-1, -1, G, -1, -1)
    rest = hidden[:, U * Tp :].view(S, U, G, Tc, -1)  # (S, U, G, Tc, H)
    predicting = torch.cat([last, rest], dim=3).reshape(S, U * G * (1 + Tc), -1)
    return norm(predicting, weights.final_gain, shape.epsilon)


def _completion_mask(
    padding: Tensor, Tp: int, G: int, Tc: int, group: int, dtype: torch.dtype
) -> Tensor:
    """Return (S U G, 1, Tc * group, Tp + Tc): each sees its prompt, and its own past."""
    filled = torch.arange(Tp, device=padding.device) >= padding.unsqueeze(1)  # (S U, Tp)
    filled = filled[:, None].expand(-1, Tc, -1)  # (S U, Tc, Tp)
    columns = torch.arange(Tc, device=padding.device)
    causal = (columns <= columns.unsqueeze(1)).expand(len(padding), -1, -1)  # (S U, Tc, Tc)
    visible = torch.cat([filled, causal], dim=2)  # (S U, Tc, Tp + Tc)
    return additive(visible, group, dtype).repeat_interleave(G, dim=0)


def _block(
    layer: Layer,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    masks: tuple[Tensor, Tensor],
    sizes: tuple[int, int, int, int, int],
    shape: Shape,
) -> Tensor:
    S, U, G, Tp, Tc = sizes
    split = [U * Tp, U * G * Tc]
    # Queries, keys and values of prompts, (S, U Tp, heads, D), and of completions, (S, U G Tc, ...)
    parts = [part.split(split, dim=1) for part in project(layer, hidden, cos, sin, shape)]
    (q0, q1), (k0, k1), (v0, v1) = parts

    def sequences(x: Tensor, T: int) -> Tensor:
        """Return (N, heads, T, D) of (S, N / S * T, heads, D)."""
        return x.reshape(-1, T, *x.shape[2:]).transpose(1, 2)

    def behind_prompt(prompt: Tensor, own: Tensor) -> Tensor:
        """Return (S U G, heads, Tp + Tc, D): the prompt's, then the completion's."""
        # (S U, heads, Tp, D) -> (S U G, heads, Tp, D)
        shared = sequences(prompt, Tp).unsqueeze(1).expand(-1, G, -1, -1, -1).flatten(0, 1)
        return torch.cat([shared, sequences(own, Tc)], dim=2)

    prompts = attend(  # (S U, Tp, queries)
        q0.reshape(S * U, Tp, *q0.shape[2:]), sequences(k0, Tp), sequences(v0, Tp), masks[0], shape
    )
    completions = attend(  # (S U G, Tc, queries)
        q1.reshape(S * U * G, Tc, *q1.shape[2:]),
        behind_prompt(k0, k1),
        behind_prompt(v0, v1),
        masks[1],
        shape,
    )
    # Prompts, then completions: (S, M, queries)
    attended = torch.cat([prompts.view(S, U * Tp, -1), completions.view(S, U * G * Tc, -1)], dim=1)
    return finish(layer, hidden, attended, shape)
