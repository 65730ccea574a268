"""safetensors written here are read by the safetensors library, and broken ones are named."""

import hashlib
import json
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from repro.measure.device_state import host_peak_bytes, reset_peak
from repro.models.files.tensor_files import (
    CheckpointError,
    TensorFile,
    TensorFolder,
    read_header,
    write_tensors,
)


def example_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a.codes": torch.randint(0, 256, (5, 7), generator=generator).to(torch.uint8),
        "b.scale": torch.randn(3, 5, generator=generator).to(torch.float8_e4m3fn),
        "c.global": torch.randn(1, generator=generator),
        "d.weight": torch.randn(9, 3, generator=generator).to(torch.bfloat16),
        "e.empty": torch.zeros(0, 4),
        "f.scalar": torch.tensor(3.5),
        "g.long": torch.arange(3),
    }


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


def test_tensors_come_back_by_the_library_and_here_and_the_digest_is_the_files(tmp_path):
    tensors, path = example_tensors(), tmp_path / "x.safetensors"
    # A view takes no more of a file than its own values.
    tensors["h.view"] = torch.arange(1000.0).view(10, 100)[:, 7]
    assert write_tensors(path, tensors) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.stat().st_size < 2000
    again, file = load_file(path), TensorFile(path)
    assert again.keys() == set(file.names()) == tensors.keys()
    for name, tensor in tensors.items():
        assert same(again[name], tensor)
        assert same(file.read(name), tensor)
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def _host_bytes_of_writing(path, nbytes):
    tensors = {f"t{i}": torch.ones(nbytes // 4, dtype=torch.uint8) for i in range(4)}
    reset_peak()
    before = host_peak_bytes()
    write_tensors(path, tensors)
    return host_peak_bytes() - before


def test_writing_a_shard_takes_no_second_copy_of_it(tmp_path):
    nbytes = 80_000_000
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        taken = pool.submit(_host_bytes_of_writing, tmp_path / "x.safetensors", nbytes).result()
    assert taken < nbytes / 2


@pytest.mark.parametrize("keep", [0, 5, 30, -400, -40, -1])
def test_a_file_that_was_cut_is_named(tmp_path, keep):
    path = tmp_path / "x.safetensors"
    write_tensors(path, example_tensors() | {f"t{i}": torch.zeros(60) for i in range(3)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(path)


def test_a_dtype_that_is_not_read_is_named_with_its_tensor(tmp_path):
    save_file({"w": torch.zeros(3, dtype=torch.int16)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"x\.safetensors: w has dtype 'I16'"):
        read_header(tmp_path / "x.safetensors")


def test_index_and_shards_must_agree(tmp_path, make_checkpoint):
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
    with pytest.raises(CheckpointError, match="outside"):
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
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        TensorFolder(tmp_path)
