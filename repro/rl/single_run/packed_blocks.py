r"""A decoder's blocks over a packed pass: what they multiply by, and their adapters in 16 bits.

Projections that share an input are one product (q, k, v; gate, up) where their weights lie side by
side, as they do for 4-bit bases from loading on and for 16-bit ones once an engine is built. What
cannot be multiplied so (trained base weights, another library's product) goes through the policy's
own modules.

The adapters' float32 masters are turned into images of the activations' type once a pass, block by
block as the pass goes: the device has work while the host prepares the next block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from kernels import dispatch
from kernels.reference_train import Norm, Projections
from kernels.segments import Segments
from repro.models.decoder import LINEARS
from repro.models.fused_weights import fused_bias, fused_weight, side_by_side
from repro.models.lora import AdapterLinear, base_linear
from repro.models.norms import PerturbableRMSNorm
from repro.models.quantized_linear import QuantizedLinear

# A of a group's projections, one below another, and B as blocks of a diagonal, or None for both.
Image = tuple[Tensor | None, Tensor | None]


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
        group_of([getattr(block.mlp if hasattr(block.mlp, leaf) else block.self_attn, leaf)
                  for leaf in leaves], dtype)
        for leaves in LINEARS.values()
    ]  # fmt: skip


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
