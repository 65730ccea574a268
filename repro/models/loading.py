"""A transformers decoder filled from files, tensor by tensor, its projections quantised on the way.

The model is built on PyTorch's meta device (shapes, no memory), then each parameter is read,
checked, rounded to bfloat16 and put in place; a projection is quantised as soon as it is read, so
the dense model never exists. Peak memory is the quantised model plus the work on one matrix.

Easy mistakes
-------------
* The 16-bit model is what gets quantised, also when the file holds float32 or float16: both this
  loader and `write_quantized` round to bfloat16 first, and both take `default_recipe`, so both give
  the same codes.
* On the meta device the rotary embedding's frequencies are meta too, and no file holds them: the
  module is built again off it.
* q, k and v share a global scale, so their largest magnitudes are needed before the first of them
  is quantised: each is read twice rather than all kept.
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from kernels import dispatch
from kernels.formats import FORMATS, QuantizedWeight
from repro.models.decoder import (
    SIZES,
    fused_members,
    is_projection,
    require_plain,
    require_supported,
)
from repro.models.files import stored_layouts
from repro.models.files.tensor_files import (
    CheckpointError,
    TensorFile,
    TensorFolder,
    TensorSpec,
    read_object,
)
from repro.models.quantized_linear import QuantizedLinear, relative_error

# Beside the weights of a policy pre-trained here: recipe, seed, loss and quality.
SUMMARY_FILE = "pretraining.json"
_CONFIG_FAULTS = (StrictDataclassError, AttributeError, ArithmeticError, LookupError, TypeError)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DESCRIBING = (".json", ".jinja", ".txt", ".model")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Buffers that old checkpoints stored and the model computes.
_COMPUTED = re.compile(r"(?:^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A checkpoint's config, without its `quantization_config`, apart from how weights are stored.

    `stored_format` is `nvfp4`, `mxfp4` or `nf4` where the file holds codes; None where it holds 16
    or 32 bits. `end_token_ids` are of `generation_config.json`, None where it is missing or has
    none.
    """

    config: PretrainedConfig
    stored_format: str | None
    end_token_ids: list[int] | None


def read_description(folder: Path) -> ModelDescription:
    """Return the config of a checkpoint folder.

    Raises
    ------
    CheckpointError
        When `config.json` is missing or broken, its quantisation is not one read here, an adapter
        lies beside it, `generation_config.json` is broken, or one of such files is no file.
    ValueError
        When the architecture is not one that this project builds, or attends otherwise than
        causally over all positions.
    """
    for path in sorted(p for p in folder.glob("*") if p.suffix in _DESCRIBING and not p.is_file()):
        what = "no plain file" if path.exists() else "a link to nothing"
        raise CheckpointError(f"{path} is {what}; the file is needed")
    path = folder / "config.json"
    adapter = (folder / "adapter_config.json").is_file()
    if not path.is_file():
        kind = "an adapter's (adapter_config.json)" if adapter else "not a checkpoint folder"
        raise CheckpointError(f"{folder} holds no config.json; it is {kind}")
    if adapter:
        raise CheckpointError(
            f"{folder} holds adapter_config.json beside a model, and which of the two is meant "
            "cannot be known; move the adapter into a folder of its own and name it (--adapter)"
        )
    raw = read_object(path)
    if "model_type" not in raw:
        raise CheckpointError(f"{path} is not a model's config: it names no model_type")
    require_supported(raw, path)
    quantization = raw.pop("quantization_config", None)
    config = _config(raw, path)
    require_plain(config, path)
    stored: str | None = None
    if quantization is not None:
        try:
            stored = stored_layouts.stored_format(quantization, path)
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: field quantization_config is {reprlib.repr(quantization)}; it has not "
                f"the form of one ({error})"
            ) from error
    ends = stored_ends(folder / "generation_config.json")
    return ModelDescription(config=config, stored_format=stored, end_token_ids=ends)


def _config(raw: dict[str, Any], path: Path) -> PretrainedConfig:
    """Return transformers' config of the values of `config.json`, validated by it."""
    most = SIZES["num_hidden_layers"]
    for name in ("num_hidden_layers", "num_labels"):  # transformers makes a list of so many
        if isinstance(count := raw.get(name), int) and count > most:
            raise CheckpointError(
                f"{path}: field {name} is {count}; needed is 1 or more, up to {most}"
            )
    # Here, as transformers warns of it and goes on.
    stated, size = raw.get("eos_token_id"), raw.get("vocab_size")
    for end in stated if isinstance(stated, list) else [stated]:
        if isinstance(size, int) and isinstance(end, int) and not 0 <= end < size:
            raise CheckpointError(
                f"{path}: field eos_token_id is {stated}; needed is from 0 to below vocab_size, "
                f"{size}"
            )
    try:
        return AutoConfig.for_model(**raw)
    except _CONFIG_FAULTS as error:
        named = next((name for name in raw if _builds(raw, name)), None)
        field = f"field {named} is {reprlib.repr(raw[named])}; " if named else ""
        fault = re.sub(r"^\s*(TypeError|ValueError): ", "", str(error).split("\n")[-1])
        raise CheckpointError(f"{path}: {field}{fault}") from error


