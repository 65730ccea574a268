"""Checks of one device's blessed records, read once, and as if made on another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from repro.evidence.record import Record
from repro.judge.blessed import blessed_checks
from repro.judge.check import Checked, device_name
from repro.run.places import expected_folder
from repro.spec.tier import Tier

DEVICE, OTHER = "nvidia_h200", "NVIDIA H100"


@pytest.fixture(scope="session")
def every_blessed() -> list[Checked]:
    """Return the checks of all blessed records."""
    return blessed_checks(expected_folder(None))


@pytest.fixture(scope="session")
def blessed(every_blessed: list[Checked]) -> list[Checked]:
    """Return the checks of the blessed records of one device, and of those that name none."""
    return [item for item in every_blessed if device_name(item.evidence) in (None, DEVICE)]


@pytest.fixture(scope="session")
def blessed_of(blessed: list[Checked]) -> Callable[[str, Tier], Checked]:
    """Return the blessed check of a target at a tier, by their names."""

    def of(name: str, tier: Tier = Tier.SYSTEMS) -> Checked:
        (checked,) = (
            item
            for item in blessed
            if (item.selection.target.name, item.selection.tier) == (name, tier)
        )
        return checked

    return of


def _moved(record: Record, values: Callable[[float], float]) -> Record:
    metrics = {
        name: dataclasses.replace(item, value=values(item.value))
        for name, item in record.metrics.items()
    }
    environment = record.environment | {"gpu": [{"name": OTHER}]}
    return dataclasses.replace(record, metrics=metrics, environment=environment)


@pytest.fixture(scope="session")
def on_other_device() -> Callable[..., Checked]:
    """Return what makes up the check of another device: its name on every record.

    Its values are `values` of the first device's, verdicts are the same unless given.
    """

    def moved(checked: Checked, values: Callable[[float], float] = lambda value: value) -> Checked:
        records = {
            arm: {seed: _moved(record, values) for seed, record in by_seed.items()}
            for arm, by_seed in checked.evidence.records.items()
        }
        evidence = dataclasses.replace(checked.evidence, records=records)
        return dataclasses.replace(checked, evidence=evidence)

    return moved
