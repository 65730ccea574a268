r"""Log-probabilities and entropies of completions under the policy, with gradient, in packed rows.

    logprob_t = log_softmax(z_{t-1} / T)[token_t],    entropy_t = H(softmax(z_{t-1} / T))

z_{t-1} being the logits at the position *before* the token: the last prompt position for the first
one. T is the sampling temperature, on both quantities; leaving it out gives a gradient of nearly
the right direction and the wrong length.

The prompts of a pass lie end to end, each once, and behind them all completions, those of one
prompt side by side: S tokens in one sequence. Products, norms and the vocabulary see S tokens and
nothing else; in attention a completion sees its prompt and itself, on a GPU by one call a block
whatever the rows (`kernels.triton.packed_attention`). The G completions of a prompt share its work,
in backward too. `repro.rl.step` cuts a whole step into such passes.

The last `kept_blocks` blocks keep their activations; earlier ones keep only their input and are
computed again in backward, from the same weights.

Projections that share an input are one product (q, k, v; gate, up) where their weights lie side by
side, as they do for 4-bit bases from loading on and for 16-bit ones once an engine is built. What
cannot be multiplied so (trained base weights, another library's product) goes through the policy's
own modules.

The adapters' float32 masters are turned into images of the activations' type once a pass, block by
block as the pass goes: the device has work while the host prepares the next block.

Easy mistakes
-------------
* Only positions that predict a counting token may reach the vocabulary, the widest layer by far.
  The last position of a prompt predicts the first token of each of its completions.
* Indexing by a mask on the device makes the host wait for it: masks are applied on the host.
* S is padded to one of few values (`repro.models.memory_plan.padded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernels import dispatch
from kernels.reference_train import Norm, Projections
from kernels.segments import Segments, segments, sent
from repro.models.decoder import LINEARS
from repro.models.fused_weights import fused_bias, fused_weight, side_by_side
from repro.models.lora import AdapterLinear, base_linear
from repro.models.memory_plan import padded
from repro.models.norms import PerturbableRMSNorm, final_norm
from repro.models.policy import Policy
from repro.models.quantized_linear import QuantizedLinear
from repro.rl.rows import Rows, spread

LogprobsAndEntropy = tuple[Tensor, Tensor]
# A of a group's projections, one below another, and B as blocks of a diagonal, or None for both.
Image = tuple[Tensor | None, Tensor | None]


def packed_logprobs(
    policy: Policy, rows: Rows, temperature: float, *, kept_blocks: int | None = 0
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the completions' tokens.

    Parameters
    ----------
    policy
        Evaluated as it stands, added noise on its norms included.
    rows
        B rows, at least one, T columns.
    temperature
        That of the sampling; positive.
    kept_blocks
        Of how many blocks, the last ones, activations are kept for backward; None keeps all.

    Returns
    -------
    logprobs : Tensor, (B, T), float32, with gradient; 0 where the mask is False.
    entropy : Tensor, (B, T), float32, nats; 0 where the mask is False.
    """
    decoder: Any = policy.decoder
    output = decoder.get_output_embeddings()

    def through_head(hidden: Tensor) -> LogprobsAndEntropy:
        """Return both of the hidden states that predict each counting token, (tokens, H)."""
        token_ids = sent(rows.token_ids[rows.mask], hidden.device)
        logprobs, entropy = dispatch.token_logprobs(hidden, output.weight, token_ids, temperature)
        mask = sent(rows.mask, hidden.device)
        return spread(logprobs, mask), spread(entropy, mask)

    def whole_pass() -> LogprobsAndEntropy:
        with _arithmetic(policy):
            hidden = packed_hidden(policy, rows, kept_blocks)
        return cast(LogprobsAndEntropy, policy.within(output, through_head, hidden))

    return cast(LogprobsAndEntropy, policy.within(decoder, whole_pass))


def _arithmetic(policy: Policy) -> AbstractContextManager[Any]:
    """Return the context of a pass: float32 masters under 16-bit compute multiply in autocast."""
    if policy.training != "full" or policy.compute_dtype.itemsize > 2:
        return nullcontext()
    # Each weight is read once a pass: a cache of them in 16 bits would only hold them all.
    return torch.autocast(policy.device.type, dtype=policy.compute_dtype, cache_enabled=False)


