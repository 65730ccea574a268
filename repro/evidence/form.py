"""Form: JSON values held against declared Python types before anything in them is looked at.

`require` walks a value beside a type (a dataclass, whose fields are all that there may be, or a
`TypedDict`, lists, unions, `Annotated` with a `Rule`) and raises one sentence on the first member
that does not fit, with its dotted path; so any file, however it was damaged or made, is either in
form or one refusal.

Python's JSON reader takes more than JSON: NaN and infinities, a name given twice (the last counts),
numbers too large for a float (they become infinite), lone surrogates that no page can print.
`read_json` refuses them, and nesting that would exhaust the stack of whoever walks the value later.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import (
    Annotated,
    Any,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

# No record nests deeper than 6; every later walk is recursive.
DEEPEST = 24
# Counts and seeds of up to 63 bits; larger integers cannot become floats.
_MOST = {int: 2**63, float: math.inf}
_SHOWN = 60
# What XML 1.0 cannot carry, not even escaped, and what a terminal takes for a command.
_CONTROL = re.compile("[^\t\n\r\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class FormError(ValueError):
    """JSON that is out of form; the message names the field where there is one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What `Annotated` asks of a value beyond its type, in words and as a test."""

    needs: str
    fits: Callable[[Any], bool]


def _is_time(value: str) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def is_digest(value: Any) -> bool:
    """Whether a value is the text of a SHA-256."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


Count = Annotated[int, Rule("an integer, 0 or more", lambda value: value >= 0)]
Words = Annotated[str, Rule("a string with words in it", lambda value: bool(value.strip()))]
Time = Annotated[str, Rule("an ISO 8601 time with its zone", _is_time)]
Digest = Annotated[str, Rule("a SHA-256 of 64 hex digits", is_digest)]

# Of bare types, and of annotated ones.
_UNIONS = (types.UnionType, Union)
# The types of Python that a JSON value of a declared type may have, and how messages call it.
_LEAVES: Mapping[Any, tuple[frozenset[type], str]] = {
    bool: (frozenset({bool}), "true or false"),
    int: (frozenset({int}), "an integer"),
    float: (frozenset({int, float}), "a number"),
    str: (frozenset({str}), "a string"),
    list: (frozenset({list}), "a list"),
    dict: (frozenset({dict}), "an object"),
    types.NoneType: (frozenset({types.NoneType}), "null"),
}


def require(value: Any, kind: Any, path: str = "") -> None:
    """Hold a JSON value against a declared type.

    Parameters
    ----------
    path
        Dotted, to the value.

    Raises
    ------
    FormError
        On the first member that does not fit: its path, what it is, what it must be.
    """
    origin, arguments = _parts(kind)
    if kind is Any:
        return
    if origin is Annotated:
        base, rule = arguments
        if not isinstance(rule, Rule):
            require(value, rule, path)
        elif type(value) not in _LEAVES[base][0] or not rule.fits(value):
            raise _misfit(value, rule.needs, path)
    elif origin in _UNIONS:
        own = next((one for one in arguments if type(value) in _LEAVES[_base(one)][0]), None)
        if own is None:
            needs = " or ".join(_LEAVES[_base(one)][1] for one in arguments)
            raise _misfit(value, needs, path)
        require(value, own, path)
    else:
        allowed, needs = _LEAVES[_base(kind)]
        if type(value) not in allowed:
            raise _misfit(value, needs, path)
        if origin is list:
            # A long series: without a call for each number.
            plain, fits = _plain_types(arguments[0])
            if not set(map(type, value)) <= plain or (fits and not all(map(fits, value))):
                for place, item in enumerate(value):
                    require(item, arguments[0], f"{path}[{place}]")
        elif origin is dict:
            for name, item in value.items():
                require(item, arguments[1], f"{path}.{name}")
        elif kind not in _LEAVES:
            _require_members(value, kind, path)


