"""What tests of pictures share: the blessed checks of a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from repro.judge.check import Checked

EXPECTED = Path(__file__).resolve().parent.parent.parent / "expected"


@pytest.fixture(scope="session")
def checks_of(every_blessed: Sequence[Checked]) -> Callable[..., list[Checked]]:
    """Return what gives the blessed checks of targets, of one device where they name one."""

    def of(*names: str, device: str = "nvidia_h200") -> list[Checked]:
        return [
            checked
            for checked in every_blessed
            if checked.selection.target.name in names and checked.evidence.device in ("", device)
        ]

    return of
