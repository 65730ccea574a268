"""What a message names, whatever its sentence: the thing, the value found, the value needed."""

from __future__ import annotations


def unsaid(text: str, parts: str) -> list[str]:
    """Return which of the parts, given with `|` between them, a text lacks."""
    return [part for part in parts.split("|") if part not in text]