def _builds(raw: Mapping[str, Any], name: str) -> bool:
    """Say whether a config that does not build is one without this field."""
    try:
        AutoConfig.for_model(**{key: value for key, value in raw.items() if key != name})
    except (ValueError, *_CONFIG_FAULTS):
        return False
    return name != "model_type"


def stored_ends(path: Path) -> list[int] | None:
    """Return the end tokens of a `generation_config.json`; None where it is missing or has none."""
    stored = read_object(path).get("eos_token_id") if path.is_file() else None
    if stored is None:
        return None
    ends = stored if isinstance(stored, list) else [stored]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise CheckpointError(f"{path}: eos_token_id is {stored!r}; needed are token ids")
    return ends


def open_weights(folder: Path, config: PretrainedConfig) -> TensorFolder:
    """Return a folder's tensors; a tied matrix may be stored under the head's name alone."""
    source = TensorFolder(folder)
    if config.tie_word_embeddings:
        source.share(_EMBEDDING, _HEAD)
    return source


def build_on_meta(config: PretrainedConfig) -> nn.Module:
    """Return the decoder of `config` without memory for its weights, in evaluation mode."""
    # Initialising on the meta device draws nothing, yet moves the global generator on.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()


def default_recipe(folder: Path, weight_format: str) -> str:
    """Return the arithmetic of scales in which a folder's weights are quantised by default.

    For NVFP4 that is `bfloat16`, whose result equals llm-compressor's NVFP4A16 of the model in
    bfloat16; but `float32` for a policy that was trained here, because its records were made so.
    """
    trained_here = (folder / SUMMARY_FILE).is_file()
    return "bfloat16" if weight_format == "nvfp4" and not trained_here else "float32"


@torch.no_grad()
def fill(
    model: nn.Module,
    source: TensorFile,
    *,
    weight_format: str,
    stored_format: str | None,
    dtype: torch.dtype,
    device: torch.device,
    recipe: str = "float32",
) -> dict[str, float]:
    """Give every parameter of a meta `model` its values from `source`; return rounding's errors.

    They are ||W - dequantize(Q(W))|| / ||W|| by projection; none of stored codes, whose W is gone.

    Parameters
    ----------
    weight_format
        Of the projections: `bf16` keeps `nn.Linear`, the others put a `QuantizedLinear` there.
    stored_format
        Of `source`'s projections, as `read_description` says.
    dtype
        Of every 16-bit part; its values are bfloat16's whatever the dtype.
    recipe
        The arithmetic of scales where projections are quantised (`kernels.reference_quantize`).

    Raises
    ------
    CheckpointError
        Naming file and tensor: missing, superfluous, or not as the model needs it.
    ValueError
        When stored codes are asked for in another format.
    """
    if stored_format not in (None, weight_format):
        raise ValueError(
            f"the checkpoint stores {stored_format} codes; {weight_format} would quantise what is "
            f"quantised already: take {stored_format}, or the 16-bit checkpoint"
        )
    require_same_names(model, source, stored_format)
    scales = SharedScales(source, recipe)
    errors: dict[str, float] = {}

    def codes_of(projection: str, shape: tuple[int, int]) -> QuantizedWeight:
        if stored_format is not None:
            return stored_layouts.read_packed(source, projection, shape, stored_format).to(device)
        dense = read_rounded(source, f"{projection}.weight", shape).to(device)
        codes = quantize_projection(dense, projection, weight_format, scales)
        errors[projection] = relative_error(dense, codes)
        return codes

    def value_of(name: str, shape: tuple[int, ...]) -> Tensor | None:
        is_other = name == _HEAD and _tied(model)
        return None if is_other else read_rounded(source, name, shape).to(device, dtype)

    put_parameters(model, value_of, codes_of if weight_format != "bf16" else None)
    return errors


def put_parameters(
    model: nn.Module,
    value_of: Callable[[str, tuple[int, ...]], Tensor | None],
    codes_of: Callable[[str, tuple[int, int]], QuantizedWeight] | None = None,
) -> None:
    """Give a meta `model` its frozen parameters, by name and shape, and tie its head if it is tied.

    A tied head needs no value. With `codes_of`, which is given a projection's name and (N, K), each
    projection becomes a `QuantizedLinear`.
    """
    decoder: Any = model
    for name, module in list(model.named_modules()):
        codes = None
        if codes_of is not None and is_projection(name):
            codes = codes_of(name, (module.out_features, module.in_features))
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if codes is not None and leaf == "weight":
                continue
            value = value_of(f"{name}.{leaf}", tuple(parameter.shape))
            if value is not None:
                module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
        if codes is not None:
            model.set_submodule(name, QuantizedLinear(codes, module.bias))
    if _tied(model):
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    decoder.model.rotary_emb.to(decoder.model.embed_tokens.weight.device)


