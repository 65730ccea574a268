"""A clock for steps that run on a CPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch


class HostEvent:
    """A device event's stand-in that reads the host's clock."""

    def __init__(self, **settings: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Take the time."""
        self.at = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        """Return milliseconds."""
        return (later.at - self.at) * 1e3


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
