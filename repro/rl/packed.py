r"""Log-probabilities over packed rows: no padding, blocks computed again in backward.

Rows of any length lie end to end in one sequence of S tokens; products, norms and the vocabulary
see S tokens and nothing else, and attention looks inside each row alone. Each block keeps its input
only and is computed again in backward, from the same 4-bit weights. This is how a large policy is
trained on a GPU; `repro.rl.logprobs` holds the layouts for small ones, and
`repro.rl.step` cuts a whole step into such passes.

Easy mistakes
-------------
* Attention's implementation is looked up in the config when a block runs, which includes the second
  time, in backward, long after the forward pass: it is set around each block's own call.
* Only positions that predict a counting token may reach the vocabulary, the widest layer by far.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from repro.models.norms import final_norm
from repro.models.policy import Policy
from repro.rl.logprobs import laid_out, require_rows, through_head
from repro.rl.rows import Rows

_ATTENTION = "qerl_packed_rows"


def packed_logprobs(
    policy: Policy,
    rows: Rows,
    temperature: float,
    *,
    checkpointing: bool = True,
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
    checkpointing
        Whether blocks are computed again in backward.

    Returns
    -------
    logprobs, entropy : Tensor, (B, T), 0 where the mask is False; see `completion_logprobs`.

    Raises
    ------
    ValueError
        When the temperature is not positive, or there are no rows.
    """
    require_rows(rows, temperature)
    device = policy.device
    decoder: Any = policy.decoder
    with _arithmetic(policy):
        chosen = _hidden(decoder, rows, device, checkpointing and torch.is_grad_enabled())
    return through_head(decoder, chosen, rows, temperature)


def _arithmetic(policy: Policy) -> AbstractContextManager[Any]:
    """Return the context of a pass: float32 masters under 16-bit compute multiply in autocast."""
    if policy.training != "full" or policy.compute_dtype == torch.float32:
        return nullcontext()
    return torch.autocast(policy.device.type, dtype=policy.compute_dtype)


def _hidden(decoder: Any, rows: Rows, device: torch.device, again: bool) -> Tensor:
    """Return the hidden states that predict each counting token, (tokens, H), row by row.

    `again` computes the blocks again in backward.
    """
    tokens, predicts = laid_out(rows)
    lengths = tuple(len(own) for own in tokens)
    ids = torch.cat(tokens).to(device, non_blocking=True).unsqueeze(0)  # (1, S)
    hidden = decoder.model.embed_tokens(ids)  # (1, S, H)
    positions = torch.cat([torch.arange(length) for length in lengths])  # (S,)
    places = positions.to(device, non_blocking=True).unsqueeze(0)  # (1, S)
    rotation = decoder.model.rotary_emb(hidden, places)  # cos and sin, (1, S, D)
    for block in decoder.model.layers:
        if again:
            hidden = checkpoint(_run_block, block, hidden, rotation, lengths, use_reentrant=False)
        else:
            hidden = _run_block(block, hidden, rotation, lengths)
    chosen: Tensor = final_norm(decoder)(hidden[0, torch.cat(predicts).to(device)])  # (tokens, H)
    return chosen


def _run_block(
    block: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor], lengths: tuple[int, ...]
) -> Tensor:
    """Return the block's output, attention staying inside each row."""
    config = block.self_attn.config
    before = config._attn_implementation
    config._attn_implementation = _ATTENTION
    try:
        out = block(
            hidden,
            attention_mask=None,
            position_ids=None,
            past_key_values=None,
            use_cache=False,
            position_embeddings=rotation,
            row_lengths=lengths,
        )
    finally:
        config._attn_implementation = before
    return out[0] if isinstance(out, tuple) else out


def _attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    row_lengths: tuple[int, ...],
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend causally inside each row of a packed sequence, (1, heads, S, D) in."""
    del module, unused
    if attention_mask is not None or sliding_window is not None:
        raise ValueError("packed rows take full causal attention: no mask and no sliding window")
    # Per row: (1, heads, its tokens, D) in, (1, its tokens, heads, D) out
    split = [tensor.split(row_lengths, dim=2) for tensor in (query, key, value)]
    parts = [
        scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        ).transpose(1, 2)
        for q, k, v in zip(*split, strict=True)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None  # (1, S, heads, D)


AttentionInterface.register(_ATTENTION, _attend_rows)