def linears_of(decoder: nn.Module) -> dict[str, int]:
    """Return how many projections, adapted or not, there are now of each format."""
    counts = Counter[str]()
    for name, module in decoder.named_modules():
        if is_projection(name):
            base = getattr(module, "base_layer", module)  # of an adapted one
            counts[base.weight_format if isinstance(base, QuantizedLinear) else "bf16"] += 1
    return dict(counts)


class SharedScales:
    """NVFP4's global scale of a projection: one for q, k, v and one for gate, up, in a recipe."""

    def __init__(self, source: TensorFile, recipe: str) -> None:
        self.source, self.recipe = source, recipe
        self._of: dict[str, Tensor] = {}

    def of(self, projection: str) -> Tensor:
        """Return the shared global scale, (), float64, decode direction."""
        if projection not in self._of:
            members = fused_members(projection)
            scales = []
            for member in members:
                weight = read_rounded(self.source, f"{member}.weight")
                with _naming(self.source.where(f"{member}.weight")):
                    scales.append(dispatch.shared_global_scale([weight], self.recipe))
            self._of |= dict.fromkeys(members, torch.stack(scales).max())
        return self._of[projection]


def quantize_projection(
    dense: Tensor, projection: str, weight_format: str, scales: SharedScales
) -> QuantizedWeight:
    """Quantise an (N, K) weight with the scale that its engine-mates share; K in whole blocks."""
    scale = scales.of(projection) if FORMATS[weight_format].has_global_scale else None
    with _naming(scales.source.where(f"{projection}.weight")):
        return dispatch.quantize(dense, weight_format, global_scale=scale, recipe=scales.recipe)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put `where` in front of the message of a `ValueError`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def read_rounded(source: TensorFile, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a finite 16- or 32-bit tensor rounded to bfloat16, on the CPU; others raise."""
    spec = source.spec(name)
    if spec.dtype not in _FLOATS:
        raise CheckpointError(
            f"{source.where(name)} has dtype {spec.dtype}; needed is bfloat16, float16 or float32"
        )
    if shape is not None:
        _require_shape(source, name, shape)
    rounded = source.read(name).to(torch.bfloat16)
    # The extremes carry any NaN along, and unlike isfinite need no temporary of the same size.
    if rounded.numel() and not all(bool(torch.isfinite(v)) for v in torch.aminmax(rounded)):
        raise CheckpointError(f"{source.where(name)} holds NaN or infinity")
    return rounded


def expected_specs(model: nn.Module, stored_format: str | None) -> dict[str, TensorSpec]:
    """Return the tensors that a checkpoint of a meta `model` must hold, by name (bfloat16)."""
    specs: dict[str, TensorSpec] = {}
    for name, parameter in model.named_parameters():
        projection, _, leaf = name.rpartition(".")
        if leaf == "weight" and is_projection(projection) and stored_format is not None:
            N, K = parameter.shape
            specs |= stored_layouts.packed_specs(projection, (N, K), stored_format)
        else:
            specs[name] = TensorSpec(dtype=torch.bfloat16, shape=tuple(parameter.shape))
    if _tied(model):
        specs.pop(_HEAD, None)
    return specs


@functools.lru_cache(maxsize=8)
def require_weights(folder: Path) -> None:
    """Raise `CheckpointError` unless a folder's tensors, by their headers, are its config's."""
    description = read_description(folder)
    model = build_on_meta(description.config)
    source = open_weights(folder, description.config)
    require_same_names(model, source, description.stored_format)
    for name, needed in expected_specs(model, description.stored_format).items():
        if description.stored_format is None:
            _require_shape(source, name, needed.shape)


def _require_shape(source: TensorFile, name: str, shape: tuple[int, ...]) -> None:
    found = source.spec(name).shape
    if found != shape:
        raise CheckpointError(f"{source.where(name)} has shape {found}; the model needs {shape}")


def require_same_names(model: nn.Module, source: TensorFile, stored_format: str | None) -> None:
    """Raise `CheckpointError` unless `source` holds exactly the tensors that the model needs."""
    present = {name for name in source.names() if not _COMPUTED.search(name)}
    expected: Mapping[str, Any] = expected_specs(model, stored_format)
    missing = sorted(expected.keys() - present)
    if missing:
        tie = "; config.json ties it to no other (tie_word_embeddings is false)"
        untied = not _tied(model) and missing[0] in (_EMBEDDING, _HEAD)
        raise CheckpointError(
            f"{source.where(missing[0])} is missing{_and_more(missing)}{tie * untied}"
        )
    # A tied lm_head may be stored a second time, with the same values.
    tied = {_HEAD} & present if _tied(model) else set()
    extra = sorted(present - expected.keys() - tied)
    if extra:
        raise CheckpointError(
            f"{source.where(extra[0])} has no place in the model of config.json{_and_more(extra)}"
        )
    if tied and not torch.equal(read_rounded(source, _HEAD), read_rounded(source, _EMBEDDING)):
        raise CheckpointError(
            f"{source.where(_HEAD)} differs from {_EMBEDDING}, and config.json ties the two "
            "(tie_word_embeddings is true): one of them is wrong"
        )


def _tied(model: nn.Module) -> bool:
    return bool(cast(Any, model).config.tie_word_embeddings)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
