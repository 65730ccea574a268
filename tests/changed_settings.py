"""A run with one of its settings replaced, whichever it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


def places(value: Any, where: str = "") -> Iterator[str]:
    """Yield the dotted path of every setting of nested dataclasses, tables included."""
    for item in dataclasses.fields(value):
        path, inner = f"{where}{item.name}", getattr(value, item.name)
        yield path
        if dataclasses.is_dataclass(inner):
            yield from places(inner, f"{path}.")


def with_value(instance: Any, path: str, value: Any) -> Any:
    """Return a dataclass instance with the setting at a dotted path replaced."""
    name, _, rest = path.partition(".")
    inner = with_value(getattr(instance, name), rest, value) if rest else value
    return dataclasses.replace(instance, **{name: inner})
