"""A module written for one test, where processes that the test starts can import it, too."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


def planted(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Write a module into a new folder `code` of `folder`, which goes on the path; return it."""
    code = folder / "code"
    code.mkdir()
    (code / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(code))
    sys.modules.pop(name, None)
    return importlib.import_module(name)
