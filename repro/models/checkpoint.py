"""Checkpoints on disk: finding, verifying, quantising in a stream, and their adapters.

`write_quantized` turns a 16-bit checkpoint folder into an NVFP4 or MXFP4 one that transformers with
compressed-tensors, vLLM and this project load, or an NF4 one in bitsandbytes' layout. It reads one
tensor and quantises it, and writes a shard when it is full; peak memory is a shard, whatever the
size of the model.

An NVFP4 folder's tensors equal, bit for bit, those that llm-compressor's `NVFP4A16` stores of the
same model in bfloat16 (recipe `bfloat16`, the default; a float32 or float16 file is rounded to
bfloat16 first). Policies trained here are quantised in the recipe `float32`, in which their records
were made; `kernels.reference_quantize` says what the two round.

`qerl_manifest.json`, written beside the shards, records what made the folder (round to nearest, and
the recipe; the released quantiser's output folders say GPTQ and are not: docs/background.md,
row 8) and every file's SHA-256. A flipped bit in a weight is valid safetensors; only the sum tells.
`verify` checks it at each load, where there is a manifest.

Easy mistakes
-------------
* q, k and v may lie in different source shards, and their shared scale depends on all three:
  reading is by name over the whole folder, never shard by shard.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from repro.models.decoder import is_projection
from repro.models.files import stored_layouts
from repro.models.files.gguf_files import converted, made_of
from repro.models.files.tensor_files import (
    CheckpointError,
    TensorFolder,
    read_object,
    write_json,
    write_tensors,
)
from repro.models.loading import (
    SharedScales,
    build_on_meta,
    default_recipe,
    expected_specs,
    open_weights,
    quantize_projection,
    read_description,
    read_rounded,
    require_same_names,
)
from repro.spec.checks import unknown
from repro.spec.facts import Facts
from repro.spec.hub import (
    ANSWER_SECONDS,
    PINNED_BYTES,
    SILENT_SECONDS_OF_WEIGHTS,
    HubError,
    endpoint,
    fetch,
    gguf_copy_of,
    hub_cache,
    hub_digest,
    is_hub_name,
    is_whole,
    resolved_revision,
)
from repro.spec.whole_files import appearing, sha256_of

MANIFEST: Final = "qerl_manifest.json"
MANIFEST_SCHEMA: Final = 1
TINY_FOLDER: Final = Path(__file__).parent / "tiny"
DEFAULT_SHARD_BYTES: Final = 2 * 2**30
# What a hub folder is asked for: weights, configs and tokenizer; no code, no pickles.
_SMALL_PATTERNS: Final = ("*.json", "*.txt", "*.jinja", "*.model")
_HUB_PATTERNS: Final = ("*.safetensors", *_SMALL_PATTERNS)
# What loading a policy reads beside weights: the config, and all that says how text becomes tokens,
# and where a completion ends.
TOKENIZER: Final = (
    "tokenizer.*",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tekken.json",
    "*.model",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
)
_READ: Final = ("config.json", "generation_config.json", *TOKENIZER)
_NOT_COPIED: Final = ("config.json", "model.safetensors.index.json", MANIFEST)


def resolve(checkpoint: str | Path, revision: str = "", *, weights: bool = True) -> Path:
    """Return the local folder of a checkpoint: `tiny`, a folder, or a hub name.

    Of a GGUF file, FILE.gguf or owner/model:FILE.gguf, it is the one made of it (`gguf_files`).

    Parameters
    ----------
    revision
        Branch, tag or commit of a hub name; empty takes its `main`. Of a GGUF file also `sha256:`
        and its digest: a copy made of these bytes serves, wherever the file lay.
    weights
        False fetches config and tokenizer alone, where the hub must be asked.

    Raises
    ------
    CheckpointError
        When it is none of these, or the hub cannot be reached and holds no local copy.
    """
    if checkpoint == "tiny":
        if not (TINY_FOLDER / "config.json").is_file():
            raise CheckpointError(
                f"{TINY_FOLDER} holds no tiny policy; `python -m repro run pretrain-tiny` makes it"
            )
        return TINY_FOLDER
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        return converted(folder)
    name = str(checkpoint)
    if not is_hub_name(name):
        raise CheckpointError(
            f"{name} is neither a folder nor a hub name (owner/model, or owner/model:FILE.gguf), "
            "nor a GGUF file that is here"
        )
    pinned = revision if revision.startswith(PINNED_BYTES) else ""
    if pinned and gguf_copy_of(pinned).is_dir():
        return gguf_copy_of(pinned)
    found = _from_hub(name, "main" if pinned else revision or "main", weights=weights)
    if pinned and (digest := PINNED_BYTES + sha256_of(found)) != pinned:
        raise CheckpointError(f"{name} on the hub is {digest}; {pinned} is needed")
    return converted(found) if found.is_file() else found


def _from_hub(name: str, revision: str, *, weights: bool) -> Path:
    """Return the folder of a hub name in the hub's cache, fetched where it is not whole there.

    Its config is fetched and read before its weights. Of owner/model:FILE.gguf, return the file,
    fetched alone.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    model, _, file = name.partition(":")
    common: dict[str, Any] = {
        "revision": revision,
        "cache_dir": hub_cache(),
        "etag_timeout": ANSWER_SECONDS,
        "endpoint": endpoint(),
    }

    def stored(patterns: Sequence[str], *, local: bool = False) -> Path:
        if file:
            return Path(hf_hub_download(model, file, local_files_only=local, **common))
        wanted = list(patterns)
        return Path(
            snapshot_download(model, allow_patterns=wanted, local_files_only=local, **common)
        )

    here: Path | None = None
    with suppress(LocalEntryNotFoundError):
        folder = stored(_HUB_PATTERNS if weights else _SMALL_PATTERNS, local=True)
        # The client also returns a folder whose download was cut short, or was of one file alone.
        if file or is_whole(folder) or (not weights and (folder / "config.json").is_file()):
            here = folder
        if here is not None and (file or any(folder.glob("*token*"))):
            return here
    watched = hub_cache() / f"models--{model.replace('/', '--')}"
    try:
        if not file:
            folder = fetch(lambda: stored(_SMALL_PATTERNS), watched)
            if not weights:
                return folder
            read_description(folder)  # what is not read here is refused before it is fetched
        folder = fetch(lambda: stored(_HUB_PATTERNS), watched, SILENT_SECONDS_OF_WEIGHTS)
    except HubError as error:
        if here is not None:  # a model without a tokenizer
            return here
        raise CheckpointError(
            f"{name} at revision {revision} is not whole in the local hub cache, and {error}; "
            "or name a local folder with config.json and safetensors, or a GGUF file "
            "(--model FOLDER or FILE)"
        ) from error
    if not file and not is_whole(folder):
        raise CheckpointError(f"{folder} holds no whole model in safetensors, which are needed")
    return folder


