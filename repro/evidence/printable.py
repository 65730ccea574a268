"""Text from runs without control characters, for terminals and XML."""

from __future__ import annotations

import re

# Characters that XML 1.0 cannot hold, even escaped, and terminals' control characters.
_CONTROL = re.compile("[^\t\n\r\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def without_controls(text: str) -> str:
    """Return a text with a question mark for each control character."""
    return _CONTROL.sub("?", text)


def one_line(text: str) -> str:
    """Return a text on one line, without control characters."""
    return " ".join(without_controls(text).split())
