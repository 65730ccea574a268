"""What a message names, whatever its sentence: the thing, the value found, the value needed."""

from __future__ import annotations

from collections.abc import Callable


def unsaid(text: str, parts: str) -> list[str]:
    """Return which of the parts, given with `|` between them, a text lacks."""
    return [part for part in parts.split("|") if part not in text]


def refusal(read: Callable[[], object], error: type[Exception]) -> str | None:
    """Return what an input is refused with, or None if it is read; other exceptions are raised."""
    try:
        read()
    except error as raised:
        return str(raised) or "no sentence"
    return None
