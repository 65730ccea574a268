"""GGUF files of Qwen2 and Llama models, turned into checkpoint folders in bfloat16.

`converted` gives the folder that every other part of this project reads. It lies in the user's
cache under the file's digest, whole or not at all, so a second call finds it. Its `SOURCE.json`
says what the file was: name, size, SHA-256, how many tensors of each GGUF type.

Weights are dequantised by the `gguf` library (the extra `gguf`) in float32 and rounded once. What
such a file does otherwise than Hugging Face's folders is undone here:

* linear scaling of rotary angles by a factor, whether a type stands beside it or not; any other is
  refused by its key;
* names; and rows of Llama's queries and keys, which the file has as pairs that rotate together side
  by side, transformers as two halves;
* `token_embd` and `output` may be one tied matrix, rounded twice. They are taken for one if they
  differ by no more than rounding to the coarser type explains: ||a - b|| / ||a|| at most
  max(.01, 4 * 2^-bits), bits a weight of that type (Q5_0 and Q8_0 of one matrix: 2 * 2^-bits);
  the finer then stands for both. Matrices that were trained apart differ by about 1.4;
* the tokenizer, a byte-level BPE that splits text as `tokenizer.ggml.pre` names it. transformers'
  own reading of GGUF leaves out Qwen2's normal form (NFC), and of SmolLM2's digits, each of which
  is a token, splits ASCII's alone.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from repro.models.files.tensor_files import CheckpointError, read_object, write_json, write_tensors
from repro.models.loading import build_on_meta, expected_specs, read_description
from repro.spec.hub import gguf_copy
from repro.spec.whole_files import appearing, sha256_of

_SOURCE: Final = "SOURCE.json"
_KINDS: Final = ("qwen2", "llama")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
# How Qwen2's own tokenizer.json splits text before BPE.
_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER, _UNUSED = 3, 4, 5  # kinds of tokens in `tokenizer.ggml.token_type`
_ROWS: Final = 8192  # of a matrix that are dequantised at once
# Keys of an architecture; any other may change what the model computes.
_KEYS: Final = frozenset(
    {"block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"}
    | {"rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type"}
    | {"rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.finetuned"}
    | {"rope.scaling.original_context_length", "attention.head_count", "attention.head_count_kv"}
    | {"attention.key_length", "attention.value_length", "attention.sliding_window"}
    | {"attention.causal", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"}
)
# What a file that is none can end with in the library, in tokenizers, and here.
_FAULTS: Final = (ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RuntimeError)


def converted(path: Path) -> Path:
    """Return a GGUF file's checkpoint folder, made now if it is not in the cache; or raise."""
    target = gguf_copy(path)
    if target.is_dir():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            f"{path} needs the package gguf, which is not installed: pip install 'qerl-repro[gguf]'"
        )
    try:
        with appearing(target) as folder:
            folder.mkdir()
            _File(path).write(folder)
    except CheckpointError:
        raise
    except OSError:
        if not target.is_dir():  # made by another process meanwhile, of the same bytes
            raise
    except _FAULTS as error:
        fault = " ".join(str(error).split())
        raise CheckpointError(f"{path} is damaged, or no whole GGUF file ({fault})") from error
    return target


def made_of(folder: Path) -> dict[str, Any]:
    """Return the GGUF file that a folder was made of, as `gguf`; empty for other folders."""
    path = folder / _SOURCE
    source = read_object(path) if path.is_file() else {}
    return {"gguf": source} if "gguf_sha256" in source else {}


