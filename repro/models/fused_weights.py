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

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernels import dispatch
from kernels.formats import QuantizedWeight
from kernels.packing import PACK_ROWS, PackedWeight, pack
from repro.models.decoder import causal_lm, fused_members, is_projection
from repro.models.quantized_linear import QuantizedLinear

_BY_ROWS = ("codes", "block_scales")


@torch.no_grad()
def fuse_projections(model: nn.Module, dtype: torch.dtype) -> int:
    """Make the 4-bit projections of a decoder views of one matrix per input, on a GPU.

    Works with and without an adapter; `dtype` is that of the activations. Returns the number of
    projections that now are: all of them on a device whose kernels serve and whose group's scales
    agree, else 0.
    """
    decoder = causal_lm(model)
    layers = {
        name.replace(".base_layer", ""): module
        for name, module in decoder.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    groups = dict.fromkeys(fused_members(name) for name in layers if is_projection(name))
    count = 0
    for members in groups:
        group = [layers[name] for name in members]
        packs = dispatch.reads_packed(group[0].device, dtype)
        if (packs or dispatch.fuses_codes(group[0].device, dtype)) and _can_fuse(group):
            fused = fuse([layer.codes() for layer in group])
            share(group, pack(fused) if packs else fused)
            count += len(group)
    return count


def _can_fuse(group: Sequence[QuantizedLinear]) -> bool:
    """Return whether the rows are whole tiles with the same global scale, if the format has one."""
    scales = [getattr(layer.weight, "encode_scale", None) for layer in group]
    return _same_scale(scales) and all(layer.out_features % PACK_ROWS == 0 for layer in group)


def _same_scale(scales: Sequence[Tensor | None]) -> bool:
    first = scales[0]
    return all(
        scale is first or (scale is not None and first is not None and bool(scale == first))
        for scale in scales
    )


def fuse(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight (N1 + N2 + ..., K) of the rows of all `weights` (Ni, K)."""
    first = weights[0]
    tensors = dict(first.tensors())
    for name in _BY_ROWS:
        tensors[name] = torch.cat([getattr(weight, name) for weight in weights])
    return QuantizedWeight(format=first.format, **tensors)


def share(layers: Sequence[QuantizedLinear], fused: PackedWeight | QuantizedWeight) -> None:
    """Give each layer its rows of the fused weight, as views."""
    if isinstance(fused, QuantizedWeight):
        _share_codes(layers, fused)
    else:
        _share_packs(layers, fused)


def _share_codes(layers: Sequence[QuantizedLinear], fused: QuantizedWeight) -> None:
    at, tensors = 0, fused.tensors()
    for layer in layers:
        rows = slice(at, at + layer.out_features)
        own = tensors | {name: tensors[name][rows] for name in _BY_ROWS}
        layer.take(QuantizedWeight(format=fused.format, **own))
        at += layer.out_features


def _share_packs(layers: Sequence[QuantizedLinear], fused: PackedWeight) -> None:
    at = 0
    K = fused.shape[1]
    blocks_per_row = K // 32 if fused.format == "mxfp4" else K // 16
    for layer in layers:
        rows = layer.out_features
        extras = dict(fused.extras)
        if "lost_blocks" in extras:
            low, high = at * blocks_per_row, (at + rows) * blocks_per_row
            inside = (extras["lost_blocks"] >= low) & (extras["lost_blocks"] < high)
            extras["lost_blocks"] = extras["lost_blocks"][inside] - low
            extras["lost_codes"] = extras["lost_codes"][inside]
            extras["lost_scales"] = extras["lost_scales"][inside]
        layer.take(
            PackedWeight(
                format=fused.format,
                shape=(rows, K),
                packs=fused.packs[at // PACK_ROWS : (at + rows) // PACK_ROWS],
                gain=fused.gain,
                extras=extras,
            )
        )
        at += rows


def fused_weight(layers: Sequence[QuantizedLinear]) -> PackedWeight | QuantizedWeight | None:
    """Return the fused matrix that the layers have views of; None if they have none."""
    weights = [cast(Any, layer).weight for layer in layers]
    if all(isinstance(weight, QuantizedWeight) for weight in weights):
        return _fused_codes(weights)
    if not all(isinstance(weight, PackedWeight) for weight in weights):
        return None
    first: PackedWeight = weights[0]
    end = first.packs.data_ptr()
    for weight in weights:
        if weight.packs.data_ptr() != end or weight.gain.data_ptr() != first.gain.data_ptr():
            return None
        end += weight.packs.nbytes
    tiles, K = sum(len(weight.packs) for weight in weights), first.shape[1]
    packs = first.packs.as_strided((tiles, *first.packs.shape[1:]), first.packs.stride())
    extras = {name: value for name, value in first.extras.items() if not name.startswith("lost_")}
    rows = sum(weight.shape[0] for weight in weights)
    return PackedWeight(
        format=first.format, shape=(rows, K), packs=packs, gain=first.gain, extras=extras
    )


def _fused_codes(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    tensors = dict(weights[0].tensors())
    if not _same_scale([weight.encode_scale for weight in weights]):
        return None
    for name in _BY_ROWS:
        parts = side_by_side([getattr(weight, name) for weight in weights])
        if len(parts) > 1:
            return None
        tensors[name] = parts[0]
    return QuantizedWeight(format=weights[0].format, **tensors)


def side_by_side(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return dense weights (Ni, K) as one matrix if they are adjacent in memory, else unchanged."""
    first = weights[0]
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for weight in weights:
        shared = weight.untyped_storage().data_ptr() == storage
        if not shared or weight.data_ptr() != at or weight.stride() != first.stride():
            return tuple(weights)
        at += len(weight) * weight.stride(0) * weight.element_size()
    size = (sum(map(len, weights)), first.shape[1])
    return (first.as_strided(size, first.stride()),)


def fused_bias(biases: Sequence[nn.Parameter | None], below: int = 0) -> Tensor | None:
    """Return the biases concatenated, followed by `below` zeros; None if there are none."""
    if all(bias is None for bias in biases):
        return None
    present = [bias for bias in biases if bias is not None]
    if len(present) != len(biases):
        raise ValueError("some of the fused projections have a bias and some have none")
    zeros = present[0].new_zeros(below)
    return torch.cat([*(bias.detach() for bias in present), zeros])
