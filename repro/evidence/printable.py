"""Text from runs without control characters, for terminals and XML."""

from __future__ import annotations

import re

# Characters that XML 1.0 cannot hold, even escaped, and terminals' control characters.
_CONTROL = re.compile("[^\t\n\r\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# The most letters of a word, such as a path, and of a line.
_WORD, _LINE = 240, 2_000


def without_controls(text: str) -> str:
    """Return a text with a question mark for each control character."""
    return _CONTROL.sub("?", text)


def one_line(text: str) -> str:
    """Return a text on one line, without control characters; of what is long, both ends."""
    return _ends(" ".join(_ends(w, _WORD) for w in without_controls(text).split()), _LINE)


def _ends(text: str, most: int) -> str:
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]}...({left_out} letters left out)...{text[-most // 2 :]}"
