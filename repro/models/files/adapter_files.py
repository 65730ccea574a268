"""Adapters in PEFT's format, as stock peft and vLLM read them.

A folder holds `adapter_config.json` and `adapter_model.safetensors`, whose tensors are named
`base_model.model.<module>.lora_A.weight` and `.lora_B.weight`. Norm gains trained along with the
adapter are stored as PEFT stores `modules_to_save`: `base_model.model.<norm>.weight`, and their
leaf names in the config, so that stock peft puts them back too. (The released code loses them: its
saved config has `modules_to_save` reset; docs/background.md, row 9.)

The config names the base checkpoint and, for one of the hub, the commit that was read, so that
`AutoPeftModelForCausalLM.from_pretrained(folder)` needs nothing else. What PEFT's config has no
place for, the format of the base weights while the adapter was trained, is in `qerl_adapter.json`.

Plain LoRA of one rank and one scaling on all seven projections of every layer is read, rsLoRA's
scaling and the gains of both block norms among it, whoever wrote it. Everything else is refused by
the name of its field or tensor: other projections, ranks or scalings by pattern, what computes
something else (DoRA, biases, trained tokens), and starts that change the base weights (PiSSA,
OLoRA, LoftQ, CorDA), because the adapter belongs to the changed base, which its folder does not
hold. A field that is not known here is refused unless it is empty: a later release of peft may mean
anything by it.

Easy mistakes
-------------
* Loading by name with missing keys tolerated leaves B at zero: an adapter that does nothing.
* Without its config an adapter is ambiguous by a factor: rank, alpha and the rsLoRA flag are there.
* An adapter belongs to the weights that it was trained on. Trained on NVFP4 codes and put on the
  16-bit weights, it is another policy: `weight_format` says which it was.
* Noise added to the norms (AQN) explores and is no part of the policy: gains are written without
  it, even while it is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast, get_args

import torch
from torch import nn

from repro.models.checkpoint import write_json
from repro.models.decoder import BLOCK_NORMS, PROJECTIONS
from repro.models.files.gguf_files import made_of
from repro.models.files.tensor_files import CheckpointError, TensorFile, read_object, write_tensors
from repro.models.lora import ADAPTER_NAME, adapter_layers
from repro.models.norms import block_norms
from repro.models.peft_parts import PeftModel
from repro.models.policy import Policy, load_policy
from repro.spec.arm import PlantedRounding, WeightFormat
from repro.spec.hub import PINNED_BYTES, is_hub_name

PREFIX = "base_model.model."
A_LEAF, B_LEAF = ".lora_A.weight", ".lora_B.weight"
TENSORS, CONFIG, ORIGIN = "adapter_model.safetensors", "adapter_config.json", "qerl_adapter.json"
# Read by name; or which modules have factors, as the tensors show; or without effect on what a
# trained adapter computes: dropout acts in training alone.
_FREE: Final = frozenset(
    (
        *("r", "lora_alpha", "use_rslora", "modules_to_save", "peft_type", "peft_version"),
        *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "lora_dropout"),
        *("target_modules", "exclude_modules", "megatron_core", "qalora_group_size"),
    )
)
# What other fields may be; every field that is not here may only be empty.
_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),
}
# Beyond the width of any layer.
_LARGEST_RANK: Final = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """The contents of an adapter folder besides the tensors.

    Attributes
    ----------
    base, revision
        The base checkpoint, and its commit on the hub; None where the config names none.
    weight_format
        Of the base weights in training; None for an adapter that was not saved here.
    settings
        As `load_policy` takes them: rank and scaling, whether norms' gains are there, and the order
        of channels and the planted rounding of the base in training, None for the checkpoint's own.
    """

    base: str | None
    revision: str | None
    weight_format: WeightFormat | None
    settings: dict[str, Any]


def adapter_tensors(policy: Policy, *, norms: bool = True) -> dict[str, nn.Parameter]:
    """Return the parameters that an adapter file holds, by PEFT's names; with `norms` gains, too.

    Raises `ValueError` when the policy has no adapter.
    """
    tensors: dict[str, nn.Parameter] = {}
    for name, layer in adapter_layers(policy.model):
        A, B, _ = layer.adapter()
        tensors[f"{PREFIX}{name}{A_LEAF}"] = A
        tensors[f"{PREFIX}{name}{B_LEAF}"] = B
    if not tensors:
        raise ValueError(f"training is {policy.training!r}: the policy has no adapter to save")
    if norms and policy.facts["norms_trained"]:
        for name, norm in block_norms(policy.model).items():
            tensors[f"{PREFIX}{name}.weight"] = norm.weight
    return tensors


def named_base(checkpoint: str, folder: Path) -> tuple[str, str | None]:
    """Return the name by which others load a checkpoint that was read from a folder, and its pin.

    A checkpoint of the hub keeps its name, with the commit of the snapshot. A GGUF file has its
    name on the hub, where it lies in the hub's cache, else its path, with its SHA-256: the folder
    that was made of it is this machine's alone. Any other folder has its full path.
    """
    folder = folder.absolute()
    gguf = made_of(folder).get("gguf")
    if gguf is not None:
        path = Path(checkpoint).expanduser().absolute()
        home = next((p.name for p in path.parents if p.name.startswith("models--")), "")
        if home:
            checkpoint = f"{home.removeprefix('models--').replace('--', '/')}:{gguf['gguf']}"
        elif path.exists():
            checkpoint = str(path)
        return checkpoint, PINNED_BYTES + gguf["gguf_sha256"]
    is_snapshot = folder.parent.name == "snapshots" and not Path(checkpoint).is_dir()
    return (checkpoint, folder.name) if is_snapshot else (str(folder), None)


def save_adapter(
    policy: Policy,
    folder: str | Path,
    *,
    base: str | None = None,
    revision: str | None = None,
    norms: bool = True,
) -> Path:
    """Write the policy's adapter, in float32, and return the folder.

    Parameters
    ----------
    folder
        Made when missing; each of its files is replaced at once.
    base, revision
        Name or path of the base checkpoint and its commit, for `base_model_name_or_path` and
        `revision`; by default those that the policy was loaded from.
    norms
        Write trained norm gains too. A reader that refuses `modules_to_save` must get them in
        another way, or it serves another policy.
    """
    path = Path(folder)
    tensors = adapter_tensors(policy, norms=norms)
    path.mkdir(parents=True, exist_ok=True)
    if base is None and policy.folder is not None:
        base, revision = named_base(policy.checkpoint, policy.folder)
    origin = {"base_model_name_or_path": base, "revision": revision}
    settings = cast(PeftModel, policy.model).peft_config[ADAPTER_NAME].to_dict()
    config = {
        key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()
    }
    if norms and policy.facts["norms_trained"]:
        config["modules_to_save"] = list(BLOCK_NORMS)
    config |= origin | {"inference_mode": True}
    write_tensors(path / TENSORS, tensors)
    write_json(path / CONFIG, config)
    own = {"weight_format": policy.weight_format, "order": policy.facts.get("order")}
    planted = policy.facts.get("rounding")
    if planted is not None:
        own["rounding"] = {key: planted[key] for key in ("format", "factor")}
    write_json(path / ORIGIN, origin | own)
    return path


def read_adapter(folder: str | Path) -> StoredAdapter:
    """Return an adapter folder's description of itself; `CheckpointError` where it is broken."""
    path, trained = Path(folder) / CONFIG, Path(folder) / ORIGIN
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; its scaling is known from there alone")
    config = read_object(path)
    own = read_object(trained) if trained.is_file() else {}
    order, planted, trained_format = own.get("order"), own.get("rounding"), own.get("weight_format")
    if trained.is_file() and trained_format not in get_args(WeightFormat):
        raise CheckpointError(
            f"{trained}: weight_format is {trained_format!r}; known are "
            f"{', '.join(get_args(WeightFormat))}"
        )
    if not isinstance(order, int | None) or isinstance(order, bool):
        raise CheckpointError(f"{trained}: order is {order!r}; needed is a whole number or null")
    try:
        rounding = None if planted is None else PlantedRounding(**planted)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{trained}: rounding is {planted!r}: {error}") from error
    return StoredAdapter(
        base=config.get("base_model_name_or_path"),
        revision=config.get("revision"),
        weight_format=trained_format,
        settings=settings_of(config, path) | {"order": order, "rounding": rounding},
    )


