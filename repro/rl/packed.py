r"""Log-probabilities over packed rows: no padding, blocks computed again in backward.

Rows of any length lie end to end in one sequence of S tokens; products, norms and the vocabulary
see S tokens and nothing else, and attention looks inside each row alone. Each block keeps its input
only and is computed again in backward, from the same 4-bit weights. This is how a large policy is
trained on a GPU; `repro.rl.logprobs` holds the layouts for small ones.

`accumulate_packed` cuts a step's rows into micro-batches of at most so many tokens. Normalisers
belong to the step, so the cut changes memory and nothing else. That is why running out of memory
is not the end: the gradients are cleared and the step starts over with half the tokens.

Easy mistakes
-------------
* Out of memory in the middle of backward leaves gradients of some layers already added: going on
  from the micro-batch that failed would count them twice.
* Attention's implementation is looked up in the config when a block runs, which includes the second
  time, in backward, long after the forward pass: it is set around each block's own call.
* Only positions that predict a counting token may reach the vocabulary, the widest layer by far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from kernels import dispatch
from repro.models.norms import final_norm
from repro.models.policy import Policy
from repro.rl.loss import LossResult, StepCounts, policy_loss
from repro.rl.rows import Rows
from repro.spec.config import LossConfig

Head = Callable[..., tuple[Tensor, Tensor]]

_ATTENTION = "qerl_packed_rows"


def packed_logprobs(
    policy: Policy,
    rows: Rows,
    temperature: float,
    *,
    checkpointing: bool = True,
    head: Head = dispatch.token_logprobs,
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
    head
        `token_logprobs` of `kernels.dispatch`, or one of another precision.

    Returns
    -------
    logprobs, entropy : Tensor, (B, T), 0 where the mask is False; see `completion_logprobs`.

    Raises
    ------
    ValueError
        When the temperature is not positive, or there are no rows.
    """
    if temperature <= 0:
        raise ValueError(
            f"temperature is {temperature}; log-probabilities under sampling need a positive one"
        )
    if len(rows) == 0:
        raise ValueError("there are no rows; log-probabilities need at least one")
    device = policy.device
    tokens, positions, predicts, lengths = _pack(rows)
    decoder: Any = policy.decoder
    ids = tokens.to(device, non_blocking=True).unsqueeze(0)
    hidden = decoder.model.embed_tokens(ids)  # (1, S, H)
    places = positions.to(device, non_blocking=True).unsqueeze(0)
    rotation = decoder.model.rotary_emb(hidden, places)
    again = checkpointing and torch.is_grad_enabled()
    for block in decoder.model.layers:
        if again:
            hidden = checkpoint(_run_block, block, hidden, rotation, lengths, use_reentrant=False)
        else:
            hidden = _run_block(block, hidden, rotation, lengths)
    chosen = final_norm(decoder)(hidden[0, predicts.to(device)])
    mask = rows.mask.to(device)
    output = decoder.get_output_embeddings()
    logprobs, entropy = head(
        chosen,
        output.weight,
        rows.token_ids.to(device)[mask],
        temperature,
        getattr(output, "bias", None),
    )
    return _spread(logprobs, mask), _spread(entropy, mask)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(
        mask, values
    )


def _pack(rows: Rows) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Lay rows end to end.

    Returns
    -------
    tokens, positions : Tensor, (S,), int64
        A completion's last token predicts nothing and is left out.
    predicts : Tensor, (S,), bool
        Positions whose hidden state predicts a counting token, row by row.
    lengths
        Tokens of each row.
    """
    tokens, positions, predicts, lengths = [], [], [], []
    counts = rows.lengths().tolist()
    for row, (prompt_index, count) in enumerate(
        zip(rows.prompt_of_row.tolist(), counts, strict=True)
    ):
        prompt = torch.tensor(rows.prompts[prompt_index])
        length = len(prompt) + count - 1
        tokens.append(torch.cat([prompt, rows.token_ids[row, : count - 1]]))
        positions.append(torch.arange(length))
        predicts.append(torch.arange(length) >= len(prompt) - 1)
        lengths.append(length)
    return torch.cat(tokens), torch.cat(positions), torch.cat(predicts), tuple(lengths)


def _run_block(
    block: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor], lengths: tuple[int, ...]
) -> Tensor:
    """Return the block's output, attention staying inside each row."""
    config = block.self_attn.config
    held = config._attn_implementation
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
        config._attn_implementation = held
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
    split = [tensor.split(row_lengths, dim=2) for tensor in (query, key, value)]
    parts = [
        scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        ).transpose(1, 2)
        for q, k, v in zip(*split, strict=True)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


