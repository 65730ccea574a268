"""safetensors written here are read by the safetensors library, and broken ones are named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from repro.models.files.tensor_files import (
    DTYPES,
    CheckpointError,
    TensorFile,
    TensorFolder,
    TensorSpec,
    read_header,
    write_tensors,
)


def example_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    raw = {
        "a.codes": torch.randint(0, 256, (5, 7), generator=generator).to(torch.uint8),
        "b.scale": torch.randn(3, 5, generator=generator).to(torch.float8_e4m3fn),
        "c.global": torch.randn(1, generator=generator),
        "d.weight": torch.randn(9, 3, generator=generator).to(torch.bfloat16),
        "e.empty": torch.zeros(0, 4),
        "f.scalar": torch.tensor(3.5),
        "g.long": torch.arange(3),
    }
    return raw


def write(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    specs = {n: TensorSpec(dtype=t.dtype, shape=tuple(t.shape)) for n, t in tensors.items()}
    return write_tensors(path, specs, tensors.__getitem__)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


def rewrite_header(path: Path, change: Any) -> None:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def test_the_safetensors_library_reads_what_is_written_here(tmp_path):
    tensors = example_tensors()
    write(tmp_path / "x.safetensors", tensors)
    read_back = load_file(tmp_path / "x.safetensors")
    assert read_back.keys() == tensors.keys()
    assert all(same(read_back[name], tensors[name]) for name in tensors)


def test_what_the_safetensors_library_writes_is_read_here(tmp_path):
    tensors = example_tensors()
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "x.safetensors")
    assert set(file.names()) == tensors.keys()
    assert all(same(file.read(name), tensors[name]) for name in tensors)


def test_digest_is_that_of_the_file(tmp_path):
    import hashlib

    path = tmp_path / "x.safetensors"
    assert write(path, example_tensors()) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_failed_write_leaves_nothing(tmp_path):
    specs = {"w": TensorSpec(dtype=torch.float32, shape=(2,))}
    with pytest.raises(ValueError, match="the header says"):
        write_tensors(tmp_path / "x.safetensors", specs, lambda _: torch.zeros(3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 5, 30, -400, -40, -1])
def test_a_file_that_was_cut_is_named(tmp_path, keep):
    path = tmp_path / "x.safetensors"
    write(path, example_tensors() | {f"t{i}": torch.zeros(60) for i in range(3)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"x\.safetensors .*not all of it"):
        read_header(path)


def test_a_file_that_is_cut_after_its_header_was_read_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {"w": torch.zeros(60)})
    file = TensorFile(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="w: file ends after 232 of 240 bytes"):
        file.read("w")


def shape_of(value: Any) -> Any:
    return lambda header: header["d.weight"].update(shape=value)


@pytest.mark.parametrize(
    "change",
    [
        shape_of([9, 4]),
        shape_of([-9, -3]),
        shape_of("9"),
        lambda h: h["d.weight"].update(dtype="F7"),
        lambda h: h["d.weight"].update(dtype="F6_E2M3"),
        lambda h: h["d.weight"].update(dtype=["BF16"]),
        lambda h: h.update({"d.weight": 3}),
        lambda h: h.pop("d.weight"),
        lambda h: h["c.global"].update(data_offsets=[0, 4]),
    ],
)
def test_an_inconsistent_header_is_refused(tmp_path, change):
    path = tmp_path / "x.safetensors"
    write(path, example_tensors())
    rewrite_header(path, change)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(path)


def test_a_dtype_that_is_not_read_is_named_with_its_tensor(tmp_path):
    save_file({"w": torch.zeros(3, dtype=torch.int16)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"x\.safetensors: w has dtype 'I16'"):
        read_header(tmp_path / "x.safetensors")


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_bit_flip_in_the_header_never_crashes_nor_reads_beyond_the_file(
    tmp_path_factory, position, bit
):
    path = tmp_path_factory.getbasetemp() / "flip.safetensors"
    tensors = example_tensors()
    write(path, tensors)
    raw = bytearray(path.read_bytes())
    (size,) = struct.unpack("<Q", raw[:8])
    raw[position % (8 + size)] ^= 1 << bit
    path.write_bytes(raw)
    file, message = None, ""
    try:
        file = TensorFile(path)
    except CheckpointError as error:
        message = str(error)
    if file is None:
        assert "flip.safetensors" in message
        return
    # What gets through changed a name, the metadata, or a dtype and shape of the same size.
    for name in file.names():
        spec = file.spec(name)
        assert tuple(file.read(name).shape) == spec.shape
        assert spec.dtype in DTYPES.values()


def test_index_and_shards_must_agree(tmp_path, make_checkpoint):
    import shutil

    folder = tmp_path / "sharded"
    shutil.copytree(make_checkpoint("qwen2", max_shard_size="60KB"), folder)
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    name, file = next(iter(index["weight_map"].items()))
    other = next(f for f in index["weight_map"].values() if f != file)
    index["weight_map"][name] = other
    index_file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{other}: {name} is missing"):
        TensorFolder(folder)
    index["weight_map"][name] = "../outside.safetensors"
    index_file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="points outside the folder"):
        TensorFolder(folder)
    index["weight_map"][name] = file
    index_file.write_text(json.dumps(index))
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file} is missing"):
        TensorFolder(folder)
    index_file.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        TensorFolder(folder)


def test_pickled_checkpoints_are_refused_with_the_reason(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match="runs whatever code is in it"):
        TensorFolder(tmp_path)