def base_named(adapter: str | Path, stored: StoredAdapter) -> str:
    """Return the base that an adapter's files name; `CheckpointError` where it cannot be one."""
    base = stored.base or ""
    if base != "tiny" and not is_hub_name(base) and not (base and Path(base).expanduser().exists()):
        raise CheckpointError(
            f"{Path(adapter) / CONFIG}: base_model_name_or_path is {stored.base!r}, which is not "
            "here; name the checkpoint that the adapter was trained on"
        )
    return base


def settings_of(values: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return what an `adapter_config.json` says to `load_policy`.

    A `CheckpointError` names a field that is not read here.
    """

    def require(fits: bool, field: str, needed: object) -> None:
        if not fits:
            raise CheckpointError(f"{where}: {field} is {values.get(field)!r}; needed is {needed}")

    require(values.get("peft_type") == "LORA", "peft_type", "LORA")
    for field in sorted(values.keys() - _FREE):
        allowed = _PLAIN.get(field, (None, False, {}, []))
        # By their text: 0, which is a layer or a token, equals False.
        require(repr(values[field]) in map(repr, allowed), field, " or ".join(map(repr, allowed)))
    saved = values.get("modules_to_save")
    norms = isinstance(saved, list) and sorted(map(str, saved)) == sorted(BLOCK_NORMS)
    require(norms or saved in (None, []), "modules_to_save", f"none or {list(BLOCK_NORMS)}")
    targets, known = values.get("target_modules"), sorted(PROJECTIONS)
    leaves = {str(t).rpartition(".")[2] for t in targets} if isinstance(targets, list) else set()
    # What a pattern names, the tensors show; PEFT ignores names that no module has.
    adapted = leaves.issuperset(known) and leaves.isdisjoint(("lm_head", "embed_tokens"))
    require(isinstance(targets, str) or adapted, "target_modules", known)
    rank, alpha = values.get("r"), values.get("lora_alpha")
    require(type(rank) is int and 1 <= rank <= _LARGEST_RANK, "r", f"1 to {_LARGEST_RANK}")
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    require(number and 0 < abs(alpha or 0) < 1e30, "lora_alpha", "a number but 0")
    for field in ("base_model_name_or_path", "revision"):
        require(isinstance(values.get(field), str | None), field, "a text")
    require(isinstance(values.get("use_rslora"), bool | None), "use_rslora", "true or false")
    return {
        "lora_rank": rank,
        "lora_alpha": float(alpha or 0),
        "rslora": bool(values.get("use_rslora")),
        "norms_trained": norms,
    }


def load_adapted(
    adapter: str | Path,
    *,
    checkpoint: str | Path | None = None,
    weight_format: WeightFormat | None = None,
    compute_dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
) -> Policy:
    """Load a stored adapter, all of its tensors, on its base, as it was trained.

    Parameters
    ----------
    checkpoint, weight_format
        In place of the base and the format that the adapter's files name; `bf16` where they name no
        format.

    Raises
    ------
    CheckpointError
        When a file is not what it claims, or nothing names the base; the first tensor that does
        not fit is named.
    ValueError
        When the base stores codes of another format.
    """
    stored = read_adapter(adapter)
    base = checkpoint if checkpoint is not None else base_named(adapter, stored)
    policy = load_policy(
        base,
        revision=(stored.revision or "") if checkpoint is None else "",
        weight_format=weight_format or stored.weight_format or "bf16",
        training="lora",
        compute_dtype=compute_dtype,
        device=device,
        **stored.settings,
    )
    parameters = adapter_tensors(policy)
    source = TensorFile(Path(adapter) / TENSORS)
    odd = sorted(parameters.keys() ^ set(source.names()))
    if odd:
        fault = "is missing" if odd[0] in parameters else "has no place in the adapter"
        raise CheckpointError(f"{source.where(odd[0])} {fault}, by {Path(adapter) / CONFIG}")
    for name, parameter in parameters.items():
        spec = source.spec(name)
        if spec.shape != tuple(parameter.shape) or not spec.dtype.is_floating_point:
            raise CheckpointError(
                f"{source.where(name)} is {spec.dtype} {spec.shape}; needed is a float "
                f"{tuple(parameter.shape)}"
            )
        value = source.read(name).float()
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{source.where(name)} holds NaN or infinity")
        with torch.no_grad():
            parameter.copy_(value)
    return policy