def write_quantized(
    source_folder: str | Path,
    out_folder: str | Path,
    weight_format: str = "nvfp4",
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    device: str | torch.device = "cpu",
) -> Path:
    """Quantise a 16-bit checkpoint folder into a new one that transformers loads; return that.

    Parameters
    ----------
    source_folder, out_folder
        The second must not exist; it appears when complete.
    weight_format
        `nvfp4` or `mxfp4`, in compressed-tensors' layout, or `nf4`, in bitsandbytes'.
    max_shard_bytes
        Bytes of tensors a shard; a single larger tensor gets a shard of its own.
    device
        Where matrices are quantised.

    Raises
    ------
    CheckpointError
        When the source is not what it claims, or is quantised already.
    ValueError
        When the format has no layout.
    FileExistsError
        When `out_folder` exists.
    """
    source_path, out = resolve(source_folder), Path(out_folder)
    with appearing(out) as temporary:
        if weight_format not in stored_layouts.LAYOUTS:
            raise ValueError(unknown("stored format", list(stored_layouts.LAYOUTS), weight_format))
        verify(source_path)
        description = read_description(source_path)
        stored, config = description.stored_format, description.config
        if stored is not None:
            raise CheckpointError(f"{source_path} is quantised already, to {stored}")
        model, source = build_on_meta(config), open_weights(source_path, config)
        require_same_names(model, source, None)
        scales = SharedScales(source, default_recipe(source_path, weight_format))
        tensors = _quantised(source, model, scales, weight_format, torch.device(device))
        made = {
            "algorithm": "rtn",  # round to nearest, no data
            "recipe": scales.recipe,
            "format": weight_format,
            "layout": stored_layouts.LAYOUTS[weight_format],
            "linears": sum(is_projection(name) for name, _ in model.named_modules()),
            **_origin(source_path.absolute()),
            "source_sha256": digest_of_files([source_path / "config.json", *source.files()]),
        }
        quantization = stored_layouts.quantization_config(weight_format)
        write_folder(source_path, temporary, tensors, quantization, made, max_shard_bytes)
    return out


def _origin(source: Path) -> dict[str, str | None]:
    """Return the hub's name and commit of a snapshot; else the file's or the folder's name."""
    commit, home = resolved_revision(source), source.parent.parent.name
    if commit is None or not home.startswith("models--"):
        return {"source": made_of(source).get("gguf", {}).get("gguf", source.name)}
    name = home.removeprefix("models--").replace("--", "/", 1)
    return {"source": name, "revision": commit}


