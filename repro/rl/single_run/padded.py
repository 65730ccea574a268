r"""Log-probabilities and entropies of completions under the policy, with gradient.

    logprob_t = log_softmax(z_{t-1} / T)[token_t],    entropy_t = H(softmax(z_{t-1} / T))

z_{t-1} being the logits at the position *before* the token: the last prompt position for the first
one. T is the sampling temperature, on both quantities; leaving it out gives a gradient of nearly
the right direction and the wrong length.

Two layouts, equal up to rounding:

`padded`
    Each row is its prompt followed by its completion, padded on the right. With causal attention
    nothing needs a mask and positions count from 0.
`shared`
    Each prompt goes forward once, into a key-value cache that keeps its graph; its G completions
    attend to that cache, gradients included. The prompts' share of the work falls by G. Rows are
    sorted by length and cut into slices where that saves padding, so one straggler that runs to
    the length limit does not stretch all others.

Easy mistakes: position ids of completions after prompts of different lengths (here each starts at
its own prompt's length); prompt padding left visible in the cache (here masked); computing logits
for padding (the vocabulary is by far the widest layer: here only counting tokens reach it).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from kernels import dispatch
from kernels.segments import sent
from repro.models.policy import Policy
from repro.rl.rows import Rows, spread

Layout = Literal["auto", "padded", "shared"]
# What one more pass costs, in padded tokens. Measured with 0.8 M parameters on one CPU core:
# 64 rows of 8 to 64 tokens take 0.72 s padded, 0.41 s shared in one slice, 0.27 s cut by this rule
# (forward and backward), with hardly a difference between 100 and 300.
SLICE_COST_TOKENS = 150


def completion_logprobs(
    policy: Policy, rows: Rows, temperature: float, *, layout: Layout = "auto"
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the completions' tokens.

    Parameters
    ----------
    policy
        Evaluated as it stands, added noise on its norms included.
    rows
        B rows, T columns.
    temperature
        That of the sampling; positive.
    layout
        See the module docstring. `auto` shares prefixes when prompts have several rows each.

    Returns
    -------
    logprobs : Tensor, (B, T), float32, with gradient; 0 where the mask is False.
    entropy : Tensor, (B, T), float32, nats; 0 where the mask is False.

    Raises
    ------
    ValueError
        When the temperature is not positive, or there are no rows.
    """
    require_rows(rows, temperature)
    decoder: Any = policy.decoder
    if layout == "auto":
        shares = len(rows) > len(torch.unique(rows.prompt_of_row))
        layout = "shared" if shares and _caches_with_gradient(decoder) else "padded"
    hidden = _shared_hidden(policy, rows) if layout == "shared" else padded_hidden(policy, rows)
    return through_head(decoder, hidden, rows, temperature)


def require_rows(rows: Rows, temperature: float) -> None:
    """Raise `ValueError` without rows, or for a temperature that is not positive."""
    if temperature <= 0:
        raise ValueError(
            f"temperature is {temperature}; log-probabilities under sampling need a positive one"
        )
    if len(rows) == 0:
        raise ValueError("there are no rows; log-probabilities need at least one")