def _require_members(value: Mapping[str, Any], kind: Any, path: str) -> None:
    """Hold an object against a dataclass, or a `TypedDict`, which may have other members too."""
    known, required = _fields(kind)
    for name in required:
        if name not in value:
            raise FormError(f"field {_named(f'{path}.{name}')} is missing")
    for name, item in value.items():
        if name in known:
            require(item, known[name], f"{path}.{name}")
        elif not is_typeddict(kind):
            raise FormError(f"unknown field {_named(f'{path}.{name}')}")


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


@functools.cache
def _fields(kind: Any) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the types of a declared object's members, and which of them there must be."""
    if is_typeddict(kind):
        required = tuple(name for name in kind.__annotations__ if name in kind.__required_keys__)
    else:
        nothing = dataclasses.MISSING
        required = tuple(
            field.name
            for field in dataclasses.fields(kind)
            if field.default is nothing and field.default_factory is nothing
        )
    return get_type_hints(kind, include_extras=True), required


@functools.cache
def _plain_types(kind: Any) -> tuple[frozenset[type], Callable[[Any], bool] | None]:
    """Return the types of Python that values of a declared type have, and their rule.

    No types where values nest; None for no rule.
    """
    origin, arguments = _parts(kind)
    if origin is Annotated and isinstance(arguments[1], Rule):
        return _LEAVES[arguments[0]][0], arguments[1].fits
    parts = arguments if origin in _UNIONS else (kind,)
    simple = all(part in _LEAVES for part in parts)
    types_of_parts = [_LEAVES[part][0] for part in parts] if simple else []
    return frozenset[type]().union(*types_of_parts), None


def _misfit(value: Any, needs: str, path: str) -> FormError:
    kind = type(value).__name__
    return FormError(f"field {_named(path)} is {shown(value)}, of kind {kind}; it must be {needs}")


@functools.cache
def _base(kind: Any) -> Any:
    """Return the plain type behind a declared one."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _base(get_args(kind)[0])
    return origin or (kind if kind in _LEAVES else dict)


def _named(path: str) -> str:
    """Return a path for a message, in ASCII."""
    text = ascii(path.lstrip("."))[1:-1]
    # Of a value that nests without end the path does, too.
    return (text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]}...") or "(the whole)"


def shown(value: Any) -> str:
    """Return a value for a message, in short."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def without_controls(text: str) -> str:
    """Return a text with a question mark for each character that a terminal or XML may not take.

    What an error says of a run's own texts may hold colours, or commands to the terminal.
    """
    return _CONTROL.sub("?", text)


def one_line(text: str) -> str:
    """Return a text on one line, without control characters."""
    return " ".join(without_controls(text).split())


def read_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises
    ------
    FormError
        If it is not JSON, or holds what the module names.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
        _require_plain(value)
    except RecursionError:
        raise FormError(f"nests too deep; at most {DEEPEST} levels are read") from None
    except ValueError as error:
        raise FormError(str(error)) from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FormError(f"field {shown(twice)} is given twice")
    return value


def _require_plain(value: Any, path: str = "", depth: int = 0) -> None:
    """Raise `FormError` where a later walk could not bear a value; see the module."""
    kind = type(value)
    if depth >= DEEPEST:
        raise FormError(f"field {_named(path)} nests too deep; at most {DEEPEST} levels are read")
    if kind is dict:
        _require_whole("".join(value), value, path)
        for name, item in value.items():
            _require_plain(item, f"{path}.{name}", depth + 1)
    elif kind is list:
        # Nearly all values are numbers of a series: no call for each of them.
        if set(map(type, value)) == {float} and all(map(math.isfinite, value)):
            value = value[:1]
        for place, item in enumerate(value):
            _require_plain(item, f"{path}[{place}]", depth + 1)
    elif kind is str:
        _require_whole(value, value, path)
    elif kind in (int, float) and not (abs(value) <= _MOST[kind] and math.isfinite(value)):
        raise FormError(
            f"field {_named(path)} is {shown(value)}; numbers must be finite, integers of 63 bits"
        )


def _require_whole(text: str, of: Any, path: str) -> None:
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise FormError(f"field {_named(path)} is {shown(of)}; text must be of whole characters")
