"""The policy: a decoder from a checkpoint, quantised, adapted, with norms that can take noise.

`load_policy` is the one way in. What an arm asks for and what it gets:

==============  ======================================  =======================================
training        base projections                        trainable
==============  ======================================  =======================================
`none`          bf16, nvfp4, mxfp4 or nf4               nothing
`lora`          the same, frozen                        A and B; with `norms_trained` also the
                                                        gains of both block norms
`full`          bf16                                    every parameter
==============  ======================================  =======================================

Everything trainable is a float32 master. Frozen 16-bit parts hold bfloat16's values in the compute
dtype: float32 on a CPU (so no accuracy is lost in arithmetic), bfloat16 on a GPU. Under full
training with 16-bit compute the decoder runs in autocast: matrices are cast at use, the residual
stream and the norms stay float32. `facts["compute"]` says which it was.

Easy mistakes
-------------
* Calling peft's `prepare_model_for_kbit_training` on a 16-bit model casts it to float32 and doubles
  the baseline's memory (docs/background.md, row 13). It is not called here.
* A projection that was not found is not quantised and nobody notices: every count is compared with
  what the config implies, and ends up in the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from repro.models import checkpoint as checkpoints
from repro.models.decoder import PROJECTIONS, causal_lm
from repro.models.files.gguf_files import made_of
from repro.models.files.tensor_files import CheckpointError, TensorFile, read_object
from repro.models.fused_weights import fuse_projections
from repro.models.loading import (
    ModelDescription,
    build_on_meta,
    default_recipe,
    fill,
    linears_of,
    open_weights,
    read_description,
)
from repro.models.lora import adapter_layers, attach_adapter
from repro.models.norms import block_norms, wrap_norms
from repro.models.permuted_source import PermutedSource
from repro.models.planted_rounding import RoundedSource
from repro.models.quantized_linear import QuantizedLinear
from repro.models.sharding import Shards
from repro.spec.arm import PlantedRounding, Training, WeightFormat
from repro.spec.checks import check_value, require, shown, unknown
from repro.spec.facts import Facts
from repro.spec.tier import usable_bytes

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(slots=True)
class Policy:
    """A loaded policy.

    Attributes
    ----------
    model
        A transformers `*ForCausalLM`, inside a `PeftModel` when adapted; in evaluation mode (no
        dropout exists to switch on).
    tokenizer
        None when the folder has none, as shapes with random weights do not.
    checkpoint, folder
        What `load_policy` was asked for, and the local folder that it read; empty and None for a
        policy made otherwise.
    facts
        What was really done: `linears` (count by format), `recipe` (the arithmetic of scales) and
        `relative_weight_error_mean` (both None for bf16 and for stored codes), `norms_wrapped`,
        `adapter_modules`, `norms_trained` (count), `parameters_trainable`, `base_bytes`, `compute`,
        `checkpoint_sha256` (over the sums of the checkpoint's manifest; None without one),
        `checkpoint_files` (the SHA-256 of every file that was read, by name), `end_token_ids`, and
        `gguf`, for a folder made of such a file (`gguf_files.made_of`).
    shards
        This rank's part of what is trained, where ranks divide it; `model` has the same.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    weight_format: WeightFormat
    training: Training
    compute_dtype: torch.dtype
    checkpoint: str = ""
    folder: Path | None = None
    facts: Facts = field(default_factory=Facts)
    shards: Shards | None = None

    @property
    def decoder(self) -> nn.Module:
        """The transformers `*ForCausalLM` without peft's wrapper."""
        return causal_lm(self.model)

    @property
    def device(self) -> torch.device:
        """Where the embeddings are."""
        return self.decoder.get_parameter("model.embed_tokens.weight").device

    def within(self, module: nn.Module, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call a function that multiplies by a part of the decoder, which is whole meanwhile."""
        if self.shards is None:
            return function(*tensors)
        return self.shards.gatherers[module](function, *tensors)


def load_policy(
    checkpoint: str | Path,
    *,
    revision: str = "",
    weight_format: WeightFormat,
    training: Training = "none",
    lora_rank: int = 0,
    lora_alpha: float = 0.0,
    norms_trained: bool = False,
    compute_dtype: str | torch.dtype = "float32",
    seed: int = 0,
    device: str | torch.device = "cpu",
    rslora: bool = False,
    order: int | None = None,
    rounding: PlantedRounding | None = None,
) -> Policy:
    """Load a checkpoint as a policy.

    Parameters
    ----------
    checkpoint
        `tiny` (in the package), a folder with `config.json` and safetensors, or a hub name.
    weight_format, training
        See the table above. Stored NVFP4 codes are loaded as they are, never requantised.
    lora_rank, lora_alpha, rslora
        scaling = alpha / rank, or alpha / sqrt(rank) with `rslora`; `lora` needs a rank, and other
        training uses none of them.
    norms_trained
        Also train the gains of both block norms, as the released code does.
    seed
        Of A; the same A for every weight format, and unused unless `lora`.
    device
        Where the policy goes; projections are quantised there.
    order
        Which permutation of the channels: the same function, another draw of the rounding
        (`permuted_source`). None leaves them as they are stored.
    rounding
        A multiple of a format's error on 16-bit weights (`planted_rounding`).

    Raises
    ------
    CheckpointError
        When a file is not what it claims.
    ValueError
        When the arguments contradict each other or the checkpoint.
    """
    _require_arguments(weight_format, training, norms_trained)
    dtype = resolve_dtype(compute_dtype)
    folder = checkpoints.resolve(checkpoint, revision)
    digest = checkpoints.verify(folder)
    base_dtype = torch.float32 if training == "full" else dtype
    place = torch.device(device)
    if place.type == "cuda":
        device_bytes(place)  # holds the allocator to its limit
    description = read_description(folder)
    require(
        description.stored_format is None or (order is None and rounding is None),
        f"{folder} holds {description.stored_format} codes; another order of channels and a "
        "planted rounding need the 16-bit weights",
    )
    read = {"checkpoint_files": checkpoints.digests_of_read(folder)} | made_of(folder)
    source: TensorFile = open_weights(folder, description.config)
    if order is not None:
        source = PermutedSource(source, description.config, order)
    rounded: RoundedSource | None = None
    if rounding is not None:
        rounding_recipe = default_recipe(folder, rounding.format)
        source = rounded = RoundedSource(source, rounding, device, rounding_recipe)
    recipe = default_recipe(folder, weight_format)
    model, facts = _load_base(description, source, weight_format, base_dtype, place, recipe)
    if rounded is not None:
        facts["rounding"] = rounded.receipt()
    if order is not None:
        facts["order"] = order
    adapted: nn.Module = model
    if training == "lora":
        adapted = attach_adapter(model, rank=lora_rank, alpha=lora_alpha, seed=seed, rslora=rslora)
    policy = Policy(
        model=adapted.eval(),
        tokenizer=load_tokenizer(folder),
        weight_format=weight_format,
        training=training,
        compute_dtype=dtype,
        checkpoint=str(checkpoint),
        folder=folder,
        facts=facts | {"checkpoint_sha256": digest} | read,
    )
    policy.facts["end_token_ids"] = sorted(end_token_ids(policy))
    set_trainable(policy, norms_trained=norms_trained)
    return policy


def _load_base(
    description: ModelDescription,
    source: TensorFile,
    weight_format: str,
    dtype: torch.dtype,
    device: torch.device,
    recipe: str,
) -> tuple[nn.Module, Facts]:
    """Return the filled decoder with wrapped norms, all frozen, and the facts so far."""
    model = build_on_meta(description.config)
    if description.end_token_ids is not None:
        cast(Any, model).generation_config.eos_token_id = description.end_token_ids
    errors = fill(
        model,
        source,
        weight_format=weight_format,
        stored_format=description.stored_format,
        dtype=dtype,
        device=device,
        recipe=recipe,
    )
    linears = linears_of(model)
    needed = {weight_format: len(PROJECTIONS) * description.config.num_hidden_layers}
    require(linears == needed, f"projections by format are {linears}; the config has {needed}")
    facts = Facts(
        linears=linears,
        recipe=recipe if errors else None,
        relative_weight_error_mean=sum(errors.values()) / len(errors) if errors else None,
        norms_wrapped=len(wrap_norms(model)),
        base_bytes=base_bytes(model),
    )
    fuse_projections(model, dtype)
    return model, facts


def trainable_parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """Return the float32 masters that an optimiser updates, by name; of ranks, the own part.

    Raises `ValueError` without any.
    """
    if policy.shards is not None:
        return policy.shards.parts
    trainable = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    if not trainable and policy.training != "none":
        raise ValueError(f"training is {policy.training!r} and no parameter is trainable")
    for name, parameter in trainable.items():
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}; a master must be float32")
    return trainable


def resolve_dtype(compute_dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of a compute dtype's name."""
    name = str(compute_dtype).removeprefix("torch.")
    require(name in COMPUTE_DTYPES, unknown("compute_dtype", COMPUTE_DTYPES, name))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def device_named(named: str | None) -> str:
    """Return the device named, by default `cuda` where there is one; `ValueError` if absent."""
    present = torch.cuda.is_available()
    require(named != "cuda" or present, "--device cuda: torch finds no CUDA device; needs cpu")
    return named or ("cuda" if present else "cpu")


def device_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device that this process may use, and hold its allocator to it."""
    total = int(torch.cuda.get_device_properties(device).total_memory)
    usable = usable_bytes(total)
    if usable < total:
        torch.cuda.set_per_process_memory_fraction(usable / total)
    return usable


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Return a folder's tokenizer, None without one; `CheckpointError` names a broken file."""
    vocabulary, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (vocabulary.is_file() or config.is_file()):
        return None
    if config.is_file():
        read_object(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # A prompt that is too long has a sentence of its own.
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = (
            True
        )
        ids = tokenizer("1 + 1 = 2")["input_ids"]
        require(bool(ids), "it has no vocabulary")
        tokenizer.batch_decode([ids], skip_special_tokens=True)
    except Exception as error:  # tokenizers raises bare exceptions, transformers what it meets
        broken, said = folder, error
        if vocabulary.is_file():
            try:
                Tokenizer.from_file(str(vocabulary))
            except Exception as own:  # noqa: BLE001 - the same
                broken, said = vocabulary, own
        words = shown(said, 300)
        raise CheckpointError(f"{broken}: the tokenizer cannot be used ({words})") from error
    _require_rows(tokenizer, folder / "config.json")
    return tokenizer


def _require_rows(tokenizer: Any, path: Path) -> None:
    """Raise unless the embedding of a config has a row for each token but that of padding."""
    rows = read_object(path).get("vocab_size") if path.is_file() else None
    if type(rows) is not int:
        return
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    beyond = sorted(
        number for number, text in added.items() if number >= rows and text != tokenizer.pad_token
    )
    if not beyond and tokenizer.vocab_size > rows:
        beyond = [tokenizer.vocab_size - 1]
    if beyond:
        text = added.get(beyond[0]) or tokenizer.convert_ids_to_tokens(beyond[0])
        raise CheckpointError(
            f"{path}: vocab_size is {rows}, and the tokenizer's token {text!r} is number "
            f"{beyond[0]}; needed is a row for each token"
        )


def end_token_ids(policy: Policy) -> frozenset[int]:
    """Return the tokens that end a completion: of the config, generation config and tokenizer.

    Raises `CheckpointError` where there are some and none is in the vocabulary.
    """
    decoder: Any = policy.decoder
    end_ids: set[int] = set()
    for source in (decoder.config, getattr(decoder, "generation_config", None), policy.tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            end_ids.update([ids] if isinstance(ids, int) else ids)
    rows = decoder.config.vocab_size
    if end_ids and min(end_ids) >= rows:
        ends = sorted(end_ids)
        raise CheckpointError(f"{policy.checkpoint}: end tokens are {ends}; needs one below {rows}")
    return frozenset(end_ids)


def base_bytes(model: nn.Module) -> int:
    """Return the bytes of all base weights, tied ones counted once, caches and adapters not."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            total += module.weight.nbytes
    return total


def _require_arguments(weight_format: str, training: str, norms_trained: bool) -> None:
    check_value(weight_format, WeightFormat, "weight_format")
    check_value(training, Training, "training")
    if training == "full" and weight_format != "bf16":
        raise ValueError(f"full training needs bf16 weights; weight_format is {weight_format!r}")
    if norms_trained and training != "lora":
        raise ValueError(
            f"norms_trained adds norm gains to LoRA's parameters; training is {training!r}"
        )


def set_trainable(policy: Policy, *, norms_trained: bool) -> None:
    """Make trainable what the policy's kind of training says, and note it in its facts."""
    adapters = dict(adapter_layers(policy.model))
    policy.facts["adapter_modules"] = len(adapters)
    policy.facts["norms_trained"] = 0
    policy.facts["compute"] = str(policy.compute_dtype).removeprefix("torch.")
    if policy.training == "full":
        for parameter in policy.model.parameters():
            parameter.requires_grad_(True)
        if policy.compute_dtype != torch.float32:
            inner = policy.decoder.get_submodule("model")
            autocast = torch.autocast(policy.device.type, dtype=policy.compute_dtype)
            setattr(inner, "forward", autocast(inner.forward))  # noqa: B010 (a method, to mypy)
            policy.facts["compute"] += " by autocast; float32 masters, residual stream and norms"
    if norms_trained:
        for norm in block_norms(policy.model).values():
            norm.weight = nn.Parameter(norm.weight.detach().to(torch.float32))
            policy.facts["norms_trained"] += 1
    trainable = trainable_parameters(policy)
    policy.facts["parameters_trainable"] = sum(p.numel() for p in trainable.values())
