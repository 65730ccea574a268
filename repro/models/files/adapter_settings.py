"""What an adapter's `adapter_config.json` says, read strictly, and its tensors in this form.

The adapter that is trained and sampled here is plain LoRA of one rank and one scaling on all seven
projections of every layer. Many adapters of others are the same thing in other words, and are read
as peft reads them, by its own rules of matching:

=============================  ====================================================================
setting                        how it is read
=============================  ====================================================================
fewer `target_modules`,        a projection without factors gets A = B = 0
`exclude_modules`,
`layers_to_transform`
`rank_pattern`                 smaller factors are filled up with rows and columns of zeros
`alpha_pattern`, ranks with    B is multiplied by the projection's scaling over the adapter's
another scaling
`use_rslora`                   scaling is alpha / sqrt(rank)
`modules_to_save`              the gains of both block norms, or nothing
=============================  ====================================================================

Everything else is refused by the name of its field: what computes something else (DoRA, biases,
trained tokens, further parameters), and starts that change the base weights (PiSSA, OLoRA, LoftQ,
CorDA), because the adapter belongs to the changed base, which its folder does not hold. A field
that is not in the table of this module is refused unless it is empty: a later release of peft may
mean anything by it.

Easy mistakes
-------------
* `alpha_pattern` matches from a dot to the end of a module's name and may be an expression: a plain
  look-up by the last part of the name finds nothing, and the scaling is off in silence.
* With `rank_pattern` a scaling is alpha over the *projection's* rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from repro.models.decoder import BLOCK_NORMS, PROJECTIONS
from repro.models.files.tensor_files import CheckpointError, WeightSource, read_object
from repro.models.peft_parts import LoraConfig, check_target_module_exists, get_pattern_key

PREFIX: Final = "base_model.model."
A_LEAF, B_LEAF = ".lora_A.weight", ".lora_B.weight"
# No adapter is read on these.
_OTHER_MODULES: Final = ("lm_head", "model.embed_tokens")
# Decide which modules get which factors.
_SHAPING: Final = (
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
)
# Read by name, or of no effect on what a trained adapter computes: dropout acts in training alone,
# EVA chooses A and the ranks by data and leaves the base as it is.
_FREE: Final = frozenset(
    (
        *_SHAPING,
        *("r", "lora_alpha", "use_rslora", "modules_to_save", "peft_type", "peft_version"),
        *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
        *("lora_dropout", "megatron_core", "qalora_group_size", "eva_config"),
    )
)
# What other fields may be; every field that is not here may only be empty.
_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "task_type": (None, "CAUSAL_LM"),
        "bias": (None, "none"),
        "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
    }
)
# Of fields that may be empty, too.
_FORMS: Final[Mapping[str, type]] = MappingProxyType(
    {
        **dict.fromkeys(("rank_pattern", "alpha_pattern"), dict),
        "modules_to_save": list,
        **dict.fromkeys(("base_model_name_or_path", "revision"), str),
    }
)
# Beyond the width of any layer.
_LARGEST_RANK: Final = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """An adapter of one rank and one scaling, and how the stored factors become its own.

    Attributes
    ----------
    rank
        Large enough for every projection's factors.
    alpha, rslora
        As in `repro.models.lora`; with `rank` they give `scaling`.
    norms_trained
        Whether gains of the block norms are among the tensors.
    where
        The config's file, for messages.
    lora
        peft's config with the fields that decide which modules get which factors.
    """

    rank: int
    alpha: float
    rslora: bool
    norms_trained: bool
    where: Path
    lora: LoraConfig

    @property
    def scaling(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def adapts(self, projection: str) -> bool:
        """Tell whether the files hold factors of a projection."""
        return bool(check_target_module_exists(self.lora, projection))

    def stored_rank(self, projection: str) -> int:
        """Return the rank of a projection's stored factors."""
        patterns: dict[str, int] = self.lora.rank_pattern or {}
        return patterns.get(get_pattern_key(list(patterns), projection), self.lora.r)

    def factor(self, projection: str) -> float:
        """Return the factor of a projection's stored B, 1 without patterns."""
        patterns: dict[str, float] = self.lora.alpha_pattern or {}
        alpha = patterns.get(get_pattern_key(list(patterns), projection), self.lora.lora_alpha)
        rank = self.stored_rank(projection)
        if (alpha, rank) == (self.lora.lora_alpha, self.lora.r):
            return 1.0
        return _scaling(alpha, rank, self.rslora) / self.scaling


