"""Calibration for 4-bit rounding: each input channel scaled by how much it carries.

Rounding a weight costs (dW x); a channel of x that is large makes its column's error count more.
So a column is scaled up before rounding, and the channel down by the same factor, which leaves the
function as it was but for the rounding (AWQ, arXiv 2306.00978, section 3.2):

    y = W x = (W diag(s)) (diag(s)^-1 x),     s = mean|x|^alpha,     alpha in {0, 1/20, ..., 19/20}

mean|x| is taken over calibration tokens; s is divided by sqrt(max s min s) ("s / sqrt(max min)" is
the authors' code's normalisation, not in the paper's formula). alpha is searched for every group of
projections with one input, minimising || Q(W s) (x / s) - W x ||^2 summed over the group and the
tokens. 1/s is folded into what makes x:

=====================  ======================================
projections            1/s goes into
=====================  ======================================
q, k, v                the gain of `input_layernorm`
gate, up               the gain of `post_attention_layernorm`
down                   the rows of `up`
=====================  ======================================

`o` is left as it is: with fewer key heads than query heads several of its channels come from one
row of `v`, and the authors' code skips it, too. Their weight clipping is not done here.

What comes out is a 16-bit checkpoint of the same function, up to bfloat16's rounding of the scaled
tensors; `write_quantized` then rounds it to nearest as any other.

Easy mistakes
-------------
* Searching with a global scale that the loader will not use: q, k, v share one, as do gate and up.
* Added noise and trained gains act on the scaled norms: sigma is relative to another gain there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels import dispatch
from repro.models.checkpoint import (
    MANIFEST,
    MANIFEST_SCHEMA,
    copy_companions,
    digest_of_files,
    resolve,
    sha256_of,
    verify,
    write_json,
)
from repro.models.loading import build_on_meta, expected_specs, fill, read_description
from repro.models.tensor_files import CheckpointError, TensorFolder, write_tensors

ALPHAS = tuple(step / 20 for step in range(20))
_SMALLEST = 1e-4
_TOKENS_SEARCHED = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What `write_calibrated` did.

    Attributes
    ----------
    alphas
        The exponent chosen for each group, named by its first projection.
    error_ratios
        The group's squared output error with that exponent over that of plain rounding.
    """

    folder: Path
    alphas: dict[str, float]
    error_ratios: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Projections with one input, and the parameter that takes 1/s in its first dimension."""

    name: str
    linears: tuple[nn.Linear, ...]
    source: nn.Parameter


@torch.no_grad()
def write_calibrated(
    source_folder: str | Path,
    out_folder: str | Path,
    token_ids: Tensor,
    *,
    weight_format: str = "nvfp4",
    device: str | torch.device = "cpu",
) -> Calibrated:
    """Write a 16-bit checkpoint of the same function, scaled for rounding to a 4-bit format.

    Parameters
    ----------
    source_folder, out_folder
        The second must not exist; it appears when complete.
    token_ids
        (B, T), int64: calibration text, no padding.
    weight_format
        The format that the exponents are searched for.

    Raises
    ------
    CheckpointError
        When the source is quantised already.
    FileExistsError
        When `out_folder` exists.
    """
    source, out = resolve(source_folder), Path(out_folder)
    if out.exists():
        raise FileExistsError(f"{out} exists; a checkpoint is never written over another")
    verify(source)
    description = read_description(source)
    if description.stored_format is not None:
        raise CheckpointError(f"{source} is quantised already, to {description.stored_format}")
    model = build_on_meta(description.config)
    fill(
        model,
        TensorFolder(source),
        weight_format="bf16",
        stored_format=None,
        dtype=torch.float32,
        device=torch.device(device),
    )
    groups = _groups(model)
    inputs = _inputs_of(model, groups, token_ids.to(device))
    alphas, ratios = {}, {}
    for group in groups:
        alphas[group.name], ratios[group.name] = _scale(group, inputs[group.name], weight_format)
    temporary = out.with_name(f".{out.name}.partial-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        _write(model, source, temporary, weight_format, alphas)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Calibrated(folder=out, alphas=alphas, error_ratios=ratios)


def _groups(model: Any) -> list[_Group]:
    groups = []
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        parts = (
            (
                "self_attn.q_proj",
                (attention.q_proj, attention.k_proj, attention.v_proj),
                layer.input_layernorm.weight,
            ),
            ("mlp.gate_proj", (mlp.gate_proj, mlp.up_proj), layer.post_attention_layernorm.weight),
            ("mlp.down_proj", (mlp.down_proj,), mlp.up_proj.weight),
        )
        groups += [
            _Group(name=f"model.layers.{index}.{name}", linears=linears, source=source)
            for name, linears, source in parts
        ]
    return groups


def _inputs_of(model: nn.Module, groups: Sequence[_Group], token_ids: Tensor) -> dict[str, Tensor]:
    """Return each group's input over all tokens, (B * T, K), float32."""
    found: dict[str, Tensor] = {}

    def keeper(name: str) -> Any:
        def keep(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            del module
            found[name] = arguments[0].flatten(0, 1)

        return keep

    hooks = [group.linears[0].register_forward_pre_hook(keeper(group.name)) for group in groups]
    try:
        model(input_ids=token_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _scale(group: _Group, x: Tensor, weight_format: str) -> tuple[float, float]:
    """Scale a group by its best exponent; return it, and the error over that of plain rounding."""
    magnitude = x.abs().mean(0)
    searched = x[:: max(1, len(x) // _TOKENS_SEARCHED)]
    scales = [_channel_scales(magnitude, alpha) for alpha in ALPHAS]
    errors = [_error(group, searched, scale, weight_format) for scale in scales]
    best = min(range(len(ALPHAS)), key=errors.__getitem__)
    scale = scales[best]
    for linear in group.linears:
        linear.weight.mul_(scale)
    group.source.div_(scale if group.source.ndim == 1 else scale[:, None])
    return ALPHAS[best], errors[best] / errors[0] if errors[0] else 1.0


def _channel_scales(magnitude: Tensor, alpha: float) -> Tensor:
    scale = magnitude.pow(alpha).clamp_min(_SMALLEST)
    return scale / (scale.max() * scale.min()).sqrt()


def _error(group: _Group, x: Tensor, scale: Tensor, weight_format: str) -> float:
    """Return || Q(W s) (x / s) - W x ||^2 over the group and the tokens."""
    scaled = [(linear.weight * scale).to(torch.bfloat16) for linear in group.linears]
    shared = None
    if weight_format == "nvfp4":
        shared = torch.stack([dispatch.shared_global_scale([w]) for w in scaled]).max()
    error = 0.0
    for linear, weight in zip(group.linears, scaled, strict=True):
        codes = dispatch.quantize(weight, weight_format, global_scale=shared)
        rounded = dispatch.dequantize(codes, torch.float32) / scale
        error += float((x @ (rounded - linear.weight).T).double().square().sum())
    return error


def _write(
    model: nn.Module, source: Path, folder: Path, weight_format: str, alphas: dict[str, float]
) -> None:
    copy_companions(source, folder)
    shutil.copyfile(source / "config.json", folder / "config.json")
    parameters = dict(model.named_parameters())
    digest = write_tensors(
        folder / "model.safetensors",
        expected_specs(model, None),
        lambda name: parameters[name].detach().to("cpu", torch.bfloat16),
    )
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "algorithm": "awq scales",
        "format": "bf16",
        "scaled_for": weight_format,
        "alphas": alphas,
        "source_sha256": digest_of_files([source / "config.json", *TensorFolder(source).files()]),
        "sha256": {
            "config.json": sha256_of(folder / "config.json"),
            "model.safetensors": digest,
        },
    }
    write_json(folder / MANIFEST, manifest)
