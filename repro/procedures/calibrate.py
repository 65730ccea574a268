"""Calibrated NVFP4: AWQ by llm-compressor, in an environment of its own.

    nox -s quantize -- --calibrate SOURCE OUT --data open-thoughts/OpenThoughts-114k

runs this module with that environment's Python: llm-compressor needs other versions of transformers
and compressed-tensors than the suite, and is no dependency of it. AWQ (arXiv 2306.00978) searches
for each group of projections with one input a factor per channel that makes the rounding of the
weights hurt the outputs least on texts, and moves it into the norm, or the projection, before. What
is then rounded to nearest is NVFP4A16, stored as `repro.models.files.compressed_tensors` reads it;
norms and biases are 16 bits and differ from the source's.

The paper's checkpoints: 256 sequences of 2048 tokens of OpenThoughts-114k (docs/paper_and_code.md,
row 8), which are the defaults here. Texts come from a hub data set or a local file (JSON lines,
JSON or Parquet); a row is `text`, or `messages` or `conversations`, which go through the
checkpoint's chat template. Rows are shuffled by the seed, encoded, and cut at the length; shorter
ones are used as they are.

Easy mistakes
-------------
* A folder made so is not a function of the weights alone: the manifest names data, seed, sizes and
  versions, and `algorithm` is `awq`.
* llm-compressor's model in memory simulates quantisation; what counts is the folder, so it is
  checked by this project's own reader before it gets its name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader

from repro.data.public import rows_of
from repro.models.checkpoint import (
    copy_companions,
    resolve,
    sha256_of,
    source_digest,
    verify,
    write_manifest,
)
from repro.models.decoder import projection_names
from repro.models.files.stored_layouts import read_packed
from repro.models.files.tensor_files import CheckpointError, TensorFolder
from repro.models.loading import build_on_meta, read_description, require_same_names
from repro.spec.whole_files import appearing

# arXiv 2510.11696: AWQ on 256 sequences of 2048 tokens of OpenThoughts-114k.
SAMPLES: Final = 256
TOKENS: Final = 2048
DATA: Final = "open-thoughts/OpenThoughts-114k"
PACKAGES: Final = ("llmcompressor", "compressed-tensors", "transformers", "torch")


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate as the command line says; return 0, or 2 with a sentence."""
    parser = argparse.ArgumentParser(prog="nox -s quantize -- --calibrate")
    parser.add_argument("source", help="16-bit checkpoint: a folder or a hub name")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--data", default=DATA, help=f"hub data set or file (default: {DATA})")
    parser.add_argument("--samples", type=_positive, default=SAMPLES)
    parser.add_argument("--tokens", type=_positive, default=TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    try:
        linears = calibrate(
            args.source,
            args.out,
            data=args.data,
            samples=args.samples,
            tokens=args.tokens,
            seed=args.seed,
        )
    except (CheckpointError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{args.out}: {linears} projections in NVFP4, calibrated by AWQ\n")
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; it must be 1 or more")
    return value


def calibrate(
    source: str | Path, out: str | Path, *, data: str, samples: int, tokens: int, seed: int
) -> int:
    """Write a calibrated NVFP4 folder and return how many projections are quantised.

    Parameters
    ----------
    source, out
        A 16-bit checkpoint; a folder that must not exist, and appears when complete.
    data
        Hub data set, or file.
    samples, tokens
        Sequences, and tokens at which each is cut.
    seed
        Of the choice of rows.

    Raises
    ------
    CheckpointError
        When the source is quantised or damaged, or what was written cannot be read as stored.
    ValueError
        When the data hold too few rows, or rows without a text.
    FileExistsError
        When `out` exists.
    """
    folder, target = resolve(source), Path(out)
    with appearing(target) as temporary:
        verify(folder)
        if read_description(folder).stored_format is not None:
            raise CheckpointError(
                f"{folder} is quantised already; calibration needs the 16-bit folder"
            )
        token_ids = encoded(folder, data, samples, tokens, seed)
        _compress(folder, temporary, token_ids, seed)
        copy_companions(folder, temporary)
        linears = require_readable(temporary)
        said = {
            "data": data,
            "token_ids_sha256": hashlib.sha256(json.dumps(token_ids).encode()).hexdigest(),
            "samples": len(token_ids),
            "tokens": tokens,
            "seed": seed,
            "versions": {name: version(name) for name in PACKAGES},
        }
        for path in temporary.iterdir():
            path.chmod(0o644)  # transformers writes shards for their owner alone
        shards = {path.name: sha256_of(path) for path in sorted(temporary.glob("*.safetensors"))}
        write_manifest(
            temporary,
            shards,
            linears,
            source_digest(folder),
            "nvfp4",
            "bfloat16",
            calibration=said,
        )
    return linears


def encoded(folder: Path, data: str, samples: int, tokens: int, seed: int) -> list[list[int]]:
    """Return the token ids of `samples` rows of the data, each cut at `tokens`.

    Raises
    ------
    ValueError
        When there are fewer rows, or a row has no text.
    """
    from transformers import AutoTokenizer

    rows = rows_of(data)
    if len(rows) < samples:
        raise ValueError(f"{data} has {len(rows)} rows; {samples} are asked for")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    chosen = random.Random(seed).sample(range(len(rows)), samples)
    texts = [text_of(rows[index], tokenizer, data) for index in chosen]
    return [tokenizer(text)["input_ids"][:tokens] for text in texts]


def text_of(row: dict[str, Any], tokenizer: Any, data: str) -> str:
    """Return a row's text: as it is, or its conversation in the chat template.

    Raises
    ------
    ValueError
        When the row has neither.
    """
    if isinstance(row.get("text"), str) and row["text"]:
        return str(row["text"])
    turns = row.get("messages") or row.get("conversations")
    if not turns:
        raise ValueError(f"{data}: a row has neither text, messages nor conversations: {list(row)}")
    roles = {"human": "user", "gpt": "assistant"}
    messages = [
        {
            "role": roles.get(turn.get("role") or turn["from"], turn.get("role") or turn["from"]),
            "content": turn.get("content") or turn["value"],
        }
        for turn in turns
    ]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def _compress(folder: Path, out: Path, token_ids: list[list[int]], seed: int) -> None:
    """Search, round and write the tensors and the config, by llm-compressor."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True
    )
    batches = [{"input_ids": torch.tensor([ids])} for ids in token_ids]
    with _no_pinning_without_accelerator():
        oneshot(
            model=model,
            # Batches of one row, as they are.
            dataset=DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
            recipe=[
                AWQModifier(),
                QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"]),
            ],
            num_calibration_samples=len(token_ids),
        )
    model.save_pretrained(out, save_compressed=True, max_shard_size="4GB")


@contextmanager
def _no_pinning_without_accelerator() -> Iterator[None]:
    """Let llm-compressor 0.14 run on a CPU: it pins memory there too, which PyTorch refuses."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available():
        yield
        return
    with patch.object(IntermediatesCache, "pin_memory", lambda *_: None):
        yield


def require_readable(folder: Path) -> int:
    """Read every projection of an NVFP4 folder as stored; return how many there are.

    Raises
    ------
    CheckpointError
        When the folder is not one that `load_policy` takes.
    """
    description = read_description(folder)
    if description.stored_format != "nvfp4":
        raise CheckpointError(f"{folder} stores {description.stored_format}; needed is nvfp4")
    model, source = build_on_meta(description.config), TensorFolder(folder)
    require_same_names(model, source, "nvfp4")
    names = projection_names(description.config.num_hidden_layers)
    for name in names:
        linear: Any = model.get_submodule(name)
        read_packed(source, name, (linear.out_features, linear.in_features), "nvfp4")
    return len(names)


if __name__ == "__main__":
    sys.exit(main())
