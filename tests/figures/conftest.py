"""What tests of pictures share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from matplotlib.transforms import Bbox


@pytest.fixture(autouse=True)
def sources_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let made-up records be of no source: to look at every source file for each is most of them.

    Pictures show the commit alone.
    """
    monkeypatch.setattr("repro.evidence.record.source_states", list)


@pytest.fixture
def overlap() -> Callable[[Bbox, Bbox], bool]:
    """Return what tells whether two boxes share more than an edge."""

    def shared(one: Bbox, other: Bbox) -> bool:
        width = min(one.x1, other.x1) - max(one.x0, other.x0)
        return bool(width > 1 and min(one.y1, other.y1) - max(one.y0, other.y0) > 1)

    return shared
