"""Shapes of the models that the paper trains: Qwen2.5-Instruct, as their published configs say.

Time and memory follow from shapes alone, so these serve the memory plan (which needs no torch) and
the models with random weights on which the `systems` tier measures. With the tiny policy's shape
they say how many projections, norms and parameters a run of a checkpoint must have counted.

Easy mistakes: the three smallest tie `lm_head` to the embedding and count one matrix, while the
paper's sizes in GB count both; their vocabulary is also padded to another length than the larger
models'; and heads have 64 channels at 0.5B only.

Source: `config.json` of Qwen/Qwen2.5-{0.5B,1.5B,3B,7B,14B,32B,72B}-Instruct. `135m` has the sizes
of HuggingFaceTB/SmolLM2-135M, and Qwen's biases, which that lacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from repro.spec.checks import require
from repro.spec.hub import local_folders


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a Qwen2 decoder.

    Attributes
    ----------
    hidden, intermediate, layers
        H, I and the number of blocks.
    query_heads, key_heads, head_dim
        Of attention; keys and values have the same number of heads.
    vocabulary
        Rows of the embedding, padding included.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    query_heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @property
    def query_size(self) -> int:
        """Channels of all query heads."""
        return self.query_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Channels of all key heads, and of all value heads."""
        return self.key_heads * self.head_dim

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return `{name: (N, K)}` of the seven projections of a block."""
        H, middle = self.hidden, self.intermediate
        return {
            "q_proj": (self.query_size, H),
            "k_proj": (self.key_size, H),
            "v_proj": (self.key_size, H),
            "o_proj": (H, self.query_size),
            "gate_proj": (middle, H),
            "up_proj": (middle, H),
            "down_proj": (H, middle),
        }

    def projection_parameters(self) -> int:
        """Return the weights of all projections of all blocks, biases aside."""
        return self.layers * sum(N * K for N, K in self.projections().values())

    def adapter_parameters(self, rank: int) -> int:
        """Return the parameters of LoRA factors of a rank on all projections."""
        return self.layers * rank * sum(N + K for N, K in self.projections().values())

    def small_parameters(self) -> int:
        """Return norms and the biases of q, k and v."""
        biases = self.query_size + 2 * self.key_size
        return self.layers * (2 * self.hidden + biases) + self.hidden

    def parameters(self) -> int:
        """Return all parameters, a tied `lm_head` counted once."""
        return self.projection_parameters() + self.small_parameters() + self.embedding_parameters()

    def embedding_parameters(self, *, count_tied_twice: bool = False) -> int:
        """Return the embedding and `lm_head`."""
        matrices = 1 if self.tied and not count_tied_twice else 2
        return matrices * self.vocabulary * self.hidden

    def update_flop(
        self, P: int, B: int, prompt: int, completions: int, *, kept: int, full: bool = False
    ) -> int:
        """Return the FLOP of an update over P prompts and B completions, adapters' products aside.

        S tokens go forward: each prompt once, completions but for their last tokens. The head sees
        `completions` tokens, T. With L blocks of W projection weights, `kept` of which are not
        computed again, and A pairs of a query and a key, as if all completions were equally long:

            projections   2 S W (3 L - kept)      forward, again, gradient of the input
            head          2 T V H 3               the same; weights' gradients as well where `full`
            attention     2 A Q (9 L - 2 kept)    two products forward, two again, five backward
        """
        n, L, T, V, H = completions // B - 1, self.layers, completions, self.vocabulary, self.hidden
        S = P * prompt + B * n
        A = P * prompt * (prompt + 1) // 2 + B * n * (2 * prompt + n + 1) // 2
        projections = 2 * S * self.projection_parameters() // L * (3 * L - kept + L * full)
        attention = 2 * A * self.query_size * (9 * L - 2 * kept)
        return projections + attention + 2 * T * V * H * (3 + full)


# Their fields in order: name, H, I, blocks, query and key heads, channels of a head, rows of the
# embedding, and whether `lm_head` is tied to it.
SHAPES: dict[str, DecoderShape] = {
    shape.name: shape
    for shape in (
        DecoderShape("135m", 576, 1536, 30, 9, 3, 64, 49152, True),
        DecoderShape("0.5b", 896, 4864, 24, 14, 2, 64, 151936, True),
        DecoderShape("1.5b", 1536, 8960, 28, 12, 2, 128, 151936, True),
        DecoderShape("3b", 2048, 11008, 36, 16, 2, 128, 151936, True),
        DecoderShape("7b", 3584, 18944, 28, 28, 4, 128, 152064, False),
        DecoderShape("14b", 5120, 13824, 48, 40, 8, 128, 152064, False),
        DecoderShape("32b", 5120, 27648, 64, 40, 8, 128, 152064, False),
        DecoderShape("72b", 8192, 29568, 80, 64, 8, 128, 152064, False),
    )
}
# Of the policy in the package (`repro.procedures.pretrain`).
TINY = DecoderShape("tiny", 128, 384, 4, 4, 2, 32, 333, True)
_BUILT = ("qwen2", "qwen3", "llama")
_QWEN = re.compile(r"Qwen/Qwen2\.5-(?:Coder-)?([\d.]+B)(?:-Instruct)?(?:-GGUF:.+)?")


def shape_by_name(checkpoint: str) -> DecoderShape | None:
    """Return the shape of a checkpoint whose name tells it, else None (a folder, another model).

    What a record is held against asks this alone: a verdict must not depend on what lies in the
    cache of the machine that gives it.
    """
    return TINY if checkpoint == TINY.name else _published(checkpoint)


def _published(checkpoint: str) -> DecoderShape | None:
    qwen = _QWEN.fullmatch(checkpoint)
    return SHAPES.get(qwen[1].lower()) if qwen else None


def require_built(kind: Any, where: object) -> None:
    """Raise `ValueError` unless this project builds models of a config's `model_type`."""
    sentence = f"{where}: model_type is {kind!r}; this project builds {', '.join(_BUILT)}"
    require(kind in _BUILT, sentence)


