"""Names of the policies pre-trained here: where each lies, and what is said when it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.models.checkpoint import resolve
from repro.models.proxy_names import is_proxy_name, proxy_folder, size_of
from repro.models.tensor_files import CheckpointError
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
