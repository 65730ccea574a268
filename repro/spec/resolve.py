"""Configuration values as plain JSON values, so that they can be written and given a digest.

A field added after the first records were blessed carries `OMIT_AT_DEFAULT` and is left out at its
default, so that what a run without it did keeps its description, and its record its digest. Such a
default must mean "as before"; changing what it means needs a new `Target.version`.

A setting that is gone and that recorded runs were described with stands in its class's `RETIRED`,
with the value that all of them had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

OMIT_AT_DEFAULT: Mapping[str, bool] = {"left_out_at_default": True}


def plain_values(value: Any) -> Any:
    """Return dataclasses as dictionaries and sequences as tuples; omit fields at such defaults.

    Anything else is returned as it is.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {
            item.name: plain_values(getattr(value, item.name))
            for item in dataclasses.fields(value)
            if not item.metadata.get("left_out_at_default")
            or getattr(value, item.name) != item.default
        }
        return held | getattr(value, "RETIRED", {})
    if isinstance(value, Mapping):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(plain_values(item) for item in value)
    return value
