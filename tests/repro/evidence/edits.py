"""Edits of a record's JSON, by dotted paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Raw = dict[str, Any]
Edit = Callable[[Raw], None]


def _place(raw: Raw, path: str) -> tuple[Any, str]:
    *parents, last = path.split(".")
    place: Any = raw
    for name in parents:
        place = place[name]
    return place, last


def put(path: str, value: Any) -> Edit:
    """Return an edit that puts a value at a dotted path."""
    return change(path, lambda _: value)


def change(path: str, how: Callable[[Any], Any]) -> Edit:
    """Return an edit that replaces the value at a dotted path by what `how` makes of it."""

    def edit(raw: Raw) -> None:
        place, last = _place(raw, path)
        place[last] = how(place.get(last))

    return edit


def drop(path: str) -> Edit:
    """Return an edit that removes a dotted path."""

    def edit(raw: Raw) -> None:
        place, last = _place(raw, path)
        del place[last]

    return edit