AttentionInterface.register(_ATTENTION, _attend_rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedStep:
    """What one step's forward and backward passes came to.

    Attributes
    ----------
    logprobs : Tensor, (B, T), float32, on the CPU
    loss
        Of the step.
    results
        One a micro-batch.
    micro_tokens
        Tokens of a micro-batch with which it went through.
    fallbacks
        Tokens with which it ran out of memory before, from the first try on.
    """

    logprobs: Tensor
    loss: float
    results: list[LossResult]
    micro_tokens: int
    fallbacks: list[int]


def split_rows(rows: Rows, micro_tokens: int) -> list[Tensor]:
    """Cut rows, in their order, into micro-batches of at most `micro_tokens` packed tokens.

    A row longer than that stands alone.
    """
    counts = rows.lengths().tolist()
    sizes = [
        len(rows.prompts[prompt]) + count - 1
        for prompt, count in zip(rows.prompt_of_row.tolist(), counts, strict=True)
    ]
    batches: list[list[int]] = []
    room = 0
    for row, size in enumerate(sizes):
        if not batches or size > room:
            batches.append([])
            room = micro_tokens
        batches[-1].append(row)
        room -= size
    return [torch.tensor(batch) for batch in batches]


def evaluate_packed(
    policy: Policy,
    rows: Rows,
    temperature: float,
    *,
    micro_tokens: int,
    head: Head = dispatch.token_logprobs,
) -> Tensor:
    """Return (B, T) float32 log-probabilities on the CPU, without gradient."""
    found = torch.zeros(rows.mask.shape)
    parts = []
    with torch.no_grad():
        for index in split_rows(rows, micro_tokens):
            values = packed_logprobs(policy, rows.select(index), temperature, head=head)[0]
            parts.append((index, values))
    for index, values in parts:
        found[index, : values.shape[1]] = values.float().cpu()
    return found


def accumulate_packed(
    policy: Policy,
    rows: Rows,
    advantages: Tensor,
    config: LossConfig,
    temperature: float,
    *,
    length_limit: int,
    micro_tokens: int,
    old_logprobs: Tensor | None = None,
    checkpointing: bool = True,
    head: Head = dispatch.token_logprobs,
) -> PackedStep:
    """Run a step's forward and backward passes; gradients are left in the parameters.

    Parameters
    ----------
    advantages : Tensor, (B,)
    config
        The objective, without KL term.
    length_limit
        Tokens; the constant of `constant` aggregation.
    micro_tokens
        Tokens of a micro-batch to begin with; halved whenever memory runs out.
    old_logprobs : Tensor or None, (B, T)
        The ratio's denominator; None makes the ratio exactly 1.

    Raises
    ------
    ValueError
        When the objective's value depends on the cut, or a gradient is there already.
    torch.OutOfMemoryError
        When a single row does not fit.
    """
    if config.aggregation == "token_mean_local" or config.beta:
        raise ValueError(
            f"loss {config.name} has aggregation {config.aggregation} and beta {config.beta}; "
            "packed steps need normalisers of the whole step and no KL term"
        )
    held = [p for p in policy.model.parameters() if p.requires_grad]
    if any(parameter.grad is not None for parameter in held):
        raise ValueError("a parameter has a gradient already; a packed step starts from none")
    fallbacks: list[int] = []
    while True:
        batches = split_rows(rows, micro_tokens)
        try:
            logprobs, loss, results = _accumulate(
                policy, rows, advantages, config, temperature, batches,
                length_limit=length_limit, old_logprobs=old_logprobs,
                checkpointing=checkpointing, head=head,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            for parameter in held:
                parameter.grad = None
            if all(len(batch) == 1 for batch in batches):
                raise
            fallbacks.append(micro_tokens)
            micro_tokens //= 2
        else:
            return PackedStep(
                logprobs=logprobs,
                loss=loss,
                results=results,
                micro_tokens=micro_tokens,
                fallbacks=fallbacks,
            )
        # Outside the handler: its exception holds the frames, and so the tensors, that failed.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _accumulate(
    policy: Policy,
    rows: Rows,
    advantages: Tensor,
    config: LossConfig,
    temperature: float,
    batches: Sequence[Tensor],
    *,
    length_limit: int,
    old_logprobs: Tensor | None,
    checkpointing: bool,
    head: Head,
) -> tuple[Tensor, float, list[LossResult]]:
    counts = StepCounts(
        rows=len(rows),
        tokens=int(rows.mask.sum()),
        length_limit=length_limit,
        micro_batches=len(batches),
    )
    logprobs, losses, results = torch.zeros(rows.mask.shape), [], []
    for index in batches:
        part = rows.select(index)
        width = part.mask.shape[1]
        new, _ = packed_logprobs(policy, part, temperature, checkpointing=checkpointing, head=head)
        beside = {
            name: None if values is None else values[index, :width].to(new.device)
            for name, values in (("old", old_logprobs), ("sampled", rows.sampled_logprobs))
        }
        result = policy_loss(
            new,
            advantages[index].to(new.device),
            part.mask.to(new.device),
            config,
            counts,
            old_logprobs=beside["old"],
            sampled_logprobs=beside["sampled"],
        )
        result.loss.backward()
        losses.append(float(result.loss.detach()))
        results.append(result)
        logprobs[index, :width] = new.detach().float().cpu()
    return logprobs, sum(losses), results