def packed_hidden(policy: Policy, rows: Rows, kept_blocks: int | None = 0) -> Tensor:
    """Return the hidden states that predict each counting token, (tokens, H), row by row."""
    decoder: Any = policy.decoder
    layout = lay_out(rows, policy.device)
    embed = decoder.model.embed_tokens
    hidden = policy.within(embed, embed, layout.ids)  # (S, H)
    turned = decoder.model.rotary_emb(hidden[None], layout.positions[None])
    cos, sin = turned[0][0], turned[1][0]  # (S, D) each
    blocks = decoder.model.layers
    again = 0
    if torch.is_grad_enabled() and kept_blocks is not None:
        again = max(0, len(blocks) - kept_blocks)
    for number, block in enumerate(blocks):
        groups = groups_of(block, hidden.dtype)
        images = [image_of(group, hidden.dtype) for group in groups]
        run = partial(
            run_block, block, groups, images, rotation=(cos, sin), segments=layout.segments
        )
        if number < again:
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        hidden = policy.within(block, run, hidden)
    chosen: Tensor = final_norm(decoder)(hidden[layout.predicts])  # (tokens, H)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A pass's tokens on one axis.

    `ids` and `positions`, (S,), int64, are of prompts, of completions without their last tokens,
    which predict nothing, and padding. `predicts`, (tokens,), int64, has the place that predicts
    each counting token, row by row.
    """

    ids: Tensor
    positions: Tensor
    predicts: Tensor
    segments: Segments


def lay_out(rows: Rows, device: torch.device) -> Layout:
    """Return rows as one sequence on a device; the host waits for nothing."""
    used, slot = torch.unique(rows.prompt_of_row, return_inverse=True)  # (U,), (B,)
    own = rows.lengths() - 1  # (B,) what is read of each completion
    read = torch.zeros(len(used), dtype=torch.int64).index_add_(0, slot, own)
    # Prompts behind which nothing is read come last; rows of a prompt stand side by side.
    prompt_order = torch.argsort((read == 0).to(torch.int8), stable=True)
    slot = torch.argsort(prompt_order)[slot]
    order = torch.argsort(slot, stable=True)
    prompts = [rows.prompts[index] for index in used[prompt_order].tolist()]
    sizes = torch.tensor([len(prompt) for prompt in prompts])  # (U,)
    inside = _counted(own[order])  # (read completion tokens,)
    row = order.repeat_interleave(own[order])
    ids = torch.cat(
        [torch.tensor([t for prompt in prompts for t in prompt]), rows.token_ids[row, inside]]
    )
    positions = torch.cat([_counted(sizes), sizes[slot][row] + inside])
    begin = torch.empty_like(own)
    begin[order] = sizes.sum() + own[order].cumsum(0) - own[order]
    # The first token of a completion is predicted by its prompt's last, the others one by one.
    predicts = (begin - 1).repeat_interleave(own + 1) + _counted(own + 1)
    predicts[(own + 1).cumsum(0) - own - 1] = (sizes.cumsum(0) - 1)[slot]
    padding = padded(len(ids)) - len(ids)
    return Layout(
        ids=sent(functional.pad(ids, (0, padding)), device),
        positions=sent(functional.pad(positions, (0, padding)), device),
        predicts=sent(predicts, device),
        segments=segments(sizes, own[order], slot[order], device, padding),
    )


def _counted(lengths: Tensor) -> Tensor:
    """Return 0 to n - 1 for each length n, one after another."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(len(starts)) - starts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Projections that share an input.

    Attributes
    ----------
    modules
        The policy's own.
    projections
        What they multiply by; None where the modules are called themselves.
    masters
        A of each, then B of each; none without adapters.
    """

    modules: tuple[nn.Module, ...]
    projections: Projections | None
    masters: tuple[Tensor, ...] = ()

    def read(
        self, x: Tensor, image: Image, before: PerturbableRMSNorm | Literal["swiglu"] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the projections of x, after its norm or gate, and x for the residual stream."""
        if self.projections is None:
            entered = x
            if before is not None:
                entered = dispatch.swiglu(x) if before == "swiglu" else before(x)
            return torch.cat([module(entered) for module in self.modules], dim=-1), x
        if not isinstance(before, PerturbableRMSNorm):
            return dispatch.projected(x, self.projections, *image, None, before)
        norm = Norm(eps=before.variance_epsilon, noise=before.noise)
        return dispatch.projected(x, self.projections, *image, before.weight, norm)


