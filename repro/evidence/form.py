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
    NoReturn,
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


class _Flaw(Exception):  # noqa: N818 - becomes a `FormError` once its path is whole
    """A sentence with a gap for the path, which grows from the inside out."""

    def __init__(self, sentence: str, path: str = "") -> None:
        self.sentence, self.path = sentence, path

    def inside(self, step: str) -> _Flaw:
        """Return the flaw as seen one level further out."""
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        path = self.path.lstrip(".")
        # Of a value that nests without end the path does, too.
        path = path if len(path) <= 2 * _SHOWN else f"{path[:_SHOWN]}..."
        return self.sentence.replace("{}", path or "(the whole)", 1)


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

_Check = Callable[[Any], None]
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


def require(value: Any, kind: Any) -> None:
    """Hold a JSON value against a declared type.

    Raises
    ------
    FormError
        On the first member that does not fit: its path, what it is, what it must be.
    """
    try:
        _check_of(kind)(value)
    except _Flaw as flaw:
        raise FormError(str(flaw)) from None


@functools.cache
def _check_of(kind: Any) -> _Check:
    """Return what raises `_Flaw` for a value that is not of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: None
    if origin is Annotated:
        return _ruled(*arguments)
    if origin in _UNIONS:
        return _one_of(arguments)
    if origin is list:
        return _listed(arguments[0])
    if origin is dict:
        return _members({}, (), _check_of(arguments[1]), closed=False)
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        known = {
            name: _check_of(own) for name, own in get_type_hints(kind, include_extras=True).items()
        }
        return _members(known, _required(kind), None, closed=not is_typeddict(kind))
    allowed, needs = _LEAVES[kind]
    return lambda value: None if type(value) in allowed else _misfit(value, needs)


def _required(kind: Any) -> tuple[str, ...]:
    if is_typeddict(kind):
        return tuple(name for name in kind.__annotations__ if name in kind.__required_keys__)
    nothing = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return tuple(f.name for f in fields if f.default is nothing and f.default_factory is nothing)


def _misfit(value: Any, needs: str) -> NoReturn:
    raise _Flaw(f"field {{}} is {shown(value)}, of kind {type(value).__name__}; it must be {needs}")


def _ruled(base: Any, rule: Any) -> _Check:
    """Return the check of an annotated type; of one annotated with another type, that one's."""
    if not isinstance(rule, Rule):
        return _check_of(rule)
    allowed = _LEAVES[base][0]

    def check(value: Any) -> None:
        if type(value) not in allowed or not rule.fits(value):
            _misfit(value, rule.needs)

    return check


def _base(kind: Any) -> Any:
    """Return the plain type behind a declared one."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _base(get_args(kind)[0])
    return origin or (kind if kind in _LEAVES else dict)


def _one_of(kinds: tuple[Any, ...]) -> _Check:
    needs = " or ".join(_LEAVES[_base(kind)][1] for kind in kinds)
    checks = {exact: _check_of(kind) for kind in kinds for exact in _LEAVES[_base(kind)][0]}

    def check(value: Any) -> None:
        own = checks.get(type(value))
        if own is None:
            _misfit(value, needs)
        own(value)

    return check


def _listed(kind: Any) -> _Check:
    one = _check_of(kind)
    parts = get_args(kind) if get_origin(kind) in _UNIONS else (kind,)
    simple = all(part in _LEAVES for part in parts)
    allowed = frozenset[type]().union(*(_LEAVES[part][0] for part in parts)) if simple else ()

    def check(value: Any) -> None:
        if type(value) is not list:
            _misfit(value, "a list")
        # A long series: without a call for each number.
        if allowed and allowed >= set(map(type, value)):
            return
        for place, item in enumerate(value):
            try:
                one(item)
            except _Flaw as flaw:
                raise flaw.inside(f"[{place}]") from None

    return check


def _members(
    known: Mapping[str, _Check], required: tuple[str, ...], others: _Check | None, *, closed: bool
) -> _Check:
    def check(value: Any) -> None:
        if type(value) is not dict:
            _misfit(value, "an object")
        for name in required:
            if name not in value:
                raise _Flaw("field {} is missing", f".{name}")
        for name, item in value.items():
            own = known.get(name, others)
            if own is None:
                if closed:
                    raise _Flaw("unknown field {}", f".{_spelt(name)}")
                continue
            try:
                own(item)
            except _Flaw as flaw:
                raise flaw.inside(f".{_spelt(name)}") from None

    return check


def _spelt(name: str) -> str:
    return ascii(name)[1:-1]


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
    except (ValueError, _Flaw) as error:
        raise FormError(str(error)) from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FormError(f"field {shown(twice)} is given twice")
    return value


def _require_plain(value: Any, depth: int = 0) -> None:
    """Raise `_Flaw` where a later walk could not bear a value; see the module."""
    kind = type(value)
    if depth >= DEEPEST:
        raise _Flaw(f"field {{}} nests too deep; at most {DEEPEST} levels are read")
    if kind is dict:
        _require_whole("".join(value), value)
        for name, item in value.items():
            try:
                _require_plain(item, depth + 1)
            except _Flaw as flaw:
                raise flaw.inside(f".{_spelt(name)}") from None
    elif kind is list:
        # Nearly all values are numbers of a series: no call for each of them.
        if set(map(type, value)) == {float} and all(map(math.isfinite, value)):
            value = value[:1]
        for place, item in enumerate(value):
            try:
                _require_plain(item, depth + 1)
            except _Flaw as flaw:
                raise flaw.inside(f"[{place}]") from None
    elif kind is str:
        _require_whole(value, value)
    elif kind in (int, float) and not (abs(value) <= _MOST[kind] and math.isfinite(value)):
        raise _Flaw(f"field {{}} is {shown(value)}; numbers must be finite, integers of 63 bits")


def _require_whole(text: str, of: Any) -> None:
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _Flaw(f"field {{}} is {shown(of)}; text must be of whole characters")
