"""What a decoder looks like to this project: which matrices are quantised, and what they share.

Qwen2, Qwen3 and Llama name their parts alike, so one table serves all three:

======================  =========================================  =======================
part                    modules of `model.layers.<i>`              stored in
======================  =========================================  =======================
projections, quantised  self_attn.{q,k,v,o}_proj, mlp.{gate,up,    4 bits, or 16 in bf16
                        down}_proj
block norms             input_layernorm, post_attention_layernorm  16 bits
head norms (Qwen3)      self_attn.{q,k}_norm                       16 bits, never perturbed
======================  =========================================  =======================

and outside the layers `model.embed_tokens`, `model.norm` (the final norm) and `lm_head`, 16 bits.
Needs no torch.

Easy mistakes
-------------
* q, k, v (and gate, up) are one matrix in inference engines, which keep one global scale for it;
  so these must share NVFP4's global scale, or the engine computes with a scale that two of the
  three were not quantised for (docs/paper_and_code.md, row 8).
* `lm_head` may be the embedding under a second name (`tie_word_embeddings`): it is then absent
  from the checkpoint and must be the same Parameter in the model.
* A pattern that matches nothing is an error here, never a model left as it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn

SUPPORTED_MODEL_TYPES: Final = ("qwen2", "qwen3", "llama")
# Whose angles are a function of the position alone.
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
# The products of a block, and the projections in each: those that share an input are one product.
LINEARS: Final = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
ATTENTION_PROJECTIONS: Final = (*LINEARS["qkv"], *LINEARS["o"])
MLP_PROJECTIONS: Final = (*LINEARS["gate_up"], *LINEARS["down"])
PROJECTIONS: Final = (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)
FUSED: Final = (LINEARS["qkv"], LINEARS["gate_up"])
BLOCK_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
# Of each of these norms, the projections that read its output.
READERS: Final = {
    norm: tuple(f"{parent}.{leaf}" for leaf in leaves)
    for norm, parent, leaves in zip(BLOCK_NORMS, ("self_attn", "mlp"), FUSED, strict=True)
}
# Fields of a config that count something, with bounds far beyond any model's.
_SIZES: Final = {"num_hidden_layers": 10_000} | dict.fromkeys(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings"),
    ),
    2**27,
)

_PROJECTION = re.compile(
    r"^(?P<parent>model\.layers\.\d+\.(?:self_attn|mlp))\.(?P<leaf>" + "|".join(PROJECTIONS) + r")$"
)


def is_projection(module_name: str) -> bool:
    """Tell whether `model.layers.<i>...` names one of the seven projections."""
    return _PROJECTION.match(module_name) is not None


def fused_members(module_name: str) -> tuple[str, ...]:
    """Return the names of the projections that share `module_name`'s global scale, itself included.

    Raises
    ------
    ValueError
        When the name is not that of a projection.
    """
    match = _PROJECTION.match(module_name)
    if match is None:
        raise ValueError(
            f"{module_name} is not a projection; projections are model.layers.<i>.self_attn."
            f"{{{','.join(ATTENTION_PROJECTIONS)}}} and .mlp.{{{','.join(MLP_PROJECTIONS)}}}"
        )
    for group in FUSED:
        if match["leaf"] in group:
            return tuple(f"{match['parent']}.{leaf}" for leaf in group)
    return (module_name,)


def projection_names(num_layers: int) -> list[str]:
    """Return the names of all projections of a decoder of `num_layers`, layer by layer."""
    return [
        f"model.layers.{layer}.{parent}.{leaf}"
        for layer in range(num_layers)
        for parent, leaves in (("self_attn", ATTENTION_PROJECTIONS), ("mlp", MLP_PROJECTIONS))
        for leaf in leaves
    ]


def require_supported(model_type: str, where: object) -> None:
    """Raise `ValueError` unless `model_type` is one that this project builds."""
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"{where}: model_type is {model_type!r}; this project builds "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )


def require_plain(config: Any, where: object) -> None:
    """Raise `ValueError` for a config whose forward pass is not the one that is built here.

    The trainer's packed rows, the engine and the kernels have their own forward pass: full causal
    attention, SwiGLU, rotary angles that do not depend on the length of the sequence.
    """
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if kinds:
        window = getattr(config, "sliding_window", None)
        raise ValueError(
            f"{where}: layer_types holds {', '.join(kinds)} (sliding_window is {window!r}); only "
            "full attention is built here"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"{where}: hidden_act is {config.hidden_act!r}; only 'silu' is built here")
    for name, most in _SIZES.items():
        value = getattr(config, name)
        if not 1 <= value <= most:
            raise ValueError(f"{where}: field {name} is {value}; needed is 1 or more, up to {most}")
    pad = getattr(config, "pad_token_id", None)
    if pad is not None and not -config.vocab_size <= pad < config.vocab_size:
        raise ValueError(f"{where}: field pad_token_id is {pad}; needed is below vocab_size")
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    channels = getattr(config, "head_dim", None)
    channels = config.hidden_size // heads if channels is None else channels
    if channels % 2 or not 2 <= channels <= config.hidden_size * heads:
        raise ValueError(f"{where}: head_dim is {channels}; needed is an even number from 2")
    if not 0 <= config.rms_norm_eps < math.inf:
        raise ValueError(f"{where}: field rms_norm_eps is {config.rms_norm_eps}; needed is from 0")
    if heads % shared:
        raise ValueError(
            f"{where}: field num_key_value_heads is {shared}; needed is a divisor of "
            f"num_attention_heads, {heads}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for name, value in rope.items():
        if name not in {"rope_type", "type"} and not isinstance(value, int | float | None):
            raise ValueError(f"{where}: field {name} is {value!r}; needed is a number")
    theta = rope.get("rope_theta", 1.0)
    if theta is None or not 0 < theta < math.inf:
        raise ValueError(f"{where}: field rope_theta is {theta}; needed is a number above 0")
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        raise ValueError(
            f"{where}: rope_type is {rope['rope_type']!r}; built here are {', '.join(ROPE_TYPES)}"
        )
    if getattr(config, "dual_chunk_attention_config", None):
        raise ValueError(f"{where}: dual_chunk_attention_config is set; it is not built here")


def causal_lm(model: nn.Module) -> nn.Module:
    """Return the transformers `*ForCausalLM` in `model`, which is bare or inside a `PeftModel`."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def submodules_at(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return `{name: module}`; raises `ValueError` with the first name that is not there."""
    modules = {}
    for name in names:
        try:
            modules[name] = model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(f"{type(model).__name__} has no module named {name}") from error
    return modules