def group_of(modules: Sequence[nn.Module], dtype: torch.dtype) -> Group:
    """Return modules that share an input as a group that multiplies in `dtype`.

    The modules themselves multiply where an adapter is merged, only some have one, or a base is
    trained, of another type or another library's.
    """
    bases = [base_linear(module) for module in modules]
    factors = [m.factors() if isinstance(m, AdapterLinear) else None for m in modules]
    present = [pair for pair in factors if pair is not None]
    weights = _weights(bases, dtype)
    alike = len({(len(A), scaling) for A, _, scaling in present}) <= 1
    alike &= not any(getattr(module, "merged", False) for module in modules)
    if weights is None or len(present) not in (0, len(modules)) or not alike:
        return Group(modules=tuple(modules), projections=None)
    bias = fused_bias([base.bias for base in bases])
    scaling = present[0][2] if present else 1.0
    return Group(
        modules=tuple(modules),
        projections=Projections(
            weights=weights, bias=bias, scaling=scaling, dequantize=dispatch.dequantize
        ),
        masters=(*(A for A, _, _ in present), *(B for _, B, _ in present)),
    )


def _weights(bases: Sequence[nn.Linear | QuantizedLinear], dtype: torch.dtype) -> Any:
    """Return the weights of bases, fused where they lie so; None where modules must multiply."""
    parameters = [p for base in bases for p in base.parameters()]
    if any(p.requires_grad or p.dtype != dtype for p in parameters):
        return None
    if all(isinstance(base, QuantizedLinear) for base in bases):
        layers = cast(Sequence[QuantizedLinear], bases)
        if any(layer.product is not None for layer in layers):
            return None
        fused = fused_weight(layers)
        return tuple(layer.weight for layer in layers) if fused is None else (fused,)
    if any(isinstance(base, QuantizedLinear) for base in bases):
        return None
    return side_by_side([cast(nn.Linear, base).weight.detach() for base in bases])


def groups_of(block: Any, dtype: torch.dtype) -> list[Group]:
    """Return a block's four groups, in the order of `LINEARS`."""
    return [
        group_of(
            [
                getattr(block.mlp if hasattr(block.mlp, leaf) else block.self_attn, leaf)
                for leaf in leaves
            ],
            dtype,
        )
        for leaves in LINEARS.values()
    ]


def image_of(group: Group, dtype: torch.dtype) -> Image:
    """Return a group's adapters in `dtype`, with gradients."""
    count = len(group.masters) // 2
    if not count:
        return None, None
    As, Bs = group.masters[:count], group.masters[count:]
    if count == 1:
        return As[0].to(dtype), Bs[0].to(dtype)
    return torch.cat(As).to(dtype), torch.block_diag(*Bs).to(dtype)


def run_block(
    block: Any,
    groups: Sequence[Group],
    images: Sequence[Image],
    hidden: Tensor,
    rotation: tuple[Tensor, Tensor],
    segments: Segments,
) -> Tensor:
    """Return the block's output, (M, H), attention staying inside each row."""
    attention = block.self_attn
    qkv, o, gate_up, down = zip(groups, images, strict=True)
    heads = attention.config.num_attention_heads
    read, hidden = qkv[0].read(hidden, qkv[1], block.input_layernorm)
    if hasattr(attention, "q_norm"):
        read = _norm_heads(attention, read, heads)
    attended = dispatch.packed_attention(
        read, *rotation, segments, query_heads=heads, scale=attention.scaling
    )
    hidden = hidden + o[0].read(attended, o[1])[0]
    read, hidden = gate_up[0].read(hidden, gate_up[1], block.post_attention_layernorm)
    return hidden + down[0].read(read, down[1], "swiglu")[0]


def _norm_heads(attention: Any, qkv: Tensor, query_heads: int) -> Tensor:
    """Return q, k, v, (M, N), with each head of q and k normed (Qwen3)."""
    heads = qkv.view(len(qkv), -1, attention.head_dim)
    keys = (heads.shape[1] - query_heads) // 2
    q, k, v = heads.split([query_heads, keys, keys], dim=1)
    return torch.cat([attention.q_norm(q), attention.k_norm(k), v], dim=1).flatten(1)