def through_head(
    decoder: Any, hidden: Tensor, rows: Rows, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies, (B, T) both, of hidden states.

    Parameters
    ----------
    hidden : Tensor, (tokens, H)
        Those that predict each counting token, row by row.
    """
    output = decoder.get_output_embeddings()
    logprobs, entropy = dispatch.token_logprobs(
        hidden,
        output.weight,
        sent(rows.token_ids[rows.mask], hidden.device),
        temperature,
    )
    mask = sent(rows.mask, hidden.device)
    return spread(logprobs, mask), spread(entropy, mask)


def _caches_with_gradient(decoder: Any) -> bool:
    """Tell whether a cache keeps all keys and their graph in this model as it is set."""
    layer_types = getattr(decoder.config, "layer_types", None) or ["full_attention"]
    return not getattr(decoder, "is_gradient_checkpointing", False) and set(layer_types) == {
        "full_attention"
    }


def padded_hidden(policy: Policy, rows: Rows) -> Tensor:
    """Return the hidden states that predict each counting token, (tokens, H), row-major."""
    tokens, predicting = [], []
    counts = rows.lengths().tolist()
    for row, (index, count) in enumerate(zip(rows.prompt_of_row.tolist(), counts, strict=True)):
        prompt = torch.tensor(rows.prompts[index])
        # A completion's last token predicts nothing and is left out.
        tokens.append(torch.cat([prompt, rows.token_ids[row, : count - 1]]))
        predicting.append(torch.arange(len(tokens[-1])) >= len(prompt) - 1)
    token_ids, predicts = (
        pad_sequence(of, batch_first=True) for of in (tokens, predicting)
    )  # (B, S)
    device = policy.device
    decoder: Any = policy.decoder
    hidden = decoder.model(input_ids=token_ids.to(device), use_cache=False).last_hidden_state
    return hidden[predicts.to(device)]  # (tokens, H)


def _shared_hidden(policy: Policy, rows: Rows) -> Tensor:
    """Do as `padded_hidden`, each prompt going forward once."""
    used, slot = torch.unique(rows.prompt_of_row, return_inverse=True)
    prompts = [rows.prompts[index] for index in used.tolist()]
    cache, last, prompt_mask = _prefill(policy, prompts)
    device = last.device
    hidden = last.new_zeros(len(rows), rows.mask.shape[1], last.shape[-1])
    lengths = rows.lengths()
    order = torch.argsort(lengths, stable=True)
    pieces, positions = [], []
    for piece in _slices(lengths[order].tolist()):
        index = order[piece]
        part = rows.select(index)
        prefix = slot[index].to(device)
        first = last[prefix].unsqueeze(1)  # (b, 1, H)
        if part.mask.shape[1] > 1:
            rest = _continue(policy, part, cache, prefix, prompt_mask)
            first = torch.cat([first, rest], dim=1)  # (b, t, H)
        pieces.append(first[part.mask.to(device)])  # (the part's tokens, H)
        row, column = part.mask.nonzero(as_tuple=True)
        positions.append((index[row], column))
    where = tuple(torch.cat(p).to(device) for p in zip(*positions, strict=True))  # (tokens,) each
    hidden = hidden.index_put(where, torch.cat(pieces))
    return hidden[rows.mask.to(device)]  # (tokens, H)


def _prefill(policy: Policy, prompts: list[tuple[int, ...]]) -> tuple[Any, Tensor, Tensor]:
    """Run U prompts forward once.

    Returns
    -------
    cache
        Keys and values of every layer, (U, heads, S, D), with their graph.
    last : Tensor, (U, H)
        Hidden state of each prompt's last token.
    mask : Tensor, (U, S), int64
        1 on prompt tokens; padding is on the right, where causal attention cannot look.
    """
    device = policy.device
    width = max(len(prompt) for prompt in prompts)
    token_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        token_ids[row, : len(prompt)] = torch.tensor(prompt)
        mask[row, : len(prompt)] = 1
    cache = DynamicCache()
    decoder: Any = policy.decoder
    hidden = decoder.model(
        input_ids=token_ids.to(device), past_key_values=cache, use_cache=True
    ).last_hidden_state
    last = hidden[torch.arange(len(prompts), device=device), mask.sum(1).to(device) - 1]
    return cache, last, mask.to(device)


def _continue(
    policy: Policy, part: Rows, cache: Any, prefix: Tensor, prompt_mask: Tensor
) -> Tensor:
    """Return hidden states (b, t - 1, H) of the completions' tokens but the last."""
    device = policy.device
    token_ids = part.token_ids[:, :-1].to(device)
    own = DynamicCache()
    for layer, entry in enumerate(cache.layers):
        own.update(entry.keys[prefix], entry.values[prefix], layer)  # (b, heads, S, D) each
    visible = prompt_mask[prefix]  # (b, S)
    start = visible.sum(1, keepdim=True)  # (b, 1)
    decoder: Any = policy.decoder
    return decoder.model(
        input_ids=token_ids,
        attention_mask=torch.cat([visible, torch.ones_like(token_ids)], dim=1),
        position_ids=start + torch.arange(token_ids.shape[1], device=device),
        past_key_values=own,
        use_cache=True,
    ).last_hidden_state


def _slices(lengths: list[int]) -> list[slice]:
    """Cut ascending lengths into the slices that minimise padded tokens plus a cost per slice.

    A slice of n rows whose longest is L costs n * L + `SLICE_COST_TOKENS`; the best cut of the
    first i rows is the cheapest over where its last slice begins.
    """
    best = [0.0]
    begin = [0]
    for stop, longest in enumerate(lengths, start=1):
        padded = [best[start] + (stop - start) * longest for start in range(stop)]
        costs = [tokens + SLICE_COST_TOKENS for tokens in padded]
        cheapest = min(range(stop), key=costs.__getitem__)
        best.append(costs[cheapest])
        begin.append(cheapest)
    cuts = []
    stop = len(lengths)
    while stop:
        cuts.append(slice(begin[stop], stop))
        stop = begin[stop]
    return cuts[::-1]