def shape_of_config(values: Mapping[str, Any], name: str) -> DecoderShape:
    """Return the shape of a `config.json`; `ValueError` if it lacks a size or is not built here."""
    if isinstance(values, Mapping) and "model_type" in values:
        require_built(values["model_type"], name)
    try:
        heads = int(values["num_attention_heads"])
        shape = DecoderShape(
            name=name,
            hidden=int(values["hidden_size"]),
            intermediate=int(values["intermediate_size"]),
            layers=int(values["num_hidden_layers"]),
            query_heads=heads,
            key_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or int(values["hidden_size"]) // heads),
            vocabulary=int(values["vocab_size"]),
            tied=bool(values.get("tie_word_embeddings", False)),
        )
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: its config.json gives no decoder's sizes: {error!r}") from error
    sizes = {key: size for key, size in asdict(shape).items() if key not in ("name", "tied")}
    small = {key: size for key, size in sizes.items() if size < 1}
    if small:
        raise ValueError(f"{name}: its config.json gives {small}; needed is 1 or more")
    return shape


def shape_of_checkpoint(checkpoint: str) -> DecoderShape | None:
    """Return the shape of a folder or hub name: by its config where that is here, else by its name.

    None where neither says; the download then will.
    """
    for folder in local_folders(checkpoint):
        if (folder / "config.json").is_file():
            try:
                values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{folder / 'config.json'} cannot be read: {error}") from error
            shape = shape_of_config(values, Path(checkpoint).name)
            alike = (known for known in SHAPES.values() if replace(known, name=shape.name) == shape)
            return next(alike, shape)
    return _published(checkpoint)


def shape_named(name: str) -> DecoderShape:
    """Return the shape of a size such as `7b`; `ValueError` lists them otherwise."""
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise ValueError(f"there is no model size {name!r}; the sizes are {', '.join(SHAPES)}")
    return shape
