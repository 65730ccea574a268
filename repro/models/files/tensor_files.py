"""safetensors files read and written one tensor at a time, with errors that name file and tensor.

A safetensors file is 8 bytes (little-endian header size), a JSON header (`name -> dtype, shape,
[begin, end)` relative to the end of the header), then the tensors' bytes without gaps. The library
reads headers, and holds every bound against the file's size. Reading and writing tensors here
rather than through a memory map buys three things:

* memory: one tensor's bytes at a time, so a 32B checkpoint passes through a process of a few GB
  (mapped pages count as resident, and a map of the whole file grows to its size);
* order: a header needs dtypes and shapes only, so a shard is written before its tensors exist;
* errors: a file that is cut while it is mapped ends the process without a word.

Easy mistakes
-------------
* A flipped bit in the *header* usually breaks JSON or a bound, but one in the data changes a weight
  without a trace; `repro.models.checkpoint` keeps SHA-256 sums for that.
* Tensors are laid out by falling element size, so each starts at a multiple of its own; a file that
  mixes 1-byte codes and 4-byte scales in order of name would not.
* A file must appear whole or not at all: written under a temporary name, then renamed.

Source: the format's description in the safetensors project's README.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from repro.spec.whole_files import replace_text

DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
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
)
_NAMES: Final = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


class CheckpointError(ValueError):
    """A checkpoint file that cannot be what it claims; names the file and the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Dtype and shape of a tensor, known before its values are.

    Attributes
    ----------
    dtype, shape
        As in PyTorch.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    path: Path
    spec: TensorSpec
    begin: int  # from the start of the file


class WeightSource(Protocol):
    """Where a model's tensors come from, by name."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""

    def spec(self, name: str) -> TensorSpec:
        """Return a tensor's dtype and shape without reading its values."""

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU, freshly read."""

    def where(self, name: str) -> str:
        """Return `file: tensor`, for error messages."""


class SourceAround(WeightSource):
    """Another source's tensors, of the same names, dtypes and shapes; `read` changes their values.

    Parameters
    ----------
    source
        The tensors as they are stored.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._source.names()

    def spec(self, name: str) -> TensorSpec:
        """Return a tensor's dtype and shape without reading its values."""
        return self._source.spec(name)

    def where(self, name: str) -> str:
        """Return `file: tensor`, for error messages."""
        return self._source.where(name)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    replace_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file of a checkpoint.

    Raises
    ------
    CheckpointError
        When it is not JSON, is nested too deeply, or is no object.
    """
    try:
        values = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} cannot be read: it holds a {type(values).__name__}; needed is an object"
        )
    return values


class TensorFile:
    """The tensors of one safetensors file.

    Raises
    ------
    CheckpointError
        When it is missing, truncated or inconsistent.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        self._root = path
        self._entries = read_header(path)

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._entries.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

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
        entry = self._entry(name)
        spec = entry.spec
        raw = torch.empty(spec.nbytes, dtype=torch.uint8)
        if spec.nbytes:
            with entry.path.open("rb", buffering=0) as file:
                file.seek(entry.begin)
                view = memoryview(raw.numpy().data)
                filled = 0
                while filled < spec.nbytes:
                    count = file.readinto(view[filled:])
                    if not count:
                        raise CheckpointError(
                            f"{self.where(name)}: file ends after {filled} of {spec.nbytes} bytes"
                        )
                    filled += count
        return raw.view(spec.dtype).reshape(spec.shape)

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"{self._root}: {name} is missing") from None


class TensorFolder(TensorFile):
    """The tensors of a checkpoint folder, from one file or from shards with an index.

    Parameters
    ----------
    folder
        Holds `model.safetensors`, or `model.safetensors.index.json` and its shards.

    Raises
    ------
    CheckpointError
        When a file is missing, truncated or inconsistent, or the index and the shards disagree.
        Pickled checkpoints (`.bin`, `.pt`, `.pth`) are refused: loading one runs its code.
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
    """Return the entries of a safetensors file, which the library holds against the file's size."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            stored = {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not safetensors, or not all of it: {error}") from error
    specs = {}
    for name, (dtype, shape) in stored.items():
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: {name} has dtype {dtype!r}; known are {', '.join(DTYPES)}"
            )
        specs[name] = TensorSpec(dtype=DTYPES[dtype], shape=tuple(shape))
    # The tensors lie one after the other, to the end.
    begin = path.stat().st_size - sum(spec.nbytes for spec in specs.values())
    entries = {}
    for name, spec in specs.items():
        entries[name] = _Entry(path=path, spec=spec, begin=begin)
        begin += spec.nbytes
    return entries


def write_tensors(
    path: Path, specs: Mapping[str, TensorSpec], make: Callable[[str], Tensor]
) -> str:
    """Write a safetensors file tensor by tensor and return its SHA-256 hex digest.

    The file appears under its name only when complete. `make` is called once per name, in the order
    of the file; what it returns must fit the spec.

    Raises
    ------
    ValueError
        When a tensor does not fit its spec.
    """
    order = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        spec = specs[name]
        end = offset + spec.nbytes
        header[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for chunk in (struct.pack("<Q", len(text)), text):
                file.write(chunk)
                digest.update(chunk)
            for name in order:
                tensor = make(name).detach().to("cpu").contiguous()
                own_spec = TensorSpec(dtype=tensor.dtype, shape=tuple(tensor.shape))
                if own_spec != specs[name]:
                    raise ValueError(f"{path}: {name} is {own_spec}; the header says {specs[name]}")
                data = tensor.reshape(-1).view(torch.uint8).numpy().data
                file.write(data)
                digest.update(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return digest.hexdigest()
