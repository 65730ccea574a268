"""4-bit projections in the layout that the kernels read, fused by input at loading.

    q, k, v   ->  one matrix of (Nq + Nk + Nv) rows       gate, up  ->  one matrix

On a GPU loading ends with `fuse_projections`: projections with the same input become one matrix,
and each module has a view of its own rows. Where the device's kernels read packed weights
(`kernels.dispatch.reads_packed`), the matrix is packed, and the rows are whole tiles, so that a
range of tiles is a valid weight; elsewhere it has the checkpoint's layout. Trainer and engine
multiply with the same tensors; the engine gets the fused matrix from `fused_weight`.

Easy to get wrong: NVFP4's parts must share their global scale, because the fused product has a
single factor; MXFP4's stored exponents are relative to the largest of the fused matrix, not of
each part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels import dispatch
from kernels.formats import FORMATS, QuantizedWeight
from kernels.packing import PACK_ROWS, PackedWeight, pack
from repro.models.decoder import causal_lm, fused_members, is_projection
from repro.models.quantized_linear import QuantizedLinear

_BY_ROWS = ("codes", "block_scales")
# What a packed weight holds of single blocks (`kernels.packing`).
_LOST = ("lost_blocks", "lost_codes", "lost_scales")


@torch.no_grad()
def fuse_projections(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the 4-bit projections of a decoder views of one matrix per input, on a GPU.

    Works with and without an adapter; `dtype` is that of the activations. Nothing is changed on a
    device without kernels for that, or where a group's scales differ.
    """
    decoder = causal_lm(model)
    layers = {
        name.replace(".base_layer", ""): module
        for name, module in decoder.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    groups = dict.fromkeys(fused_members(name) for name in layers if is_projection(name))
    for members in groups:
        group = [layers[name] for name in members]
        packs = dispatch.reads_packed(group[0].device, dtype)
        if (packs or dispatch.fuses_codes(group[0].device, dtype)) and _can_fuse(group):
            fused = fuse([layer.codes() for layer in group])
            share(group, pack(fused) if packs else fused)


def _can_fuse(group: Sequence[QuantizedLinear]) -> bool:
    """Return whether the rows are whole tiles with the same global scale, if the format has one."""
    if any(layer.out_features % PACK_ROWS for layer in group):
        return False
    scales = [getattr(layer.weight, "encode_scale", None) for layer in group]
    return len({None if scale is None else float(scale) for scale in scales}) == 1


def fuse(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight (N1 + N2 + ..., K) of the rows of all `weights` (Ni, K)."""
    first = weights[0]
    tensors = dict(first.tensors())
    for name in _BY_ROWS:
        tensors[name] = torch.cat([getattr(weight, name) for weight in weights])
    return QuantizedWeight(format=first.format, **tensors)


def share(layers: Sequence[QuantizedLinear], fused: PackedWeight | QuantizedWeight) -> None:
    """Give each layer its rows of the fused weight, as views."""
    whole, at = fused, 0
    if isinstance(fused, PackedWeight):
        kept = {name: value for name, value in fused.extras.items() if name not in _LOST}
        whole = dataclasses.replace(fused, extras=kept)
    for layer in layers:
        end = at + layer.out_features
        layer.weight, layer.fused = _rows(fused, at, end), whole
        at = end


def _rows(
    fused: PackedWeight | QuantizedWeight, begin: int, end: int
) -> PackedWeight | QuantizedWeight:
    """Return a range of rows, of a packed weight whole tiles, as views."""
    if isinstance(fused, QuantizedWeight):
        tensors = fused.tensors()
        own = tensors | {name: tensors[name][begin:end] for name in _BY_ROWS}
        return QuantizedWeight(format=fused.format, **own)
    K = fused.shape[1]
    extras = dict(fused.extras)
    if "lost_blocks" in extras:
        low, high = (row * (K // FORMATS[fused.format].block) for row in (begin, end))
        inside = (extras["lost_blocks"] >= low) & (extras["lost_blocks"] < high)
        extras |= {name: extras[name][inside] for name in _LOST}
        extras["lost_blocks"] = extras["lost_blocks"] - low
    packs = fused.packs[begin // PACK_ROWS : end // PACK_ROWS]
    return dataclasses.replace(fused, shape=(end - begin, K), packs=packs, extras=extras)


def fused_weight(layers: Sequence[QuantizedLinear]) -> PackedWeight | QuantizedWeight | None:
    """Return the fused matrix whose rows are those of the layers, in its order; None if none is."""
    fused = layers[0].fused
    alone = fused is None or fused.shape[0] != sum(layer.out_features for layer in layers)
    return None if alone or any(layer.fused is not fused for layer in layers) else fused


def side_by_side(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return dense weights (Ni, K) as one matrix if they are adjacent in memory, else unchanged."""
    first = weights[0]
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for weight in weights:
        shared = weight.untyped_storage().data_ptr() == storage
        if not shared or weight.data_ptr() != at or weight.stride() != first.stride():
            return tuple(weights)
        at += len(weight) * weight.stride(0) * weight.element_size()
    return (first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride()),)


def fused_bias(biases: Sequence[nn.Parameter | None], below: int = 0) -> Tensor | None:
    """Return the biases concatenated, followed by `below` zeros; None if there are none."""
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    if len(present) != len(biases):
        raise ValueError("some of the fused projections have a bias and some have none")
    zeros = present[0].new_zeros(below)
    return torch.cat([*(bias.detach() for bias in present), zeros])