def _quantised(
    source: TensorFolder,
    model: torch.nn.Module,
    scales: SharedScales,
    weight_format: str,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the output, one projection at a time."""
    for name, spec in expected_specs(model, None).items():
        projection, _, leaf = name.rpartition(".")
        value = read_rounded(source, name, spec.shape)
        if leaf == "weight" and is_projection(projection):
            weight = quantize_projection(value.to(device), projection, weight_format, scales)
            yield from stored_layouts.packed_tensors(projection, weight).items()
        else:
            yield name, value


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int = DEFAULT_SHARD_BYTES
) -> dict[str, str]:
    """Write shards as they fill, and their index; return `{file: SHA-256}` in order."""
    digests: list[str] = []
    places: dict[str, int] = {}
    total, group = 0, dict[str, Tensor]()

    def flush() -> None:
        digests.append(write_tensors(folder / f"shard-{len(digests)}", group))
        group.clear()

    for name, tensor in tensors:
        if group and sum(held.nbytes for held in group.values()) + tensor.nbytes > max_bytes:
            flush()
        group[name], places[name] = tensor, len(digests)
        total += tensor.nbytes
    flush()
    files = ["model.safetensors"]
    if len(digests) > 1:
        count = len(digests)
        files = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        weight_map = {name: files[place] for name, place in places.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    for number, file in enumerate(files):
        (folder / f"shard-{number}").rename(folder / file)
    return dict(zip(files, digests, strict=True))


def copy_files(source: Path, target: Path, patterns: Iterable[str] = _SMALL_PATTERNS) -> None:
    """Copy small files, such as `TOKENIZER`'s; not the config nor anything about the weights."""
    for path in sorted(path for pattern in patterns for path in source.glob(pattern)):
        if path.is_file() and path.name not in _NOT_COPIED:
            place = target / path.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)


def write_folder(
    source: Path,
    target: Path,
    tensors: Iterable[tuple[str, Tensor]],
    quantization: dict[str, Any] | None,
    made: dict[str, Any],
    max_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a new folder: shards, config and small files as its source's, and its manifest.

    `quantization` is the config's `quantization_config`; None for 16 bits.
    """
    target.mkdir()
    copy_files(source, target)
    shards = write_shards(target, tensors, max_bytes)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for key in ("torch_dtype", "quantization_config"):
        config.pop(key, None)
    config["dtype"] = "bfloat16"
    if quantization is not None:
        config["quantization_config"] = quantization
    write_json(target / "config.json", config)
    sums = {"config.json": sha256_of(target / "config.json"), **shards}
    write_json(target / MANIFEST, {"schema": MANIFEST_SCHEMA, **made, "sha256": sums})


def verify(folder: Path) -> str | None:
    """Compare files with the manifest's sums; return the sums' digest, None without a manifest."""
    expected = _manifest_sums(folder)
    if expected is None:
        return None
    for name in expected:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing; {MANIFEST} lists it")
    computed = _sums(folder, expected)
    for name, value in expected.items():
        if computed[name] != value:
            raise CheckpointError(
                f"{folder / name} has SHA-256 {computed[name]}; {MANIFEST} says {value}: its bytes "
                "changed since it was written"
            )
    return hashlib.sha256(json.dumps(expected, sort_keys=True).encode()).hexdigest()


def _manifest_sums(folder: Path) -> dict[str, str] | None:
    """Return the sums that a folder's manifest lists, by file; None without a manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    sums = read_object(path).get("sha256")
    if not isinstance(sums, dict):
        raise CheckpointError(f"{path} is not a manifest: sha256 is {sums!r}; needed is an object")
    return {str(name): str(value) for name, value in sums.items()}


def _sums(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return the SHA-256 of files by their names in a folder."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(names, pool.map(sha256_of, (folder / n for n in names)), strict=True))


def digests_of_read(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that loading a policy reads, by its name in the folder.

    Sums of a manifest, which `verify` compares with the files, are not formed again.
    """
    found = (path for pattern in _READ for path in folder.glob(pattern) if path.is_file())
    names = {path.relative_to(folder).as_posix() for path in found}
    names.update(path.name for path in TensorFolder(folder).files())
    listed = _manifest_sums(folder) or {}
    sums = listed | _sums(folder, names - listed.keys())
    for name in names:
        if hub_digest(folder / name) not in (None, sums[name]):
            raise CheckpointError(
                f"{folder / name} has SHA-256 {sums[name]}; the hub names it "
                f"{hub_digest(folder / name)}: its bytes changed; remove "
                f"{(folder / name).resolve()} and start again"
            )
    return {name: sums[name] for name in sorted(names)}


def weights_digest(facts: Facts) -> str:
    """Return the digest of a checkpoint's weights, by the facts of having loaded it."""
    return str(facts["checkpoint_sha256"] or _digest(facts["checkpoint_files"], weights=True))


def checkpoint_inputs(facts: Facts) -> dict[str, str]:
    """Return a record's digests of a checkpoint, by the facts of having loaded it.

    They are of its weights, of what else was read, such as its template, and of the GGUF file that
    it was made of, where there is one.
    """
    inputs = {
        "checkpoint": weights_digest(facts),
        "checkpoint_files": _digest(facts["checkpoint_files"], weights=False),
    }
    return inputs | ({"gguf": facts["gguf"]["gguf_sha256"]} if "gguf" in facts else {})


def _digest(sums: Mapping[str, str], *, weights: bool) -> str:
    """Return `digest_of_files` of files, weights or all others, whose own SHA-256 are known."""
    names = sorted(name for name in sums if name.endswith(".safetensors") == weights)
    return _digest_of((name, sums[name]) for name in names)


def digest_of_files(paths: list[Path]) -> str:
    """Return one SHA-256 hex digest over the names and contents of files, in the order given."""
    return _digest_of((path.name, sha256_of(path)) for path in paths)


def _digest_of(sums: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"{name} {own}\n" for name, own in sums).encode()).hexdigest()
