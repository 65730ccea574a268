"""Which process runs a file's tests, where several do; apart, so that it needs no torch."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let the tests of an `xdist_group` run in one process each, all others as processes get free.

    pytest-xdist (3.8) does that itself by a suffix of the tests' names, which pytest 9.2 drops.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class GroupsOfFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group_of_file(config.rootpath / nodeid.split("::")[0]) or nodeid

    return GroupsOfFiles(config, log)


@functools.cache
def _group_of_file(path: Path) -> str | None:
    """Return the `xdist_group` that a whole file is of, or None."""
    match = re.search(r'mark\.xdist_group\("([^"]+)"\)', path.read_text(encoding="utf-8"))
    return match[1] if match else None
