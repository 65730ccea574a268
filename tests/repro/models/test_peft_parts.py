"""peft without the libraries of other layers: hidden while it is imported, and no longer."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from repro.models.peft_parts import _hidden

# Of the standard library, imported by nothing that tests import.
PACKAGE = "wave"


def test_a_hidden_package_looks_as_if_it_were_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    with _hidden((PACKAGE, "json")):
        assert importlib.util.find_spec(PACKAGE) is None
        with pytest.raises(ImportError):
            importlib.import_module(PACKAGE)
        # What is there already stays.
        assert importlib.import_module("json").loads("1") == 1
    assert importlib.import_module(PACKAGE).open is not None
