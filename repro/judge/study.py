"""A study: all statements that are judged at one tier on one kind of device.

Holm's correction is over the statements of one target. Over a whole page of targets some of the
small p values are luck; the false-discovery rate says how many of those shown to expect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from repro.evidence.verdicts.verdict import with_discovery_rate
from repro.judge.check import Checked, device_name


def with_study(checks: Sequence[Checked]) -> list[Checked]:
    """Return the checks in order, verdicts with their false-discovery rate by tier and device."""
    studies: dict[tuple[str, str | None], list[int]] = {}
    for index, checked in enumerate(checks):
        place = (checked.selection.tier.value, device_name(checked.evidence))
        studies.setdefault(place, []).append(index)
    final = list(checks)
    for indices in studies.values():
        rated = iter(with_discovery_rate([v for i in indices for v in final[i].verdicts]))
        for i in indices:
            own = [next(rated) for _ in final[i].verdicts]
            final[i] = dataclasses.replace(final[i], verdicts=own)
    return final
