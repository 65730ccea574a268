"""safetensors files read and written, with errors that name file and tensor.

The library reads headers, and holds every bound against the file's size. One tensor is read at a
time, so a 32B checkpoint passes through a process of a few GB.

Easy mistakes
-------------
* A flipped bit in the *header* usually breaks JSON or a bound, but one in the data changes a weight
  without a trace; `repro.models.checkpoint` keeps SHA-256 sums for that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from repro.spec.settings import json_once
from repro.spec.whole_files import replace_files, replace_text, sha256_of

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """A checkpoint file that cannot be what it claims; names the file and the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Dtype and shape of a tensor, known before its values are."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    path: Path
    spec: TensorSpec
    stored: str  # its name in the file


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    replace_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """Return the values of a checkpoint's JSON file; `CheckpointError` where it is no object."""
    try:
        values = json_once(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} cannot be read: it holds a {type(values).__name__}; needed is an object"
        )
    return values


class TensorFile:
    """The tensors of one safetensors file; damaged ones raise `CheckpointError`."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        self._root = path
        self._entries = read_header(path)

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._entries.keys()

    def spec(self, name: str) -> TensorSpec:
        """Return a tensor's dtype and shape without reading its values."""
        return self._entry(name).spec

    def where(self, name: str) -> str:
        """Return `file: tensor`, for error messages."""
        entry = self._entries.get(name)
        return f"{entry.path if entry else self._root}: {name}"

    def files(self) -> list[Path]:
        """Return the files that hold tensors, sorted."""
        return sorted({entry.path for entry in self._entries.values()})

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU, freshly read."""
        try:
            with safe_open(self._entry(name).path, "pt") as file:
                # The library's tensor is a view of the file, which may change.
                tensor: Tensor = file.get_tensor(self._entry(name).stored).clone()
        except SafetensorError as error:
            raise CheckpointError(f"{self.where(name)} cannot be read: {error}") from error
        return tensor

    def share(self, name: str, kept: str) -> None:
        """Let a tensor that is not there be the one called `kept`, if that is there."""
        if name not in self._entries and kept in self._entries:
            self._entries[name] = self._entries[kept]

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"{self._root}: {name} is missing") from None


class SourceAround(TensorFile):
    """Another's tensors, of the same names, dtypes and shapes; `read` changes values."""

    def __init__(self, source: TensorFile) -> None:
        self._root, self._entries, self._source = source._root, source._entries, source


class TensorFolder(TensorFile):
    """The tensors of a checkpoint folder, from one file or from shards with an index.

    The folder holds `model.safetensors`, or `model.safetensors.index.json` and its shards.

    Raises `CheckpointError` when a file is missing, truncated or inconsistent, or the index and the
    shards disagree. Pickled checkpoints (`.bin`, `.pt`, `.pth`) are refused: loading one runs its
    code.
    """

    def __init__(self, folder: Path) -> None:
        self._root = folder
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        self._entries: dict[str, _Entry] = {}
        # As transformers, which leaves the index of an earlier, sharded save beside a single file.
        if single.is_file():
            self._entries = read_header(single)
        elif index.is_file():
            self._read_index(index)
        else:
            pickled = sorted(
                p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth"}
            )
            if pickled:
                raise CheckpointError(
                    f"{folder / pickled[0]} is a pickled checkpoint, and loading one runs whatever "
                    "code is in it; convert it to safetensors first"
                )
            raise CheckpointError(
                f"{folder} holds neither model.safetensors nor model.safetensors.index.json"
            )

    def _read_index(self, index: Path) -> None:
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} is not a safetensors index: it has no weight_map")
        by_file: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            by_file.setdefault(str(file), []).append(name)
        for file, names in by_file.items():
            path = self._root / file
            if path.parent != self._root:
                raise CheckpointError(f"{index}: {names[0]} points outside the folder, to {file}")
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; {index.name} places {names[0]} there")
            header = read_header(path)
            for name in names:
                if name not in header:
                    raise CheckpointError(
                        f"{path}: {name} is missing; {index.name} says it is there"
                    )
                self._entries[name] = header[name]


def read_header(path: Path) -> dict[str, _Entry]:
    """Return the entries of a safetensors file, which the library holds against the file's size.

    Its `save_model` stores one of the tensors that share memory; the metadata name the others.
    """
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            stored = {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}
            shared = file.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not safetensors, or not all of it: {error}") from error
    entries = {}
    for name, (dtype, shape) in stored.items():
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: {name} has dtype {dtype!r}; known are {', '.join(DTYPES)}"
            )
        spec = TensorSpec(dtype=DTYPES[dtype], shape=tuple(shape))
        entries[name] = _Entry(path=path, spec=spec, stored=name)
    left_out = {
        n: entries[kept] for n, kept in shared.items() if n not in entries and kept in stored
    }
    return entries | left_out


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file and return its SHA-256 hex digest.

    The file appears under its name only when complete. The library writes it from the tensors'
    memory, so that no second copy of a shard is made.
    """
    own = {name: _own(tensor) for name, tensor in tensors.items()}
    replace_files({path: lambda place: save_file(own, place, metadata={"format": "pt"})})
    return sha256_of(path)


def _own(tensor: Tensor) -> Tensor:
    """Return a tensor as the library takes it: on the CPU, and alone in its storage."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
