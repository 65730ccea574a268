r"""Which answers may be compared with a gold at all, before any algebra is done.

math-verify is made to be generous: asked about gold 18 it accepts `9+9`, `36/2` and `19 = 18`, and
from loose text it takes the last number it finds, so that "15 16 17 18" is right. Under
reinforcement learning such generosity is found and used: a policy that writes `9+9` has moved the
arithmetic into the grader. Hence these rules, each of which can only refuse:

* if the gold is a number, the answer must be a *written* number: an integer or decimal, with
  thousands commas, a currency sign, a percent or degree sign, powers of ten; a fraction only if the
  gold is not a whole number. A name before it (`x = 18`) is dropped;
* otherwise braces must balance, no box may be opened inside, no control characters, and an equation
  is compared only with an equation (`\frac12 = \frac13` is not one third), an inequality only with
  an inequality or an interval (math-verify takes the two numbers `1, 2` for `1 < x < 2`).

Digits are ASCII digits: `\d` would match 18 in any script, and `int` would read it.
"""

from __future__ import annotations

import re

_WRAPPERS = (("\\boxed{", "}"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_DIGITS = r"(?:[0-9]{1,3}(?:(?:,|\{,\}|,\\!)[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_POWER = r"(?:\s?(?:\\times|\\cdot)\s?10\^(?:[0-9]|\{-?[0-9]{1,3}\}))?"
_SUFFIX = r"(?:\s?\\?%|\^\\circ|\^\{\\circ\})?"
_NUMBER = re.compile(rf"[-+]?(?:\\?\$|€|£)?\s?{_DECIMAL}{_POWER}{_SUFFIX}")
_FRACTION = re.compile(
    r"[-+]?(?:[0-9]+\s?/\s?[0-9]+|\\[dt]?frac\s?(?:\{[0-9]+\}\s?\{[0-9]+\}|[0-9]\s?[0-9]))"
)
_INTEGER = re.compile(rf"[-+]?{_DIGITS}(?:\.0+)?")
_NAME_BEFORE = re.compile(r"[A-Za-z](?:_[0-9A-Za-z])?\s?=\s?")
_EQUALS = re.compile(r"(?<![<>!\\])=")
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg]eq?|[lg]t)\b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def tidy(text: str) -> str:
    """Return the text without surrounding white space, mathematics signs, box and full stop.

    Minus signs and fixed spaces of Unicode become ASCII; nothing inside is changed otherwise.
    """
    text = text.replace("\u2212", "-").replace("\u00a0", " ").replace("\u202f", " ").strip()
    peeled = True
    while peeled:
        peeled = False
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if (
                len(text) > len(opening) + len(closing)
                and text.startswith(opening)
                and text.endswith(closing)
                and _is_whole(inner, opening)
            ):
                text, peeled = inner.strip(), True
        if text.endswith(".") and not text.endswith(".."):
            text, peeled = text[:-1].strip(), True
    return text


def is_number(text: str) -> bool:
    """Say whether a tidied text is a written number or fraction of ASCII digits."""
    return bool(_NUMBER.fullmatch(text) or _FRACTION.fullmatch(text))


def comparable(gold: str, answer: str) -> str | None:
    """Return the answer in the form to compare with the gold, or None if it may not be compared.

    Parameters
    ----------
    gold, answer
        Tidied texts.
    """
    if not answer or _CONTROL.search(answer) or not braces_balance(answer) or "boxed" in answer:
        return None
    if "=" not in gold:
        answer = _NAME_BEFORE.sub("", answer, count=1) if _NAME_BEFORE.match(answer) else answer
        if _EQUALS.search(answer):
            return None
    is_range = _INEQUALITY.search(answer) or "(" in answer or "[" in answer
    if _INEQUALITY.search(gold) and not is_range:
        return None
    if not is_number(gold):
        return answer
    if not is_number(answer):
        return None
    whole = _INTEGER.fullmatch(gold) is not None
    return None if whole and _FRACTION.fullmatch(answer) else answer


def braces_balance(text: str) -> bool:
    """Say whether every `}` closes an earlier `{` and none is left open."""
    depth = 0
    for sign in re.findall(r"\\[{}]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth < 0:
            return False
    return depth == 0


def _is_whole(inner: str, opening: str) -> bool:
    """Say whether a wrapper's two ends belong together rather than to two wrapped pieces."""
    return braces_balance(inner) if opening == "\\boxed{" else opening not in inner
