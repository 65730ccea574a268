"""Names of the policies pre-trained here: where each lies, and what is said when it is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from repro.models.checkpoint import resolve
from repro.models.proxy_names import is_proxy_name, proxy_folder, seeded, size_and_seed, size_of
from repro.models.tensor_files import CheckpointError
from repro.spec.shapes import shape_by_name
from repro.spec.tier import policies_folder


def test_a_policy_lies_in_the_named_folder_else_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("REPRO_POLICIES", str(tmp_path))
    assert proxy_folder("proxy-30m") == tmp_path / "proxy-30m"
    monkeypatch.delenv("REPRO_POLICIES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert policies_folder() == tmp_path / "cache" / "qerl-repro" / "policies"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert policies_folder() == Path.home() / ".cache" / "qerl-repro" / "policies"


def test_names_are_told_from_folders_and_hub_names():
    assert size_of("proxy-120m-nvfp4") == "120m"
    assert size_of("proxy-30m-early-nvfp4") == "30m-early"
    for name in ("proxy-30", "proxy-30m-", "proxy-30m/x", "./proxy-30m", "proxy-30m-awq"):
        assert not is_proxy_name(name)
    with pytest.raises(ValueError, match="names no policy"):
        proxy_folder("proxy-9b")


def test_a_missing_policy_is_said_with_the_command_that_makes_it(monkeypatch, tmp_path):
    monkeypatch.setenv("REPRO_POLICIES", str(tmp_path))
    with pytest.raises(CheckpointError, match="run pretrain-proxy --size 30m` makes it"):
        resolve("proxy-30m-nvfp4")
    (tmp_path / "proxy-30m-nvfp4").mkdir()
    (tmp_path / "proxy-30m-nvfp4" / "config.json").write_text("{}")
    assert resolve("proxy-30m-nvfp4") == tmp_path / "proxy-30m-nvfp4"


def test_a_pre_training_seed_stands_in_the_name_but_for_seed_0(monkeypatch, tmp_path):
    assert seeded("proxy-30m", 0) == "proxy-30m"
    assert seeded("proxy-30m-needle4", 2) == "proxy-30m-needle4-seed2"
    assert size_of("proxy-30m-needle4-seed12-nf4") == "30m-needle4-seed12"
    assert size_and_seed("30m-needle4-seed12") == ("30m-needle4", 12)
    assert size_and_seed("120m") == ("120m", 0)
    # One policy has one name.
    for name in ("proxy-30m-seed0", "proxy-30m-seed01", "proxy-30m-nf4-seed1", "proxy-30m-seed"):
        assert not is_proxy_name(name)
    for size in ("30m-seed0", "31m", "30m-seed1-nf4"):
        with pytest.raises(ValueError, match=f"--size {size}: there is 30m, 30m-early"):
            size_and_seed(size)
    monkeypatch.setenv("REPRO_POLICIES", str(tmp_path))
    with pytest.raises(CheckpointError, match="pretrain-proxy --size 30m-needle4-seed2` makes it"):
        resolve("proxy-30m-needle4-seed2-nvfp4")


def test_a_policy_of_another_seed_has_the_shape_of_seed_0():
    shape = shape_by_name("proxy-120m-seed3")
    assert shape is not None
    assert shape.name == "proxy-120m-seed3"
    assert dataclasses.replace(shape, name="proxy-120m") == shape_by_name("proxy-120m")
    assert shape_by_name("proxy-120m-seed3-nvfp4") == shape
