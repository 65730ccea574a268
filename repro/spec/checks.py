"""Checks of values, and sentences on what they refuse.

What a setting may be, its type and its bound, stands with the field: a bound is part of a field's
type (`Annotated[float, Bound(above=0)]`). A class checks its fields in
`__post_init__` (`check_fields`), so TOML, JSON, `--set` and Python meet the same bounds.

A record holds settings as JSON, and its digest is formed of them. So a number is finite, a whole
one has 64 bits, and a text can be encoded: what is accepted here can be read back. Numbers enter
float32 arithmetic, so those that it rounds to nothing, or to no number, are refused as well.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# Magnitudes that leave float32 room for a product or a square.
_SMALLEST, _LARGEST = 1e-18, 1e18
_WHOLE_BITS = 63
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Where a number must lie; `or_zero` admits 0 beside that."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf
    or_zero: bool = False

    def holds(self, value: float) -> bool:
        """Say whether a number lies within the bound."""
        if self.or_zero and value == 0:
            return True
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        """Return the bound in words: `above 0 and at most 1`."""
        sides = {
            "{:g} or more": self.least,
            "above {:g}": self.above,
            "at most {:g}": self.most,
            "below {:g}": self.below,
        }
        words = " and ".join(
            word.format(side) for word, side in sides.items() if math.isfinite(side)
        )
        return f"0, or {words}" if self.or_zero else words


Positive = Annotated[float, Bound(above=0)]
Count = Annotated[int, Bound(least=1)]
Natural = Annotated[int, Bound(least=0)]
_Number = TypeVar("_Number", int, float)
Reader = Callable[[Any, Any, str], Any]


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def in_digits(kind: Callable[[str], _Number], text: str) -> _Number:
    """Return the number that ASCII digits write; `ValueError` for any other text."""
    require(text.isascii() and "_" not in text, f"{shown(text)} is not in the digits 0 to 9")
    return kind(text)


def check_fields(instance: Any, where: str = "") -> None:
    """Raise `ValueError` unless every field of a dataclass instance has its type, within its bound.

    `where` is put before the field's name in messages.
    """
    hints = field_types(instance.__class__)
    for item in dataclasses.fields(instance):
        check_value(getattr(instance, item.name), hints[item.name], f"{where}{item.name}")


class Checked:
    """A dataclass that checks its fields; `WHERE` is put before their names in messages."""

    __slots__ = ()
    WHERE = ""

    def __post_init__(self) -> None:
        check_fields(self, self.WHERE)


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """Return the types of a class's fields by name, bounds included."""
    return get_type_hints(kind, include_extras=True)


def check_value(value: Any, hint: Any, path: str, read: Reader | None = None) -> Any:
    """Return a value of a type, within its bound; raise `ValueError`, which names `path`, if not.

    `read` is given the type, the value and the path, of a list's members too, and returns the value
    to check.
    """
    origin, members = get_origin(hint), get_args(hint)
    value = value if read is None else read(hint, value, path)
    if origin is Annotated:
        base, *bounds = members
        value = check_value(value, base, path, read)
        for bound in bounds:
            require(bound.holds(value), f"{path} is {value!r}; it must be {bound}")
    elif origin in (Union, types.UnionType):
        (needed,) = set(members) - {type(None)}
        return None if value is None else check_value(value, needed, path, read)
    elif origin is Literal:
        is_one = isinstance(value, str) and value in members
        require(is_one, f"{path} is {shown(value)}; it must be one of {', '.join(members)}")
    elif origin is tuple:
        one = isinstance(value, tuple)
        require(one, f"{path} is {shown(value)}; it must be a list, such as [0, 1]")
        hints = members[:1] * len(value) if members[-1:] == (...,) else members
        count = len(value)
        require(count == len(hints), f"{path} has {count} values; it must have {len(hints)}")
        each = enumerate(zip(value, hints, strict=True))
        return tuple(check_value(v, own, f"{path}[{n}]", read) for n, (v, own) in each)
    elif hint is not Any:
        _check_plain(value, hint, path)
    return value


def _check_plain(value: Any, kind: type, path: str) -> None:
    """Raise `ValueError` unless a value is of a class; 1 is a number, and True is none."""
    is_one = isinstance(value, (int, float) if kind is float else kind)
    is_one &= kind is bool or not isinstance(value, bool)
    words = "a table of values" if dataclasses.is_dataclass(kind) else _WORDS.get(kind, str(kind))
    require(is_one, f"{path} is {shown(value)}; it must be {words}")
    if kind is float:
        held = value == 0 or _SMALLEST <= abs(value) <= _LARGEST
        size = f"from {_SMALLEST:g} to {_LARGEST:g} in size, or 0"
        require(held, f"{path} is {shown(value)}; it must be a number {size}")
    elif kind is int:
        held = abs(value) < 1 << _WHOLE_BITS
        require(held, f"{path} is {shown(value)}; it must have at most {_WHOLE_BITS} bits")
    elif kind is str:
        held = value.isprintable() or value.encode(errors="ignore").decode() == value
        require(held, f"{path} is {shown(value)}; it must be text that UTF-8 can hold")


def shown(value: Any, most: int = _SHOWN_CHARACTERS) -> str:
    """Return a value as a message names it, on one line, cut after `most` characters."""
    if isinstance(value, int) and value.bit_length() > 4 * most:
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of a user's own class
        text = f"a {type(value).__name__} that cannot be shown"
    line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text[:most])
    return line if len(text) <= most else f"{line}..."


def all_of(*checks: Callable[[], Any]) -> list[Any]:
    """Return what each check returns; all that they refuse is said in one `ValueError`."""
    found, refused = tried(*checks)
    require(not refused, "; ".join(dict.fromkeys(refused)))
    return found


def tried(*checks: Callable[[], Any]) -> tuple[list[Any], list[str]]:
    """Return what each check returns, None where it refuses, and what is refused."""
    found: list[Any] = []
    refused = []
    for check in checks:
        try:
            found.append(check())
        except ValueError as error:
            found.append(None)
            refused.append(str(error))
    return found, refused


# Most names that a sentence lists whole, and how many of more.
_LISTED, _NEAR = 16, 3


def unknown(what: str, known: Sequence[str], *names: str) -> str:
    """Return a sentence on names that are not known: the nearest of each, then all or some."""
    listed = f"the {what}s are {', '.join(known)}"
    if len(known) > _LISTED:
        near = [difflib.get_close_matches(name, known, n=_NEAR, cutoff=0.0) for name in names]
        listed = f"the nearest of {len(known)} {what}s are {', '.join(dict.fromkeys(chain(*near)))}"
    asked = ", ".join(f"{name!r}{meant(name, known)}" for name in names)
    return f"there is no {what} {asked}; {listed}"


def meant(name: str, known: Sequence[str]) -> str:
    """Return the question whether the nearest known name was meant; empty where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