def _scaling(alpha: float, rank: int, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def read_settings(path: Path) -> AdapterSettings:
    """Return the settings in an `adapter_config.json`.

    Raises
    ------
    CheckpointError
        When it is missing or broken, or naming the first field that is not read here.
    """
    return settings_of(read_json(path), path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file of an adapter; `CheckpointError` where there are none."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; its scaling is known from there alone")
    return read_object(path)


def settings_of(values: Mapping[str, Any], where: Path) -> AdapterSettings:
    """Return the settings in the values of an `adapter_config.json`; see `read_settings`."""
    _require_plain(values, where)
    saved = values.get("modules_to_save") or None
    if saved is not None and set(map(str, saved)) != set(BLOCK_NORMS):
        raise CheckpointError(
            f"{where}: modules_to_save is {saved!r}; read here are none or {list(BLOCK_NORMS)}"
        )
    rslora = bool(values.get("use_rslora"))
    lora = _lora_config(values, where)
    rank = max([lora.r, *(lora.rank_pattern or {}).values()])
    alpha = float(lora.lora_alpha)
    if rank != lora.r:
        alpha = _scaling(alpha, lora.r, rslora) * (math.sqrt(rank) if rslora else rank)
    return AdapterSettings(
        rank=rank,
        alpha=alpha,
        rslora=rslora,
        norms_trained=saved is not None,
        where=where,
        lora=lora,
    )


def _require_plain(values: Mapping[str, Any], where: Path) -> None:
    if values.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{where}: peft_type is {values.get('peft_type')!r}; 'LORA' is read here"
        )
    for field in sorted(values.keys() - _FREE):
        value, allowed = values[field], _PLAIN.get(field, (None, False, {}, []))
        if value not in allowed:
            read = " or ".join(map(repr, allowed))
            raise CheckpointError(f"{where}: {field} is {value!r}; only {read} is read here")
    for field, kind in _FORMS.items():
        if values.get(field) and not isinstance(values[field], kind):
            raise CheckpointError(
                f"{where}: {field} is {values[field]!r}; needed is a {kind.__name__}"
            )


def _lora_config(values: Mapping[str, Any], where: Path) -> LoraConfig:
    """Return peft's config of the fields that decide which modules get which factors."""
    ranks = {"r": values.get("r"), **(values.get("rank_pattern") or {})}
    alphas = {"lora_alpha": values.get("lora_alpha"), **(values.get("alpha_pattern") or {})}
    for name, rank in ranks.items():
        if type(rank) is not int or not 1 <= rank <= _LARGEST_RANK:
            raise CheckpointError(
                f"{where}: rank {name} is {rank!r}; needed is 1 to {_LARGEST_RANK}"
            )
    for name, alpha in alphas.items():
        if type(alpha) not in (int, float) or not math.isfinite(alpha) or alpha == 0:
            raise CheckpointError(
                f"{where}: alpha {name} is {alpha!r}; needed is a finite number but 0"
            )
    shaping: dict[str, Any] = {field: values.get(field) for field in _SHAPING}
    if shaping["target_modules"] == "all-linear":
        shaping["target_modules"] = list(PROJECTIONS)
    if not shaping["target_modules"]:
        raise CheckpointError(f"{where}: target_modules is {shaping['target_modules']!r}")
    try:
        config = LoraConfig(r=ranks["r"], lora_alpha=alphas["lora_alpha"], **shaping)
        check_target_module_exists(config, f"model.layers.0.self_attn.{PROJECTIONS[0]}")
        other = [name for name in _OTHER_MODULES if check_target_module_exists(config, name)]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    if other:
        raise CheckpointError(
            f"{where}: target_modules {values['target_modules']!r} hold {other[0]}; read here are "
            f"{', '.join(PROJECTIONS)}"
        )
    return config


def stored_tensors(
    settings: AdapterSettings, source: WeightSource, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return the tensors of an adapter of one rank and scaling from a file's.

    Parameters
    ----------
    source
        `adapter_model.safetensors`; 16- or 32-bit floats.
    shapes
        By PEFT's names, of every tensor that the policy's adapter has, trained norm gains among
        them; those of A and B are (R, K) and (N, R) with `settings.rank` for R.

    Returns
    -------
    dict of Tensor, float32

    Raises
    ------
    CheckpointError
        Naming the first tensor that is missing, superfluous, of another shape or not finite; when
        no projection has factors.
    """
    expected = _expected_shapes(settings, shapes)
    _require_same_names(source, expected.keys(), settings)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        value = torch.zeros(shape, dtype=torch.float32)
        if name in expected:
            stored = _read(source, name, expected[name])
            if name.endswith(B_LEAF):
                stored = stored * settings.factor(_projection(name))
            # Factors of a smaller rank fill the first rows of A, the first columns of B.
            value[tuple(slice(0, size) for size in stored.shape)] = stored
        tensors[name] = value
    return tensors


def _projection(name: str) -> str:
    return name.removeprefix(PREFIX).removesuffix(A_LEAF).removesuffix(B_LEAF)


def _expected_shapes(
    settings: AdapterSettings, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that the file must hold, by name."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if not name.endswith((A_LEAF, B_LEAF)):
            expected[name] = shape
        elif settings.adapts(_projection(name)):
            rank = settings.stored_rank(_projection(name))
            expected[name] = (rank, shape[1]) if name.endswith(A_LEAF) else (shape[0], rank)
    return expected


def _require_same_names(
    source: WeightSource, expected: Iterable[str], settings: AdapterSettings
) -> None:
    if not any(name.endswith(A_LEAF) for name in expected):
        targets = settings.lora.target_modules
        raise CheckpointError(f"{settings.where}: target_modules {targets} match no projection")
    odd = sorted(set(expected) ^ set(source.names()))
    if odd:
        fault = "is missing" if odd[0] in expected else "has no place in the adapter"
        raise CheckpointError(f"{source.where(odd[0])} {fault}, by {settings.where}")


def _read(source: WeightSource, name: str, shape: tuple[int, ...]) -> Tensor:
    spec = source.spec(name)
    if spec.shape != shape or not spec.dtype.is_floating_point:
        raise CheckpointError(
            f"{source.where(name)} is {spec.dtype} {spec.shape}; needed is a float {shape}"
        )
    value = source.read(name).float()
    if not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{source.where(name)} holds NaN or infinity")
    return value