class _File:
    """A GGUF file: its metadata and its tensors, checked as they are read."""

    def __init__(self, path: Path) -> None:
        from repro.models.files.gguf_reader import BoundedReader

        self.path, self.reader = path, BoundedReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        parts = self.value("split.count", int, 1)
        self.require(parts < 2, f"is one of {parts} parts; needed is one file (gguf-split --merge)")
        self.kind = self.value("general.architecture", str)
        self.require(self.kind in _KINDS, f"holds a {self.kind!r} model; read are qwen2 and llama")
        self.blocks = self.value(f"{self.kind}.block_count", int)
        held = len(self.tensors)
        self.require(self.blocks <= held, f"gives {self.blocks} blocks; it holds {held} tensors")
        self.heads = self.value(f"{self.kind}.attention.head_count", int)
        self.key_heads = self.value(f"{self.kind}.attention.head_count_kv", int, self.heads)
        self.require(self.heads > 0, f"gives {self.kind}.attention.head_count as {self.heads}")
        self.tokens = self.value("tokenizer.ggml.tokens", list)
        self.tied = self._tied()

    def require(self, fits: bool, fault: str) -> None:
        """Raise `CheckpointError` with what the file is or does, unless that fits."""
        if not fits:
            raise CheckpointError(f"{self.path} {fault}")

    def value(self, key: str, kind: type, *default: Any) -> Any:
        """Return a value of the metadata; without a default it must be there."""
        field = self.reader.fields.get(key)
        self.require(field is not None or bool(default), f"has no {key}")
        value = default[0] if field is None else field.contents()
        fits = field is None or isinstance(value, kind)
        self.require(fits, f"gives {key} as {value!r}; needed is {kind.__name__}")
        return value

    def write(self, folder: Path) -> None:
        """Write the files of the checkpoint folder."""
        from gguf import MODEL_ARCH, get_tensor_name_map

        write_json(folder / "config.json", self._config())
        self._write_tokenizer(folder)
        try:
            model = build_on_meta(read_description(folder).config)
        except ValueError as error:
            fault = str(error).replace(str(folder / "config.json"), "its config")
            raise CheckpointError(f"{self.path}: {fault}") from error
        specs = expected_specs(model, None)
        table = get_tensor_name_map(MODEL_ARCH[self.kind.upper()], self.blocks)
        places = {name: str(table.get_name(name, (".weight", ".bias"))) for name in specs}
        if self.tied is not None:
            places["model.embed_tokens.weight"] = self.tied
        missing = sorted(set(places.values()) - self.tensors.keys())
        self.require(not missing, f"lacks the tensor {''.join(missing[:1])}")
        extra = sorted(self.tensors.keys() - places.values() - {_EMBEDDING, _OUTPUT})
        self.require(not extra, f"holds {''.join(extra[:1])}, which has no place in the model")
        left = iter(range(len(specs) - 1, -1, -1))

        def make(name: str) -> Tensor:
            if (more := next(left)) % 32 == 0:
                sys.stderr.write(f"{self.path.name} to bfloat16: {more} tensors to go\n")
            return self._read(places[name], specs[name].shape)

        write_tensors(folder / "model.safetensors", {name: make(name) for name in specs})
        types = Counter(tensor.tensor_type.name for tensor in self.reader.tensors)
        source = {
            "gguf": self.path.name,
            "gguf_bytes": self.path.stat().st_size,
            "gguf_sha256": sha256_of(self.path),
            "name": self.value("general.name", str, None),
            "types_in_the_file": dict(types),
            "tied_to": self.tied,
            "dtype": "bfloat16",
        }
        write_json(folder / _SOURCE, source)

    def _pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield a tensor in float32, some of its rows at a time."""
        from gguf import dequantize

        tensor = self.tensors[name]
        for start in range(0, len(tensor.data), _ROWS):
            piece = dequantize(tensor.data[start : start + _ROWS], tensor.tensor_type)
            self.require(bool(np.isfinite(piece).all()), f"holds NaN or infinity in {name}")
            yield piece

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in bfloat16, its rows in transformers' order."""
        found = tuple(int(size) for size in reversed(self.tensors[name].shape))
        self.require(found == shape, f"holds {name} of shape {found}; the model needs {shape}")
        whole = torch.cat([torch.tensor(p).to(torch.bfloat16) for p in self._pieces(name)])
        heads = {"attn_q": self.heads, "attn_k": self.key_heads}.get(name.split(".")[-2])
        if self.kind == "llama" and heads is not None:
            whole = whole.view(heads, -1, 2, shape[1]).transpose(1, 2).reshape(shape)
        return whole

    def _tied(self) -> str | None:
        """Return the tensor that is embedding and output in one; None if they are two matrices."""
        from gguf import GGML_QUANT_SIZES

        if not {_EMBEDDING, _OUTPUT} <= self.tensors.keys():
            return _EMBEDDING
        pair = [self.tensors[name] for name in (_EMBEDDING, _OUTPUT)]
        if list(pair[0].shape) != list(pair[1].shape):
            return None
        sizes = [GGML_QUANT_SIZES[tensor.tensor_type] for tensor in pair]
        bits = [8 * nbytes / weights for weights, nbytes in sizes]
        apart = norm = 0.0
        for one, other in zip(self._pieces(_EMBEDDING), self._pieces(_OUTPUT), strict=True):
            apart += float(np.square(one - other).sum(dtype=np.float64))
            norm += float(np.square(one).sum(dtype=np.float64))
        if apart > max(0.01, 4 * 2 ** -min(bits)) ** 2 * norm:
            return None
        return _OUTPUT if bits[1] > bits[0] else _EMBEDDING

    def _config(self) -> dict[str, Any]:
        """Return the values of `config.json`."""
        kind = self.kind
        for key in self.reader.fields:
            fits = not key.startswith(f"{kind}.") or key.removeprefix(f"{kind}.") in _KEYS
            self.require(fits, f"gives {key!r}, which is not read here")
        rows, given = len(self.tokens), self.value(f"{kind}.vocab_size", int, len(self.tokens))
        self.require(given == rows, f"gives {kind}.vocab_size as {given}; it has {rows} tokens")
        hidden = self.value(f"{kind}.embedding_length", int)
        head = self.value(f"{kind}.attention.key_length", int, hidden // self.heads)
        for key in ("rope.dimension_count", "attention.value_length"):
            found = self.value(f"{kind}.{key}", int, head)
            self.require(found == head, f"gives {kind}.{key} as {found}; a head has {head}")
        context = self.value(f"{kind}.context_length", int)
        window = self.value(f"{kind}.attention.sliding_window", int, 0)
        self.require(not 0 < window < context, f"attends to the last {window} tokens alone")
        epsilon = self.value(f"{kind}.attention.layer_norm_rms_epsilon", float)
        return {
            "architectures": [f"{kind.capitalize()}ForCausalLM"],
            "model_type": kind,
            # Of a folder without, or an older one, transformers warns that it may be Mistral's.
            "transformers_version": "5.0.0",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied is not None,
            "bos_token_id": self._token("bos"),
            "eos_token_id": self._token("eos"),
            "hidden_size": hidden,
            "head_dim": head,
            "vocab_size": len(self.tokens),
            "intermediate_size": self.value(f"{kind}.feed_forward_length", int),
            "num_hidden_layers": self.blocks,
            "max_position_embeddings": context,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "rms_norm_eps": float(f"{epsilon:.6g}"),  # from float32: 9.99999974e-06 is 1e-05
            "rope_parameters": self._rope(),
        }

    def _rope(self) -> dict[str, Any]:
        """Return the rotary angles' parameters; a factor without a type is linear scaling."""
        prefix = f"{self.kind}.rope"
        causal = self.value(f"{self.kind}.attention.causal", bool, True)
        self.require(causal, f"gives {self.kind}.attention.causal as False; needed is True")
        turned = sorted(name for name in self.tensors if name.startswith("rope_"))
        self.require(not turned, f"scales its rotary angles by {turned[:1]}, not read here")
        kind = self.value(f"{prefix}.scaling.type", str, "linear")
        self.require(
            kind in ("none", "linear"),
            f"gives {prefix}.scaling.type as {kind!r}; angles are read as none or linear",
        )
        factor = self.value(
            f"{prefix}.scaling.factor", float, self.value(f"{prefix}.scale_linear", float, 1.0)
        )
        strength = self.value(f"{prefix}.scaling.attn_factor", float, 1.0)
        self.require(strength == 1, f"gives {prefix}.scaling.attn_factor as {strength}; read is 1")
        self.require(0 <= factor < math.inf, f"gives {prefix}.scaling.factor as {factor}")
        base = {"rope_theta": self.value(f"{prefix}.freq_base", float, 10000.0)}
        if kind == "none" or factor in (0, 1):  # 0 is how a file may say that there is none
            return base | {"rope_type": "default"}
        return base | {"rope_type": "linear", "factor": factor}

    def _token(self, name: str) -> int | None:
        """Return the id of one of the tokenizer's named tokens; None where the file names none."""
        token = self.value(f"tokenizer.ggml.{name}_token_id", int, None)
        known = token is None or 0 <= token < len(self.tokens)
        self.require(known, f"gives {name}_token_id as {token}; there are {len(self.tokens)}")
        return token

    def _write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files, and which tokens end a completion."""
        end, pad, bos = (self._token(name) for name in ("eos", "padding", "bos"))
        self.require(end is not None, "has no tokenizer.ggml.eos_token_id")
        named = {"eos": end, "pad": end if pad is None else pad, "unk": self._token("unknown")}
        if bos != named["pad"]:  # Qwen2's names its padding, and no text begins with it
            named["bos"] = bos
        whole = PreTrainedTokenizerFast(
            tokenizer_object=self._tokenizer(bos),
            clean_up_tokenization_spaces=False,
            model_max_length=self.value(f"{self.kind}.context_length", int),
            chat_template=self.value("tokenizer.chat_template", str, None),
            **{f"{name}_token": self.tokens[at] for name, at in named.items() if at is not None},
        )
        whole.save_pretrained(str(folder))
        # A model that pads with the end of a document also ends completions with it.
        ends = dict.fromkeys(at for at in (end, self._token("eot"), pad) if at is not None)
        generation = {"bos_token_id": bos, "eos_token_id": [*ends], "pad_token_id": named["pad"]}
        write_json(folder / "generation_config.json", generation)

    def _tokenizer(self, bos: int | None) -> tokenizers.Tokenizer:
        """Return the file's byte-level BPE."""
        model, split = (self.value(f"tokenizer.ggml.{key}", str) for key in ("model", "pre"))
        self.require(model == "gpt2", f"has a {model} tokenizer; read is gpt2's byte-level BPE")
        splits: dict[str, Any] = {
            "qwen2": tokenizers.pre_tokenizers.Split(tokenizers.Regex(_QWEN2_SPLIT), "isolated"),
            "smollm": tokenizers.pre_tokenizers.Digits(individual_digits=True),
            "gpt-2": None,
        }
        self.require(split in splits, f"splits text as {split}; known are {', '.join(splits)}")
        kinds = self.value("tokenizer.ggml.token_type", list)
        fits = len(set(self.tokens)) == len(self.tokens) == len(kinds)
        self.require(fits, "has tokens twice, or without a kind")
        odd = sorted({*kinds} - {*range(1, 7)}, key=str)
        self.require(not odd, f"gives {odd[:1]} in tokenizer.ggml.token_type; needed is 1 to 6")
        used = {text: at for at, text in enumerate(self.tokens) if kinds[at] != _UNUSED}
        merges = [tuple(merge.split(" ")) for merge in self.value("tokenizer.ggml.merges", list)]
        for merge in merges:
            known = len(merge) == 2 and {*merge, "".join(merge)} <= used.keys()
            self.require(known, f"merges {' '.join(merge)!r}; needed are two tokens that give one")
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=used, merges=merges))
        steps = [splits[split]] if splits[split] is not None else []
        # GPT-2's own split follows, unless Qwen2's has taken its place.
        steps.append(tokenizers.pre_tokenizers.ByteLevel(False, use_regex=split != "qwen2"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
        if split == "qwen2":
            made.normalizer = tokenizers.normalizers.NFC()
        made.decoder = tokenizers.decoders.ByteLevel()
        for text, kind in zip(self.tokens, kinds, strict=True):
            if kind in (_CONTROL, _USER):
                added = tokenizers.AddedToken(text, special=kind == _CONTROL, normalized=False)
                made.add_tokens([added])
        if bos is not None and self.value("tokenizer.ggml.add_bos_token", bool, False):
            named = self.tokens[bos]
            made.post_processor = tokenizers.processors.TemplateProcessing(
                single=f"{named} $A", special_tokens=[(named, bos)]
            )
        return made
