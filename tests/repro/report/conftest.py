"""Checks of the blessed records, read once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from repro.judge.check import Checked
from repro.spec.tier import Tier

DEVICE = "nvidia_h200"


@pytest.fixture(scope="session")
def blessed(every_blessed: list[Checked]) -> list[Checked]:
    """Return the checks of the blessed records of one device, and of those that name none."""
    return [item for item in every_blessed if item.evidence.device in ("", DEVICE)]


@pytest.fixture(scope="session")
def blessed_of(every_blessed: list[Checked]) -> Callable[..., Checked]:
    """Return the blessed check of a target at a tier and, of several devices, on one of them."""

    def of(name: str, tier: Tier = Tier.SYSTEMS, device: str = DEVICE) -> Checked:
        (checked,) = (
            item
            for item in every_blessed
            if (item.selection.target.name, item.selection.tier) == (name, tier)
            and item.evidence.device in ("", device)
        )
        return checked

    return of
