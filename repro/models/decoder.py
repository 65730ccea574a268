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
  three were not quantised for (docs/background.md, row 8).
* `lm_head` may be the embedding under a second name (`tie_word_embeddings`): it is then absent
  from the checkpoint and must be the same Parameter in the model.
* A pattern that matches nothing is an error here, never a model left as it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from repro.spec.shapes import require_built

if TYPE_CHECKING:
    from torch import nn

# Whose angles are a function of the position alone.
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
# The products of a block, and the projections in each: those that share an input are one product.
LINEARS: Final = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
PROJECTIONS: Final = tuple(leaf for group in LINEARS.values() for leaf in group)
BLOCK_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
# Of each of these norms, the projections that read its output.
READERS: Final = {
    "input_layernorm": tuple(f"self_attn.{leaf}" for leaf in LINEARS["qkv"]),
    "post_attention_layernorm": tuple(f"mlp.{leaf}" for leaf in LINEARS["gate_up"]),
}
# Fields of a config that count something, with bounds far beyond any model's.
SIZES: Final = {"num_hidden_layers": 10_000} | dict.fromkeys(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings"),
    ),
    2**27,
)

_PROJECTION = re.compile(
    r"^model\.layers\.\d+\.(?:self_attn|mlp)\.(?:" + "|".join(PROJECTIONS) + r")$"
)


def is_projection(module_name: str) -> bool:
    """Tell whether `model.layers.<i>...` names one of the seven projections."""
    return _PROJECTION.match(module_name) is not None


def fused_members(projection: str) -> tuple[str, ...]:
    """Return the projections that share a projection's global scale, itself among them."""
    parent, _, leaf = projection.rpartition(".")
    group = next(leaves for leaves in LINEARS.values() if leaf in leaves)
    return tuple(f"{parent}.{own}" for own in group)


def require_supported(values: Mapping[str, Any], where: object) -> None:
    """Raise `ValueError` unless a config's values name a model that this project builds."""
    kind, named = values["model_type"], values.get("architectures")
    require_built(kind, where)
    built = [f"{kind.capitalize()}ForCausalLM"]
    # Old conversions write LLaMA, and what FSDP2 saved has its name before the class's.
    names = [str(n).removeprefix("FSDP").lower() for n in named] if type(named) is list else named
    if names not in (None, [built[0].lower()]):
        raise ValueError(f"{where}: field architectures is {named!r}; needed is {built}, or none")


def require_plain(config: Any, where: object) -> None:
    """Raise `ValueError` for a config whose forward pass is not the one that is built here.

    The trainer's packed rows, the engine and the kernels have their own forward pass: full causal
    attention, SwiGLU, rotary angles that do not depend on the length of the sequence.
    """

    def require(fits: bool, name: str, value: object, needed: str) -> None:
        if not fits:
            raise ValueError(f"{where}: field {name} is {value!r}; needed is {needed}")

    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    require(not kinds, "layer_types", kinds, "full_attention alone, which is built here")
    require(config.hidden_act == "silu", "hidden_act", config.hidden_act, "'silu'")
    for name, most in SIZES.items():
        value = getattr(config, name)
        require(1 <= value <= most, name, value, f"1 or more, up to {most}")
    pad, size = getattr(config, "pad_token_id", None), config.vocab_size
    require(pad is None or -size <= pad < size, "pad_token_id", pad, "below vocab_size")
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    channels = getattr(config, "head_dim", None)
    channels = config.hidden_size // heads if channels is None else channels
    whole = isinstance(channels, int) and channels % 2 == 0
    even = whole and 2 <= channels <= config.hidden_size * heads
    require(even, "head_dim", channels, "an even number from 2")
    largest = config.hidden_size * heads * channels
    require(largest < 2**60, "head_dim", channels, f"a matrix below 2^60 numbers, not {largest}")
    epsilon = config.rms_norm_eps
    require(0 <= epsilon <= 1, "rms_norm_eps", epsilon, "from 0 to 1")
    divisor = f"a divisor of num_attention_heads, {heads}"
    require(heads % shared == 0, "num_key_value_heads", shared, divisor)
    rope = getattr(config, "rope_parameters", None) or {}
    for name, value in rope.items():
        if name not in {"rope_type", "type"}:
            number = isinstance(value, int | float | None) and abs(value or 0) < 2**63
            require(number, name, value, "a number that torch can hold")
    turned = rope.get("partial_rotary_factor")
    require(turned in (None, 1), "partial_rotary_factor", turned, "1: heads are rotated whole")
    theta, kind = rope.get("rope_theta", 1.0), rope.get("rope_type", "default")
    require(theta is not None and 1 <= theta < math.inf, "rope_theta", theta, "1 or more")
    require(kind in ROPE_TYPES, "rope_type", kind, " or ".join(ROPE_TYPES))
    factor = 1 if kind == "default" else rope.get("factor")
    require(factor is not None and factor >= 1, "factor", factor, "1 or more")
    kept = getattr(config, "return_dict", True)
    require(kept is True, "return_dict", kept, "true, or nothing")
    chunks = getattr(config, "dual_chunk_attention_config", None)
    require(not chunks, "dual_chunk_attention_config", chunks, "none")


def causal_lm(model: nn.Module) -> nn.Module:
    """Return the transformers `*ForCausalLM` in `model`, which is bare or inside a `PeftModel`."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model
